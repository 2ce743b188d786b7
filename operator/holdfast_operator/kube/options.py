"""The command line of `holdfast-operator`. Name, namespace and address of its pod come from the
environment; flags override them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import NAMESPACE, StorageLocation, read_location
from holdfast_core.suspect_nodes import SuspectPolicy
from holdfast_operator.kube.pods.manifests import TrainerVolume
from holdfast_protos.command_line import add_version
from holdfast_protos.connections.identity import add_options

DESCRIPTION = "Runs the MoETrainingJobs of a Kubernetes cluster."

_EPILOG = """
In a cluster this runs as the Deployment holdfast-operator of the chart. By hand, for development:

  holdfast certificates --out ~/holdfast-tls
  holdfast-operator --kubeconfig ~/.kube/config --namespace holdfast-system --address 10.0.0.5 \\
                    --tls ~/holdfast-tls/operator

Several replicas may run: one holds the Lease and works, the others wait. A replica that loses its
Lease exits, and is expected to be restarted.

`holdfast-operator release-finalizers`, with the same flags, stops the operator and lets every job
be deleted without one. Run it just before uninstalling Holdfast.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of this operator."""

    kubeconfig: str
    context: str
    namespace: str
    """Namespace in which Holdfast is installed."""
    watch_namespaces: tuple[str, ...]
    """Namespaces whose jobs are carried out; empty for all."""
    identity: str
    """Name of this replica: the name of its pod."""
    address: str
    """Address at which daemons reach this replica."""
    listen: str
    control_port: int
    http_port: int
    service: str
    """The Service to which daemons connect."""
    lease: str
    daemon_selector: str
    """Labels of the daemons' pods in `namespace`."""
    renew_daemons: bool
    """Whether to delete the pods of daemons of an older version, when no job loses by it."""
    trainer_volume: TrainerVolume
    """How trainers' pods get at the daemon's sockets."""
    disruption_budgets: bool
    """Whether jobs get a PodDisruptionBudget."""
    kueue: bool
    """Whether jobs may name a queue of Kueue."""
    notice: tuple[str, ...]
    """More taints and conditions that announce the end of a node."""
    node_record: str
    """Name of the ConfigMap with the failures of nodes; empty to remember none."""
    suspect_nodes: SuspectPolicy
    """What to do to nodes that fail again and again."""
    storage_locations: tuple[StorageLocation, ...]
    """Locations that jobs may persist to; empty for none."""
    tls: str
    """Directory of this replica's certificate."""
    tls_domain: str
    insecure: bool
    log_level: str


def parse(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Options:
    """Parse the options; exits with a message when they are invalid."""
    parser = argparse.ArgumentParser(
        prog="holdfast-operator",
        description=DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_version(parser)
    add("--kubeconfig", default="", metavar="FILE", help="default: the pod's service account")
    add("--context", default="", metavar="NAME", help="of the kubeconfig; default: its current one")
    add(
        "--namespace",
        default=environment.get("POD_NAMESPACE", "holdfast-system"),
        metavar="NAME",
        help="where Holdfast is installed (default: $POD_NAMESPACE, else holdfast-system)",
    )
    add(
        "--watch-namespace",
        action="append",
        default=[],
        dest="watch_namespaces",
        metavar="NAME",
        help="a namespace of the jobs to run; may be repeated; default: all namespaces",
    )
    add(
        "--identity",
        default=environment.get("POD_NAME", ""),
        metavar="NAME",
        help="of this replica (default: $POD_NAME)",
    )
    add(
        "--address",
        default=environment.get("POD_IP", ""),
        metavar="IP",
        help="where daemons reach this replica (default: $POD_IP)",
    )
    add("--listen", default="", metavar="HOST", help="listen only here (default: everywhere)")
    add("--control-port", type=int, default=7700, metavar="PORT", help="default: %(default)s")
    add("--http-port", type=int, default=7704, metavar="PORT", help="default: %(default)s")
    add("--service", default="holdfast-control", metavar="NAME", help="default: %(default)s")
    add("--lease", default="holdfast-operator", metavar="NAME", help="default: %(default)s")
    add(
        "--daemon-selector",
        default="app.kubernetes.io/component=daemon,app.kubernetes.io/part-of=holdfast",
        metavar="LABELS",
        help="of the daemons' pods (default: %(default)s)",
    )
    _add_nodes(parser)
    _add_locations(parser)
    add_options(add, environment)
    levels = ["debug", "info", "warning", "error"]
    add("--log-level", default="info", choices=levels, help="default: %(default)s")
    found = parser.parse_args(arguments)
    for flag, value in (("--identity", found.identity), ("--address", found.address)):
        if not value:
            variable = "POD_NAME" if flag == "--identity" else "POD_IP"
            parser.error(f"{flag} is missing: give it, or set {variable}")
    if found.suspect_nodes is not SuspectPolicy.NONE and not found.node_record:
        parser.error("--suspect-nodes needs the failures of nodes: give --node-record as well")
    found.notice = tuple(found.notice)
    found.watch_namespaces = tuple(sorted({name for name in found.watch_namespaces if name}))
    found.storage_locations = tuple(found.storage_locations)
    return Options(**vars(found))


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the options about daemons and nodes."""
    add = parser.add_argument
    add(
        "--renew-daemons",
        action="store_true",
        help="replace daemons of an older version, one of each parity group at a time and only "
        "while its jobs are protected; for a DaemonSet whose updateStrategy is OnDelete",
    )
    add(
        "--trainer-volume",
        type=TrainerVolume,
        default=TrainerVolume.CSI,
        choices=list(TrainerVolume),
        help="how trainers' pods get at the daemon's sockets: by an inline volume of the daemons' "
        "CSI driver, or by a hostPath, which Pod Security allows in privileged namespaces only "
        "(default: %(default)s)",
    )
    add(
        "--no-disruption-budgets",
        dest="disruption_budgets",
        action="store_false",
        help="make no PodDisruptionBudgets, by which evictions leave as many pods of a job as its "
        "redundancy needs",
    )
    add(
        "--kueue",
        action="store_true",
        help="let Kueue admit jobs that name a queue; needs Kueue's v1beta2 API",
    )
    add(
        "--notice",
        action="append",
        default=[],
        metavar="NAME",
        help="a taint's key or a node condition's type that announces the end of a node, besides "
        "those of the usual clouds and autoscalers; may be repeated",
    )
    add(
        "--node-record",
        default="",
        metavar="NAME",
        help="a ConfigMap in the namespace of Holdfast, which exists, for the failures of nodes: "
        "members go to nodes that have failed less; default: none are remembered",
    )
    add(
        "--suspect-nodes",
        type=SuspectPolicy,
        default=SuspectPolicy.NONE,
        choices=list(SuspectPolicy),
        help="whether to taint or cordon nodes that fail again and again, at most one in ten, "
        "until their failures have faded; needs --node-record (default: %(default)s)",
    )


def _add_locations(parser: argparse.ArgumentParser) -> None:
    def location(text: str) -> StorageLocation:
        try:
            return read_location(text)
        except InvalidJobError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(
        "--storage-location",
        action="append",
        default=[],
        type=location,
        dest="storage_locations",
        metavar="JSON",
        help=f'where jobs may persist to: {{"prefix": "s3://copies/{NAMESPACE}", "namespaces": '
        '["team-a"]}; without namespaces, jobs of all; may be given again; without any, nowhere',
    )
