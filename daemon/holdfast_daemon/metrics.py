"""The daemon's metrics: one list of definitions, and the collectors made from it.

The definitions are data, so that the exposition, the documentation and the dashboards are generated
from one list and cannot disagree. Every label has a bounded set of values: jobs are forgotten when
they end (`DaemonMetrics.forget_job`), and causes are the codes of errors, never their messages.

Must not: be the basis of any decision. Metrics are written by code and read by people.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from holdfast_core.metric_definitions import JOB_LABELS, Definition, MetricType, job_labels
from holdfast_host.results import Outcome
from holdfast_protos.connections.identity import ENDS

_DURATION_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


def _counter(
    name: str, help: str, *labels: str, unit: str = "", **values: tuple[str, ...]
) -> Definition:
    return Definition(
        name=name,
        type=MetricType.COUNTER,
        help=help,
        unit=unit,
        labels=(*labels, *values),
        values=tuple(values.items()),
    )


def _gauge(
    name: str, help: str, *labels: str, unit: str = "", **values: tuple[str, ...]
) -> Definition:
    return Definition(
        name=name,
        type=MetricType.GAUGE,
        help=help,
        unit=unit,
        labels=(*labels, *values),
        values=tuple(values.items()),
    )


def _durations(
    name: str, help: str, *labels: str, buckets: tuple[float, ...] = _DURATION_BUCKETS_S
) -> Definition:
    return Definition(
        name=name,
        type=MetricType.HISTOGRAM,
        help=help,
        unit="seconds",
        labels=labels,
        buckets=buckets,
    )


_STAGES = ("committed", "protected")
_GENERATION_STAGES = (*_STAGES, "persisted")
_PART = ("experts", "other")
_SKIP = ("no_free_slot", "incomplete")
_FAILURE = ("storage", "memory_budget")
_BYTES_KIND = ("arena", "parity", "manifest", "wire")
_DENIAL = ("unauthenticated", "access_denied")
_REVIEW = ("allowed", "denied", "failed", "shed")
_MESSAGE = ("report", "directive", "suspect")
_LIMITED = ("trainers", "peers")
_CROWDED = ("arena", "bulk", "http")
_CHECKED = tuple(outcome.value.replace(" ", "_") for outcome in Outcome)

DEFINITIONS: tuple[Definition, ...] = (
    _counter("snapshots", "Snapshots of a rank that reached a stage.", *JOB_LABELS, stage=_STAGES),
    _gauge(
        "generation_step",
        "Step of the newest generation at a stage.",
        *JOB_LABELS,
        stage=_GENERATION_STAGES,
    ),
    _counter(
        "saves_skipped", "Saves that were skipped; training went on.", *JOB_LABELS, cause=_SKIP
    ),
    _counter("saves_failed", "Saves that began and failed.", *JOB_LABELS, cause=_FAILURE),
    _counter(
        "arenas_overgrown",
        "Times that an arena was larger than granted; the rest was freed.",
        *JOB_LABELS,
    ),
    _counter(
        "saves_skipped_reported",
        "Saves skipped, as counted by the ranks on this node.",
        *JOB_LABELS,
    ),
    _counter(
        "saves_failed_reported", "Saves failed, as counted by the ranks on this node.", *JOB_LABELS
    ),
    _counter(
        "bubble_seconds",
        "Time for which the processes of ranks on this node have waited for other pipeline stages; "
        "near 0 with NCCL, where devices wait instead.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _counter(
        "bubble_copied_bytes",
        "Bytes of snapshots that the ranks on this node have copied in these times.",
        *JOB_LABELS,
        unit="bytes",
    ),
    _gauge(
        "save_period_seconds",
        "Time between the newest two saves, of the slowest rank here.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _gauge(
        "save_staged_seconds",
        "Time from a save until its tensors could change again, of the slowest rank here.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _gauge(
        "save_interval_steps",
        "Steps from snapshot to snapshot, where the job leaves them to measurement; else 0.",
        *JOB_LABELS,
    ),
    _gauge(
        "save_window_steps",
        "Steps of the newest sparse window; 0 where snapshots are of one step.",
        *JOB_LABELS,
    ),
    _gauge(
        "step_own_seconds",
        "Time of a step in which a rank does not wait for other ranks: of the slowest rank here.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _gauge(
        "step_wait_seconds",
        "Time of a step in which a rank waits for others: of the rank here that waits least.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _gauge(
        "tokens_routed", "Routings of a token to an expert, by the ranks on this node.", *JOB_LABELS
    ),
    _gauge("tokens_lost", "Tokens of all ranks that recoveries have lost so far.", *JOB_LABELS),
    _gauge(
        "tokens_at_risk_ratio",
        "Portion of the tokens routed by the ranks on this node that a recovery would lose now.",
        *JOB_LABELS,
        unit="ratio",
    ),
    _gauge(
        "tokens_at_risk_mlt",
        "Tokens that a recovery would lose now, as the sum of the layers' portions (MLT).",
        *JOB_LABELS,
    ),
    _gauge(
        "tokens_lost_ratio",
        "Portion of all tokens that recoveries have lost, if all ranks route like those here "
        "(PLT).",
        *JOB_LABELS,
        unit="ratio",
    ),
    _gauge("tokens_lost_mlt", "MLT of all recoveries, at the end of the newest.", *JOB_LABELS),
    _gauge("recovery_tokens_lost_ratio", "PLT of the newest recovery.", *JOB_LABELS, unit="ratio"),
    _gauge("recovery_tokens_lost_mlt", "MLT of the newest recovery.", *JOB_LABELS),
    _gauge(
        "tokens_lost_limit_ratio", "Highest PLT that the job allows.", *JOB_LABELS, unit="ratio"
    ),
    _gauge("experts_per_layer", "Experts of each layer that a snapshot captures.", *JOB_LABELS),
    _gauge("expert_least_nodes", "Nodes on which every expert with uneven copies is.", *JOB_LABELS),
    _gauge(
        "expert_seats", "Seats of a rank in each layer of experts with uneven copies.", *JOB_LABELS
    ),
    _gauge(
        "expert_busiest_node_ratio",
        "Planned tokens of the busiest node over the mean, with uneven copies of experts.",
        *JOB_LABELS,
        unit="ratio",
    ),
    _gauge("expert_plan_step", "Step after which experts took their seats.", *JOB_LABELS),
    _gauge(
        "protection_age_seconds",
        "Time since the newest generation was protected, or since there has been none.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _counter(
        "restores",
        "Restores of a rank, by the source of its bytes.",
        *JOB_LABELS,
        source=("live", "local", "parity", "storage", "none"),
    ),
    _counter(
        "steps_repeated",
        "Steps that ranks of lost pipeline stages repeated alone.",
        *JOB_LABELS,
    ),
    _gauge("sessions_open", "Ranks with an open session.", *JOB_LABELS),
    _gauge("epoch", "Newest membership epoch.", *JOB_LABELS),
    _counter("stale_epoch_refusals", "Messages refused for an ended epoch.", *JOB_LABELS),
    _gauge("arena_bytes", "Memory allocated for arenas.", *JOB_LABELS, unit="bytes"),
    _gauge(
        "state_bytes",
        "Training state that the ranks on this node capture, in experts and in all else.",
        *JOB_LABELS,
        unit="bytes",
        part=_PART,
    ),
    _gauge("parity_bytes", "Memory allocated for parity blocks.", *JOB_LABELS, unit="bytes"),
    _gauge("insecure", "1 while daemons and the control loop do not authenticate each other."),
    _gauge(
        "certificate_expires_timestamp_seconds",
        "Expiry of the daemon's certificate, or of the last of its CAs, in Unix time.",
        unit="seconds",
        certificate=ENDS,
    ),
    _gauge("memory_budget_bytes", "Memory that this daemon may use.", unit="bytes"),
    _gauge("memory_used_bytes", "Memory that this daemon has allocated.", unit="bytes"),
    _counter("sent_bytes", "Bytes served to peers.", unit="bytes"),
    _counter("received_bytes", "Bytes pulled from peers.", unit="bytes"),
    _counter("protection_bytes", "Bytes pulled from peers to compute parity.", unit="bytes"),
    _counter(
        "mirrored_bytes",
        "Bytes taken from replicas on this node to compute parity, instead of pulled.",
        unit="bytes",
    ),
    _counter("recomputed_units", "Experts of a replica that were computed from their gradients."),
    _counter("recomputed_bytes", "Bytes of replicas computed instead of pulled.", unit="bytes"),
    _counter(
        "recomputed_pieces_sent", "Computed pieces that differed from the owner's, and were pulled."
    ),
    _counter("parity_failures", "Attempts to build a parity block that failed.", *JOB_LABELS),
    _durations(
        "encode_seconds", "Time to build one parity block, transfers included.", *JOB_LABELS
    ),
    _durations("rebuild_seconds", "Time to rebuild one lost snapshot.", *JOB_LABELS),
    _durations(
        "verify_seconds", "Time to verify one sealed snapshot or parity block.", *JOB_LABELS
    ),
    _durations("seal_seconds", "Time to write one manifest.", *JOB_LABELS),
    _durations("persist_seconds", "Time to write one snapshot to the durable tier.", *JOB_LABELS),
    _counter("persisted_bytes", "Bytes written to the durable tier.", *JOB_LABELS, unit="bytes"),
    _counter(
        "persist_failures", "Sets of files for the durable tier that were abandoned.", *JOB_LABELS
    ),
    _gauge(
        "persist_age_seconds",
        "Time since the newest set in the durable tier was complete, or since there has been none.",
        *JOB_LABELS,
        unit="seconds",
    ),
    _counter("scrubbed_bytes", "Bytes checked by the background scrub.", *JOB_LABELS, unit="bytes"),
    _counter(
        "corrupt",
        "Checksum mismatches found by the scrub, an adoption or a transfer.",
        *JOB_LABELS,
        kind=_BYTES_KIND,
    ),
    _counter("peer_messages_lost", "Messages to peers that did not arrive.", kind=_MESSAGE),
    _counter("auth_denials", "Calls by trainers that were denied.", cause=_DENIAL),
    _counter("token_reviews", "Token reviews by the API server.", outcome=_REVIEW),
    _counter("rate_limited", "Calls refused because they came too fast.", service=_LIMITED),
    _counter("connections_shed", "Idle connections closed for new ones.", service=_CROWDED),
    _counter("jobs_refused", "Memberships refused because there are too many jobs."),
    _counter("idle_checks", "Checks of this node made while no job was on it.", outcome=_CHECKED),
    _counter("catalogue_dropped", "Updates of the catalogue that were dropped."),
    _durations("loop_lag_seconds", "Delay of the daemon's event loop.", buckets=_LAG_BUCKETS_S),
)


class DaemonMetrics:
    """The metrics of one daemon, in a registry of its own."""

    def __init__(self, definitions: Iterable[Definition] = DEFINITIONS) -> None:
        self.registry = CollectorRegistry()
        self._definitions = {definition.name: definition for definition in definitions}
        self._collectors = {
            name: _make(definition, self.registry) for name, definition in self._definitions.items()
        }
        self._jobs: set[str] = set()
        self._begin({})

    def begin_job(self, job: str) -> None:
        """Expose the job's counters, as 0 where nothing has been counted."""
        if job not in self._jobs:
            self._jobs.add(job)
            self._begin(job_labels(job))

    def _begin(self, given: dict[str, str]) -> None:
        for name, definition in self._definitions.items():
            if definition.type is MetricType.COUNTER and given.keys() <= set(definition.labels):
                for labels in definition.series(**given) if definition.labels else ():
                    self._collectors[name].labels(**labels)

    def add(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Add to the counter `name`. Here and below the label `job` is a job's key, and stands for
        `JOB_LABELS`."""
        counter = self._find(name, MetricType.COUNTER, labels)
        assert isinstance(counter, Counter)
        counter.inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set the gauge `name`."""
        gauge = self._find(name, MetricType.GAUGE, labels)
        assert isinstance(gauge, Gauge)
        gauge.set(value)

    def follow(self, name: str, read: Callable[[], float], /, **labels: str) -> None:
        """Make the gauge `name` the result of `read`, called at each exposition on any thread."""
        gauge = self._find(name, MetricType.GAUGE, labels)
        assert isinstance(gauge, Gauge)
        gauge.set_function(read)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add an observation, in the definition's unit, to the histogram `name`."""
        histogram = self._find(name, MetricType.HISTOGRAM, labels)
        assert isinstance(histogram, Histogram)
        histogram.observe(value)

    def forget_job(self, job: str, names: Collection[str] = ()) -> None:
        """Remove every series of a job; with `names`, only those of these metrics."""
        if not names:
            self._jobs.discard(job)
        for name, definition in self._definitions.items():
            if set(JOB_LABELS) <= set(definition.labels) and (not names or name in names):
                self._collectors[name].remove_by_labels(job_labels(job))

    def _find(self, name: str, type: MetricType, labels: dict[str, str]) -> MetricWrapperBase:
        definition = self._definitions[name]
        assert definition.type is type, f"{name} is a {definition.type}, not a {type}"
        for label, allowed in definition.values:
            assert labels.get(label) in allowed, f"{name}: {label} is one of {', '.join(allowed)}"
        if "job" in labels:
            labels |= job_labels(labels.pop("job"))
        collector = self._collectors[name]
        return collector.labels(**labels) if definition.labels else collector


def _make(definition: Definition, registry: CollectorRegistry) -> MetricWrapperBase:
    name, labels = definition.prefix + definition.name, definition.labels
    if definition.type is MetricType.COUNTER:
        return Counter(name, definition.help, labels, registry=registry)
    if definition.type is MetricType.GAUGE:
        return Gauge(name, definition.help, labels, registry=registry)
    return Histogram(name, definition.help, labels, registry=registry, buckets=definition.buckets)
