"""The certificates of the chart before a real Helm: which there are, and who is given which."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from chart_rendering import DRY, VALUE_SETS, Document, Renderer
from cluster import Cluster
from cryptography import x509

from holdfast_protos.connections.identity import Identity, Role


@pytest.fixture
def render(cluster: Cluster, tmp_path: Path) -> Renderer:
    return Renderer(cluster, tmp_path)


def _secrets(render: Renderer, values: Document) -> dict[str, list[str]]:
    """Role → the flags of its identity, and the secret that they are about."""
    found = {}
    for kind, role in (("DaemonSet", "daemon"), ("Deployment", "operator")):
        pod = render.one(kind, f"holdfast-{role}", values)["spec"]["template"]["spec"]
        container = pod["containers"][0]
        flags = [
            arg for arg in container["args"] if arg.startswith(("--tls", "--insecure", "--bulk="))
        ]
        mounted = [each["name"] for each in container["volumeMounts"] if each["name"] == "tls"]
        secrets = [
            each["secret"]["secretName"] for each in pod["volumes"] if each["name"] in mounted
        ]
        found[role] = [*flags, *secrets]
    return found


def test_each_role_gets_its_own_certificate(render: Renderer) -> None:
    shown = ["--tls=/etc/holdfast/tls", f"--tls-domain={DRY}"]
    assert _secrets(render, {}) == {
        "daemon": [*shown, "--bulk=authenticated", "holdfast-daemon-tls"],
        "operator": [*shown, "holdfast-operator-tls"],
    }
    assert _secrets(render, VALUE_SETS["own certificates"]) == {
        "daemon": [*shown, "--bulk=encrypted", "d"],
        "operator": [*shown, "o"],
    }
    assert _secrets(render, VALUE_SETS["insecure"]) == {
        "daemon": ["--insecure"],
        "operator": ["--insecure"],
    }


def test_generated_certificates_are_what_each_role_needs(render: Renderer, tmp_path: Path) -> None:
    for role in Role:
        secret = render.one("Secret", f"holdfast-{role}-tls")
        folder = tmp_path / role
        folder.mkdir()
        for name, text in secret["data"].items():
            (folder / name).write_bytes(base64.b64decode(text))
        certificate = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert names.value.get_values_for_type(x509.DNSName) == [f"{role}.{DRY}.holdfast"]
        assert Identity(folder, DRY).current().version == 1, "key and certificate fit"


@pytest.mark.parametrize("issuer", [{}, {"name": "ours", "kind": "ClusterIssuer"}])
def test_cert_manager_makes_them_if_asked(render: Renderer, issuer: Document) -> None:
    manager = {"certManager": {"issuerRef": issuer}, "source": "cert-manager"}
    documents = render.documents({"security": {"certificates": manager}})
    assert not [each for each in documents if each["kind"] == "Secret"]
    made = {
        each["spec"]["secretName"]: each["spec"]
        for each in documents
        if each["kind"] == "Certificate" and not each["spec"].get("isCA")
    }
    assert sorted(made) == ["holdfast-daemon-tls", "holdfast-operator-tls"]
    assert made["holdfast-daemon-tls"]["dnsNames"] == [f"daemon.{DRY}.holdfast"]
    signer = issuer or {"name": "holdfast-ca", "kind": "Issuer"}
    assert [spec["issuerRef"] for spec in made.values()] == [signer, signer]
    issuers = {each["metadata"]["name"] for each in documents if each["kind"] == "Issuer"}
    assert issuers == (set() if issuer else {"holdfast-ca", "holdfast-ca-root"})
