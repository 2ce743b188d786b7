"""The trainer's container among those that a cluster adds."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.pods.containers import (
    CONTAINER_ANNOTATION,
    DEFAULT_ANNOTATION,
    others_run,
    trainer_container,
    trainer_status,
)

SOCKET = [{"name": "HOLDFAST_SOCKET", "value": "/run/holdfast/sockets/daemon.sock"}]
MOUNT = [{"name": "holdfast", "mountPath": "/run/holdfast"}]
VOLUMES = [{"name": "holdfast", "csi": {"driver": "holdfast.dev"}}]
NAMES = ("trainer", "istio-proxy", "uploader")


def pod(annotations: Object, order: tuple[str, ...] = NAMES, **containers: Any) -> Object:
    """A pod whose containers come in this order, with more fields of some of them."""
    given = [{"name": name, **containers.get(name.partition("-")[0], {})} for name in order]
    return {
        "metadata": {"annotations": annotations},
        "spec": {"containers": given, "volumes": VOLUMES},
        "status": {},
    }


@pytest.mark.parametrize("order", list(permutations(NAMES)))
@pytest.mark.parametrize(
    ("annotations", "containers"),
    [
        ({CONTAINER_ANNOTATION: "trainer"}, {}),
        # What the operator or the pods' controller has written counts for more than any guess.
        ({CONTAINER_ANNOTATION: "trainer", DEFAULT_ANNOTATION: "uploader"}, {}),
        ({CONTAINER_ANNOTATION: "trainer"}, {"uploader": {"env": SOCKET}}),
        # Pods of other controllers, and those of operators before this annotation.
        ({}, {"trainer": {"env": SOCKET}}),
        ({}, {"trainer": {"volumeMounts": MOUNT}}),
        ({DEFAULT_ANNOTATION: "istio-proxy"}, {"trainer": {"env": SOCKET}}),
        ({CONTAINER_ANNOTATION: "renamed"}, {"trainer": {"env": SOCKET}}),
        # A webhook that gives every container the same variables and volumes.
        (
            {DEFAULT_ANNOTATION: "trainer"},
            {name: {"env": SOCKET, "volumeMounts": MOUNT} for name in ("trainer", "istio")},
        ),
        ({DEFAULT_ANNOTATION: "trainer"}, {}),
    ],
)
def test_the_trainer_is_found_in_any_order(
    order: tuple[str, ...], annotations: Object, containers: dict[str, Object]
) -> None:
    raw = pod(annotations, order, **containers)
    assert trainer_container(raw)["name"] == "trainer"
    for listed in permutations(order):
        raw["status"]["containerStatuses"] = [{"name": name, "state": {}} for name in listed]
        assert trainer_status(raw)["name"] == "trainer"


def test_without_any_sign_the_first_container_counts() -> None:
    assert trainer_container(pod({}))["name"] == "trainer"
    assert trainer_container({"metadata": {}}) == {} == trainer_status({"metadata": {}})


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
def test_a_sidecar_of_either_kind_works_until_it_has_ended(kind: str) -> None:
    raw = pod({CONTAINER_ANNOTATION: "trainer"})
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0}}}
    states: list[tuple[Object, bool]] = [
        ({"running": {}}, True),
        ({"terminated": {}}, False),
        ({}, False),
    ]
    for state, works in states:
        sidecar = {"name": "uploader", "state": state}
        raw["status"] = {"containerStatuses": [ended]}
        raw["status"][kind] = [*raw["status"].get(kind, []), sidecar]
        assert others_run(raw) is works
    assert not others_run(pod({}))
