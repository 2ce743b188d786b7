"""The operator's metrics: one list of definitions, and the collectors made from it.

The exposition, the documentation and the dashboard are made from this list, so that they cannot
disagree. A series of a single job or node is a gauge that `replace_all` writes, so that it ends
when its job or node does. No pod is named, and causes are those of failure rules. No decision may
depend on a metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from holdfast_core.job.failures import On
from holdfast_core.metric_definitions import JOB_LABELS, Definition, MetricType
from holdfast_core.node_failures import FailureKind
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.culprits import HangKind

PREFIX = "holdfast_operator_"

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW_S = (0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _counter(name: str, help: str, *labels: str, **values: Iterable[str]) -> Definition:
    return Definition(
        name=name,
        type=MetricType.COUNTER,
        help=help,
        labels=(*labels, *values),
        values=tuple((label, tuple(each)) for label, each in values.items()),
        prefix=PREFIX,
    )


def _gauge(name: str, help: str, *labels: str) -> Definition:
    return Definition(name=name, type=MetricType.GAUGE, help=help, labels=labels, prefix=PREFIX)


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Definition:
    return Definition(
        name=name, type=MetricType.HISTOGRAM, help=help, buckets=buckets, prefix=PREFIX
    )


DEFINITIONS: tuple[Definition, ...] = (
    _gauge("leader", "1 while this replica holds the Lease."),
    _gauge("insecure", "1 while daemons and the control loop do not authenticate each other."),
    _gauge(
        "certificate_expires_timestamp_seconds",
        "Expiry of the operator's certificate, or of the last of its CAs, in Unix time.",
        "certificate",
    ),
    _gauge("jobs", "Jobs in each phase.", "phase"),
    _gauge("job_phase", "1 for the phase that a job is in.", *JOB_LABELS, "phase"),
    _gauge("job_recoveries", "Recoveries of a job so far.", *JOB_LABELS),
    _gauge("job_members_missing", "Members without which a job goes on.", *JOB_LABELS),
    _gauge(
        "job_unprotected", "1 while ranks of a job train and their saves are refused.", *JOB_LABELS
    ),
    _gauge(
        "job_stragglers", "Ranks for which the others of their job wait in each step.", *JOB_LABELS
    ),
    _gauge(
        "job_slow_links",
        "Nodes of a job whose links are slow beside those of its others, and single slow links.",
        *JOB_LABELS,
    ),
    _gauge("job_divergences", "How often replicas of a job have diverged so far.", *JOB_LABELS),
    _gauge(
        "oldest_look_seconds",
        "Time since the last look at the job that has gone longest without one.",
    ),
    _gauge("ranks_desired", "Ranks of all jobs that have not ended."),
    _gauge("ranks_ready", "Ranks at work."),
    _gauge("members_desired", "Members that the jobs that have not ended want."),
    _gauge("members_active", "Members that these jobs have."),
    _gauge("members_minimum", "Members without which these jobs would not go on."),
    _gauge("members_joining", "Missing members of these jobs whose pods start or wait."),
    _gauge("jobs_short", "Jobs that go on without some of their members."),
    _gauge("daemons_connected", "Daemons whose Control stream is open."),
    _gauge(
        "daemon_missing",
        "1 for a node that has a daemon's pod, or had a daemon, and has none that is connected.",
        "node",
    ),
    _gauge("daemons_outdated", "Daemons of an older version that the operator has yet to replace."),
    _histogram(
        "reconcile_seconds", "Time from the event that woke a job's loop to its decision.", _FAST_S
    ),
    _histogram("act_seconds", "Time to carry out the actions of one decision.", _FAST_S),
    _counter("recoveries", "Recoveries begun.", cause=On),
    _counter(
        "recoveries_finished", "Recoveries after which training ran again.", source=RestoreSource
    ),
    _histogram(
        "recovery_seconds", "Time from the decision on a recovery until ranks are at work.", _SLOW_S
    ),
    _histogram(
        "replacement_seconds",
        "Time from a lost node's last heartbeat to the creation of the pod that replaces it.",
        _SLOW_S,
    ),
    _counter("node_failures", "Failures that count against a node.", kind=FailureKind),
    _counter("hangs", "Hangs whose processes were inspected.", kind=HangKind),
    _counter("nodes_avoided", "Choices in which nodes were avoided because they had failed."),
    _gauge("nodes_failed", "Nodes that have failed lately, and are avoided."),
    _gauge("idle_node_failed", "1 for a node without a job that fails its checks.", "node"),
    _counter("jobs_ended", "Jobs that ended.", outcome=Outcome),
    _counter("pods_created", "Trainer pods created."),
    _counter("pods_deleted", "Trainer pods deleted.", force=("true", "false")),
    _counter(
        "status_writes",
        "Writes of a job's status.",
        result=("written", "conflict", "failed"),
    ),
    _counter("events_dropped", "Events that could not be posted."),
    _counter("api_requests", "Requests to the API server.", "verb", "resource", "code"),
    _counter("watch_restarts", "Watches that began again after an error.", "resource"),
    _counter(
        "action_failures", "Actions that the API server refused; they are tried again.", "action"
    ),
)


class OperatorMetrics:
    """The metrics of one operator, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._collectors = {each.name: _make(each, self.registry) for each in DEFINITIONS}
        self._shown: dict[str, frozenset[tuple[str, ...]]] = {}
        for each in DEFINITIONS:
            if each.type is MetricType.COUNTER and each.labels:
                for labels in each.series():
                    self._collectors[each.name].labels(**labels)

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Add to the counter `name`."""
        counter = self._find(name, labels)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set the gauge `name`."""
        gauge = self._find(name, labels)
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def replace_all(self, name: str, values: Mapping[tuple[str, ...], float], /) -> None:
        """Make `values` all the series of the gauge `name`, by the values of its labels in order. A
        series that stays has no gap: after a gap, an alert would begin to wait again."""
        gauge = self._collectors[name]
        assert isinstance(gauge, Gauge)
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        for labels in self._shown.get(name, frozenset()) - values.keys():
            gauge.remove(*labels)
        self._shown[name] = frozenset(values)

    def follow(self, name: str, read: Callable[[], float], /, **labels: str) -> None:
        """Make the gauge `name` show what `read` returns at each exposition."""
        gauge = self._find(name, labels)
        assert isinstance(gauge, Gauge)
        gauge.set_function(read)

    def observe(self, name: str, seconds: float, /) -> None:
        """Add an observation to the histogram `name`."""
        histogram = self._find(name, {})
        assert isinstance(histogram, Histogram)
        histogram.observe(seconds)

    def request(self, verb: str, resource: str, code: str) -> None:
        """Count a request to the API server."""
        self.add("api_requests", verb=verb, resource=resource, code=code)

    def _find(self, name: str, labels: Mapping[str, str]) -> MetricWrapperBase:
        collector = self._collectors[name]
        return collector.labels(**labels) if labels else collector


def _make(definition: Definition, registry: CollectorRegistry) -> MetricWrapperBase:
    name, labels = definition.prefix + definition.name, definition.labels
    if definition.type is MetricType.COUNTER:
        return Counter(name, definition.help, labels, registry=registry)
    if definition.type is MetricType.GAUGE:
        return Gauge(name, definition.help, labels, registry=registry)
    return Histogram(name, definition.help, labels, registry=registry, buckets=definition.buckets)
