"""The Grafana dashboard, generated from the metrics of the daemon and the operator.

Every metric has a panel, in the section that lists it here. A metric that no section lists, or a
listed one that does not exist, is an error, so the dashboard cannot miss or invent a metric.

Pure: files are the business of `chart_files`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast_core.metric_definitions import JOB_LABELS, Definition

Json = dict[str, Any]

SECTIONS: dict[str, tuple[str, ...]] = {
    "Protection": (
        "holdfast_protection_age_seconds",
        "holdfast_generation_step",
        "holdfast_snapshots_total",
        "holdfast_sessions_open",
    ),
    "Recovery": (
        "holdfast_operator_recoveries_total",
        "holdfast_operator_recoveries_finished_total",
        "holdfast_operator_recovery_seconds",
        "holdfast_operator_replacement_seconds",
        "holdfast_operator_node_failures_total",
        "holdfast_operator_hangs_total",
        "holdfast_operator_nodes_failed",
        "holdfast_operator_idle_node_failed",
        "holdfast_idle_checks_total",
        "holdfast_operator_nodes_avoided_total",
        "holdfast_restores_total",
        "holdfast_steps_repeated_total",
        "holdfast_rebuild_seconds",
        "holdfast_epoch",
        "holdfast_stale_epoch_refusals_total",
    ),
    "Jobs": (
        "holdfast_operator_jobs",
        "holdfast_operator_job_phase",
        "holdfast_operator_job_recoveries",
        "holdfast_operator_job_members_missing",
        "holdfast_operator_job_unprotected",
        "holdfast_operator_ranks_desired",
        "holdfast_operator_ranks_ready",
        "holdfast_operator_members_desired",
        "holdfast_operator_members_active",
        "holdfast_operator_members_minimum",
        "holdfast_operator_members_joining",
        "holdfast_operator_jobs_short",
        "holdfast_operator_jobs_ended_total",
    ),
    "Stragglers": (
        "holdfast_operator_job_stragglers",
        "holdfast_operator_job_slow_links",
        "holdfast_step_own_seconds",
        "holdfast_step_wait_seconds",
    ),
    "Diverged replicas": ("holdfast_operator_job_divergences",),
    "Saves": (
        "holdfast_saves_skipped_total",
        "holdfast_saves_failed_total",
        "holdfast_parity_failures_total",
        "holdfast_saves_skipped_reported_total",
        "holdfast_saves_failed_reported_total",
        "holdfast_save_staged_seconds",
        "holdfast_save_period_seconds",
        "holdfast_save_interval_steps",
        "holdfast_save_window_steps",
        "holdfast_bubble_seconds_total",
        "holdfast_bubble_copied_bytes_total",
        "holdfast_encode_seconds",
        "holdfast_seal_seconds",
        "holdfast_verify_seconds",
    ),
    "Durable tier": (
        "holdfast_persist_age_seconds",
        "holdfast_persist_failures_total",
        "holdfast_persist_seconds",
        "holdfast_persisted_bytes_total",
    ),
    "Lost tokens": (
        "holdfast_tokens_at_risk_ratio",
        "holdfast_tokens_lost_ratio",
        "holdfast_tokens_lost_limit_ratio",
        "holdfast_recovery_tokens_lost_ratio",
        "holdfast_tokens_at_risk_mlt",
        "holdfast_tokens_lost_mlt",
        "holdfast_recovery_tokens_lost_mlt",
        "holdfast_experts_per_layer",
        "holdfast_tokens_lost",
        "holdfast_tokens_routed",
    ),
    "Uneven copies of experts": (
        "holdfast_expert_least_nodes",
        "holdfast_expert_busiest_node_ratio",
        "holdfast_expert_seats",
        "holdfast_expert_plan_step",
    ),
    "Memory": (
        "holdfast_memory_used_bytes",
        "holdfast_memory_budget_bytes",
        "holdfast_state_bytes",
        "holdfast_arena_bytes",
        "holdfast_parity_bytes",
    ),
    "Between daemons": (
        "holdfast_sent_bytes_total",
        "holdfast_received_bytes_total",
        "holdfast_protection_bytes_total",
        "holdfast_mirrored_bytes_total",
        "holdfast_recomputed_bytes_total",
        "holdfast_recomputed_units_total",
        "holdfast_recomputed_pieces_sent_total",
        "holdfast_peer_messages_lost_total",
        "holdfast_operator_daemons_connected",
        "holdfast_operator_daemon_missing",
        "holdfast_operator_daemons_outdated",
    ),
    "Integrity and access": (
        "holdfast_corrupt_total",
        "holdfast_scrubbed_bytes_total",
        "holdfast_auth_denials_total",
        "holdfast_token_reviews_total",
        "holdfast_insecure",
        "holdfast_operator_insecure",
        "holdfast_certificate_expires_timestamp_seconds",
        "holdfast_operator_certificate_expires_timestamp_seconds",
        "holdfast_rate_limited_total",
        "holdfast_connections_shed_total",
        "holdfast_jobs_refused_total",
        "holdfast_arenas_overgrown_total",
    ),
    "Health": (
        "holdfast_operator_leader",
        "holdfast_operator_oldest_look_seconds",
        "holdfast_operator_reconcile_seconds",
        "holdfast_operator_act_seconds",
        "holdfast_operator_api_requests_total",
        "holdfast_operator_action_failures_total",
        "holdfast_operator_watch_restarts_total",
        "holdfast_operator_status_writes_total",
        "holdfast_operator_events_dropped_total",
        "holdfast_operator_pods_created_total",
        "holdfast_operator_pods_deleted_total",
        "holdfast_loop_lag_seconds",
        "holdfast_catalogue_dropped_total",
    ),
}
"""Metrics of each section, by their names in the exposition."""

TITLES: dict[str, str] = {
    "holdfast_certificate_expires_timestamp_seconds": (
        "Time until a daemon's certificate, or the last of its CAs, expires"
    ),
    "holdfast_operator_certificate_expires_timestamp_seconds": (
        "Time until the operator's certificate, or the last of its CAs, expires"
    ),
    "holdfast_insecure": "1 while this daemon authenticates nobody",
    "holdfast_operator_insecure": "1 while the operator authenticates no daemon",
    "holdfast_step_own_seconds": (
        "Time of a step in which a rank does not wait for others, of the slowest rank of each node"
    ),
    "holdfast_step_wait_seconds": (
        "Time of a step in which a rank waits for others, of the rank of each node that waits least"
    ),
    "holdfast_save_period_seconds": "Time between the newest two saves, of the slowest rank",
    "holdfast_save_staged_seconds": (
        "Time from a save until its tensors could change again, of the slowest rank"
    ),
    "holdfast_tokens_at_risk_ratio": "Portion of all tokens that a recovery would lose now (PLT)",
    "holdfast_tokens_lost_ratio": "Portion of all tokens that recoveries have lost (PLT)",
    "holdfast_tokens_routed": "Routings of a token to an expert",
    "holdfast_bubble_seconds_total": (
        "Number of ranks whose processes wait for other pipeline stages (with NCCL, devices wait)"
    ),
    "holdfast_bubble_copied_bytes_total": (
        "Snapshots copied while processes of ranks wait for other stages"
    ),
    "holdfast_saves_skipped_reported_total": "Saves skipped, as counted by ranks",
    "holdfast_saves_failed_reported_total": "Saves failed, as counted by ranks",
}
"""Titles of panels that show something else than the metric of one process."""

TABLES: dict[str, str] = {
    "holdfast_operator_recoveries_total": "Recoveries by cause, in the chosen time",
    "holdfast_operator_recoveries_finished_total": "Sources of recovered state, in the chosen time",
    "holdfast_operator_node_failures_total": "Failures of nodes by kind, in the chosen time",
    "holdfast_operator_hangs_total": "Hangs by what held the job up, in the chosen time",
}
"""Titles of the panels of rare events: their numbers in the chosen time, not their rates."""

COLUMNS = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8

_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


def series(definition: Definition) -> tuple[str, ...]:
    """Names of the metric's series in Prometheus."""
    name = definition.exposed_name
    if definition.type == "histogram":
        return tuple(f"{name}_{suffix}" for suffix in ("bucket", "sum", "count"))
    return (name,)


def dashboard(definitions: Sequence[Definition]) -> Json:
    """The dashboard, as Grafana imports it.

    Raises:
        ValueError: when a metric is in no section, or a section has one that does not exist.
    """
    known = {each.exposed_name: each for each in definitions}
    placed = {name for names in SECTIONS.values() for name in names}
    if missing := known.keys() - placed:
        raise ValueError(f"give a section in charts/dashboards.py to {', '.join(sorted(missing))}")
    if gone := placed - known.keys():
        raise ValueError(f"take out of charts/dashboards.py: {', '.join(sorted(gone))}")
    return {
        "uid": "holdfast",
        "title": "Holdfast",
        "tags": ["holdfast"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": list(_panels(known)),
    }


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    for name, label, metric in (
        ("namespace", "Namespace", "holdfast_epoch"),
        ("moejob", "Job", 'holdfast_epoch{namespace=~"$namespace"}'),
        ("node", "Node", "holdfast_memory_budget_bytes"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": f"label_values({metric}, {name})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _panels(known: dict[str, Definition]) -> Iterator[Json]:
    number, top = 1, 0
    for section, names in SECTIONS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        yield {"id": number, "type": "row", "title": section, "collapsed": False, "gridPos": place}
        number, top = number + 1, top + 1
        for index, name in enumerate(names):
            row, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield _panel(known[name], number, place)
            number += 1
        top += -(-len(names) // COLUMNS) * HEIGHT


def _panel(definition: Definition, number: int, place: Json) -> Json:
    if definition.exposed_name in TABLES:
        return _table(definition, number, place)
    return {
        "id": number,
        "type": "timeseries",
        "title": TITLES.get(definition.exposed_name) or definition.help.rstrip("."),
        "description": f"`{definition.exposed_name}`",
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": _unit(definition)}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(_queries(definition))
        ],
    }


def _table(definition: Definition, number: int, place: Json) -> Json:
    """A table with a row for each value of the labels that has occurred."""
    name, by = definition.exposed_name, ", ".join(definition.labels)
    count = f"sum by ({by}) (increase({name}[$__range])) > 0"
    hidden = {"id": "organize", "options": {"excludeByName": {"Time": True}}}
    return {
        "id": number,
        "type": "table",
        "title": TABLES[name],
        "description": f"`{name}`",
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": "short", "decimals": 0}, "overrides": []},
        "options": {"sortBy": [{"displayName": "Value", "desc": True}]},
        "transformations": [hidden],
        "targets": [
            {
                "refId": "A",
                "expr": count,
                "format": "table",
                "instant": True,
                "legendFormat": " ".join(f"{{{{{label}}}}}" for label in definition.labels),
            }
        ],
    }


def _unit(definition: Definition) -> str:
    name, counter = definition.exposed_name, definition.type == "counter"
    if "_bytes" in name:
        return "binBps" if counter else "bytes"
    if name.endswith("_seconds"):
        return "s"
    if name.endswith("_seconds_total"):  # seconds of each second
        return "short"
    if "_tokens_" in name and name.endswith("_ratio"):
        return "percentunit"
    return "ops" if counter else "short"


def _queries(definition: Definition) -> Iterator[tuple[str, str]]:
    """(expression, legend) of each line of a panel."""
    name, labels = definition.exposed_name, definition.labels
    ours = not name.startswith("holdfast_operator_")
    filters = [f'{label}=~"${label}"' for label in JOB_LABELS if label in labels]
    filters += ['node=~"$node"'] if ours else []
    chosen = f"{{{', '.join(filters)}}}" if filters else ""
    # A daemon's own memory and traffic are shown by node, everything else by its labels.
    shown = labels or (("node",) if ours else ())
    shown += ("node",) if name in _BY_NODE else ()
    legend = " ".join(f"{{{{{label}}}}}" for label in shown) or "all"
    by = f" by ({', '.join(shown)})" if shown else ""
    if definition.type == "counter":
        yield f"sum{by} (rate({name}{chosen}[$__rate_interval]))", legend
    elif definition.type == "gauge":
        yield _gauge_query(name, by, chosen), legend
    else:
        by = f" by ({', '.join(('le', *labels))})"
        rate = f"sum{by} (rate({name}_bucket{chosen}[$__rate_interval]))"
        for quantile, word in ((0.5, "median"), (0.99, "p99")):
            yield f"histogram_quantile({quantile}, {rate})", f"{legend} {word}" if labels else word


_KNOWN_TO_ALL = (
    "holdfast_generation_step",
    "holdfast_epoch",
    "holdfast_expert_least_nodes",
    "holdfast_expert_busiest_node_ratio",
    "holdfast_expert_seats",
    "holdfast_expert_plan_step",
    "holdfast_experts_per_layer",
    "holdfast_tokens_lost",
    "holdfast_tokens_lost_limit_ratio",
    "holdfast_tokens_lost_mlt",
    "holdfast_recovery_tokens_lost_ratio",
    "holdfast_recovery_tokens_lost_mlt",
)
"""Gauges of a whole job that every daemon exposes; some may lag behind."""


_SLOWEST = (
    "holdfast_save_period_seconds",
    "holdfast_save_staged_seconds",
    "holdfast_save_interval_steps",
    "holdfast_save_window_steps",
    "holdfast_operator_oldest_look_seconds",
)
"""Gauges of which the largest counts: of the slowest rank of a node, which all nodes of the job
wait for, or of the replica that leads."""


_BY_NODE = ("holdfast_step_own_seconds", "holdfast_step_wait_seconds")
"""Gauges of a job that differ from node to node, and show something only beside each other."""


_NEWEST = ("holdfast_protection_age_seconds", "holdfast_persist_age_seconds")
"""Ages of what a whole job has; a daemon that lags behind knows an older one."""


_OF_TOKENS = (
    "holdfast_tokens_at_risk_ratio",
    "holdfast_tokens_at_risk_mlt",
    "holdfast_tokens_lost_ratio",
)
"""Portions of the tokens that the ranks of a node have routed. Weighted by those tokens, the nodes'
values add up to the portion of all tokens; MLT does so only without pipeline stages."""


def _gauge_query(name: str, by: str, chosen: str) -> str:
    """Expression that combines one gauge of several processes."""
    gauge, routed = f"{name}{chosen}", f"holdfast_tokens_routed{chosen}"
    if name in _OF_TOKENS:
        return f"sum{by} ({gauge} * {routed}) / sum{by} ({routed})"
    if name.endswith("_expires_timestamp_seconds"):
        return f"min{by} ({gauge}) - time()"
    if name in _NEWEST:
        return f"min{by} ({gauge})"
    if name in _KNOWN_TO_ALL or name in _SLOWEST:
        return f"max{by} ({gauge})"
    return f"sum{by} ({gauge})"
