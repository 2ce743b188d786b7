"""Turns the engines' notes into logs, metrics and events of the catalogue."""

from __future__ import annotations

import logging
import time
from typing import Any

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.catalogue.records import SnapshotStage
from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy
from holdfast_daemon.engine import JobOverview
from holdfast_daemon.engine.effects import (
    BuildParity,
    Effect,
    Note,
    PersistRank,
    Rebuild,
    Seal,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.logs import bind
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing import status
from holdfast_daemon.observing.catalogue import Catalogue

_log = bind(logging.getLogger(__name__))

_QUIET = frozenset({JobEvent.COMMITTED, JobEvent.PARITY_BUILT, JobEvent.PROTECTED, JobEvent.DEAD})
"""Events of every step: logged at debug level, and counted by metrics."""

_BAD = frozenset(
    {
        JobEvent.CORRUPT,
        JobEvent.CORRUPT_PARITY,
        JobEvent.SUSPECT,
        JobEvent.RANK_LOST,
        JobEvent.FENCED,
        JobEvent.ARENA_REFUSED,
        JobEvent.ARENA_OVERGROWN,
        JobEvent.CUT_BACK_FAILED,
        JobEvent.SEAL_FAILED,
        JobEvent.REBUILD_FAILED,
        JobEvent.LOAD_FAILED,
        JobEvent.STORAGE_UNREACHABLE,
        JobEvent.PARITY_FAILED,
        JobEvent.PERSIST_FAILED,
        JobEvent.PERSIST_GIVEN_UP,
        JobEvent.PERSIST_CLEANUP_FAILED,
        JobEvent.MEMBERSHIP_FOR_OTHER_MEMORY,
    }
)

_HISTORY = frozenset(
    {
        JobEvent.EPOCH_BEGAN,
        JobEvent.LINE,
        JobEvent.RANK_LOST,
        JobEvent.INSPECTED,
        JobEvent.REBUILD_STARTED,
        JobEvent.REBUILT,
        JobEvent.LOADED,
        JobEvent.STORAGE_CHOICE,
        JobEvent.CORRUPT,
        JobEvent.CORRUPT_PARITY,
        JobEvent.FENCED,
        JobEvent.ARENA_REFUSED,
        JobEvent.ARENA_OVERGROWN,
        JobEvent.SESSION_OPENED,
        JobEvent.WENT_LIVE,
        JobEvent.PERSISTED,
        JobEvent.PERSIST_GIVEN_UP,
    }
)
"""Events that are published in the catalogue's event stream."""


_DURATIONS: dict[type[Effect], str] = {
    BuildParity: "encode_seconds",
    PersistRank: "persist_seconds",
    Rebuild: "rebuild_seconds",
    Seal: "seal_seconds",
    VerifyParity: "verify_seconds",
    VerifySnapshot: "verify_seconds",
}


_PACE_GAUGES = (
    "save_period_seconds",
    "save_staged_seconds",
    "save_interval_steps",
    "save_window_steps",
)
_TIMES_GAUGES = ("step_own_seconds", "step_wait_seconds")
_PLAN_GAUGES = (
    "expert_least_nodes",
    "expert_seats",
    "expert_busiest_node_ratio",
    "expert_plan_step",
)
_LOSS_GAUGES = (
    "tokens_routed",
    "tokens_lost",
    "tokens_at_risk_ratio",
    "tokens_at_risk_mlt",
    "tokens_lost_ratio",
    "tokens_lost_mlt",
    "tokens_lost_limit_ratio",
    "recovery_tokens_lost_ratio",
    "recovery_tokens_lost_mlt",
    "experts_per_layer",
)


class NodeObserver:
    """Implements `host.Observer` for all jobs of a daemon."""

    def __init__(self, metrics: DaemonMetrics, catalogue: Catalogue, node: str) -> None:
        self._metrics, self._catalogue, self._node = metrics, catalogue, node
        self._protected_at: dict[str, tuple[Generation | None, float]] = {}
        """Job → its newest protected generation, and when that was first seen here."""
        self._protected_in: dict[str, int] = {}
        """Job → newest epoch in which a generation was protected."""
        self._lossy: dict[str, int] = {}
        """Job → newest epoch whose lost tokens are in the events."""
        self._counted: dict[str, dict[tuple[str, int], float]] = {}
        """Job → (counter, rank) → the total that was last added."""

    def note(self, host: JobHost, note: Note) -> None:
        known = {
            "job": host.job,
            "epoch": host.engine.epoch,
            "rank": note.rank,
            "generation": str(note.generation) if note.generation else None,
            "detail": note.detail or None,
            "stayed": note.stayed or None,
        }
        fields: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        if note.event in _BAD:
            _log.warning(note.event.value, **fields)
        elif note.event in _QUIET:
            _log.debug(note.event.value, **fields)
        else:
            _log.info(note.event.value, **fields)
        self._count(host, note)
        if note.event in _HISTORY or self._is_protected_again(host, note):
            self._publish(note.event, **fields)

    def _is_protected_again(self, host: JobHost, note: Note) -> bool:
        """Whether the note is of the first generation that is protected in its epoch."""
        epoch = host.engine.epoch
        if note.event is not JobEvent.PROTECTED or self._protected_in.get(host.job) == epoch:
            return False
        if note.generation is None or note.generation.epoch != epoch:
            return False
        self._protected_in[host.job] = epoch
        return True

    def _publish(self, event: JobEvent, *, job: str, **fields: Any) -> None:
        common = {"event": event.value, "time": time.time(), "node": self._node}
        self._catalogue.publish_event(job, {**common, **fields, "job": job})

    def storage_failed(self, host: JobHost, effect: Effect, error: HoldfastError) -> None:
        _log.error("storage_failed", job=host.job, effect=type(effect).__name__, cause=str(error))

    def took(self, host: JobHost, effect: Effect, seconds: float) -> None:
        name = _DURATIONS.get(type(effect))
        if name is not None:
            self._metrics.observe(name, seconds, job=host.job)

    def refresh(self, hosts: dict[str, JobHost], used_bytes: int, budget_bytes: int) -> None:
        """Set the gauges and publish the jobs' whole states; called once a second."""
        metrics = self._metrics
        metrics.set("memory_used_bytes", used_bytes)
        metrics.set("memory_budget_bytes", budget_bytes)
        for job, host in hosts.items():
            overview = host.engine.overview()
            metrics.begin_job(job)
            metrics.set("epoch", overview.epoch, job=job)
            metrics.set("sessions_open", overview.sessions, job=job)
            metrics.set("arena_bytes", host.storage.arena_bytes, job=job)
            metrics.set("parity_bytes", host.storage.parity_bytes, job=job)
            for part, nbytes in zip(("experts", "other"), overview.state_bytes, strict=True):
                metrics.set("state_bytes", nbytes, job=job, part=part)
            if overview.complete is not None:
                metrics.set("generation_step", overview.complete.step, job=job, stage="committed")
            if overview.protected is not None:
                metrics.set("generation_step", overview.protected.step, job=job, stage="protected")
            self._age(overview, host.now)
            self._persisting(host, overview)
            for rank in overview.ranks:
                self._add_up("saves_skipped_reported", job, rank.skipped, rank.rank)
                self._add_up("saves_failed_reported", job, rank.failed, rank.rank)
                self._add_up("bubble_seconds", job, rank.pace.bubble_s, rank.rank)
                self._add_up("bubble_copied_bytes", job, rank.pace.bubble_bytes, rank.rank)
            self._pace(overview)
            self._times(overview)
            self._tokens(overview)
            self._plan(overview)
            self._catalogue.publish_snapshot(job, status.as_json(host, overview))
            for rank in overview.ranks:
                self._catalogue.publish_rank_state(job, rank.rank, rank.health)

    def _age(self, found: JobOverview, now: float) -> None:
        """Set the age of the newest protected generation, if the job asks for protection."""
        if found.membership is None or found.membership.redundancy is Redundancy.NONE:
            return
        generation, since = self._protected_at.get(found.job, (None, now))
        if generation != found.protected:
            generation, since = found.protected, now
        self._protected_at[found.job] = generation, since
        self._metrics.set("protection_age_seconds", now - since, job=found.job)

    def _persisting(self, host: JobHost, found: JobOverview) -> None:
        """Set the metrics of the durable tier, if the job has one."""
        persist, job, metrics = found.persist, host.job, self._metrics
        if persist is None:
            return
        metrics.set("persist_age_seconds", persist.age_s(host.now), job=job)
        if persist.stored is not None:
            metrics.set("generation_step", persist.stored.step, job=job, stage="persisted")
        self._add_up("persisted_bytes", job, host.worker.persister.written_bytes)

    def _add_up(self, name: str, job: str, total: float, rank: int = -1) -> None:
        """Bring a counter, or a rank's part of it, to the `total` of its source. A total that fell
        has started again from 0, because its process is new."""
        counted = self._counted.setdefault(job, {})
        before = counted.get((name, rank), 0)
        self._metrics.add(name, total - before if total >= before else total, job=job)
        counted[name, rank] = total

    def _pace(self, found: JobOverview) -> None:
        """Set the times of saves to the times of the slowest rank here: training waits for it."""
        paces, metrics = [rank.pace for rank in found.ranks if rank.pid], self._metrics
        if not paces:
            metrics.forget_job(found.job, _PACE_GAUGES)
            return
        metrics.set("save_period_seconds", max(p.period_s for p in paces), job=found.job)
        metrics.set("save_staged_seconds", max(p.staged_s for p in paces), job=found.job)
        metrics.set("save_interval_steps", found.interval_steps, job=found.job)
        metrics.set("save_window_steps", found.window_steps, job=found.job)

    def _times(self, found: JobOverview) -> None:
        """Set the gauges of a step's time, from the rank here for which the others wait most."""
        times, metrics = [rank.times for rank in found.ranks if rank.times], self._metrics
        if not times:
            metrics.forget_job(found.job, _TIMES_GAUGES)
            return
        metrics.set("step_own_seconds", max(each.own_s for each in times), job=found.job)
        metrics.set("step_wait_seconds", min(each.wait_s for each in times), job=found.job)

    def _plan(self, found: JobOverview) -> None:
        """Set the gauges of the plan of uneven copies, if there is one."""
        job, plan, metrics = found.job, found.plan, self._metrics
        if plan is None:
            metrics.forget_job(job, _PLAN_GAUGES)
            return
        figures = (plan.least_nodes, plan.rank_seats, plan.busiest_node, plan.step)
        for name, value in zip(_PLAN_GAUGES, figures, strict=True):
            metrics.set(name, value, job=job)

    def _tokens(self, found: JobOverview) -> None:
        """Set the gauges of tokens that are lost because snapshots leave experts out. There are
        sums beside the ratios, because figures of several nodes can only be combined from sums."""
        job, loss, metrics = found.job, found.loss, self._metrics
        if loss is None or found.membership is None:
            metrics.forget_job(job, _LOSS_GAUGES)  # its ranks live elsewhere now
            return
        figures: dict[str, float] = {
            "tokens_routed": sum(loss.routed),
            "tokens_lost": sum(loss.lost),
            "tokens_at_risk_ratio": loss.risk.plt,
            "tokens_at_risk_mlt": loss.risk.mlt,
            "tokens_lost_ratio": loss.plt_of(found.membership.world_size),
            "tokens_lost_limit_ratio": loss.limit,
            "experts_per_layer": loss.k,
        }
        if loss.newest is not None:
            figures["tokens_lost_mlt"] = loss.newest.total_mlt
            figures["recovery_tokens_lost_ratio"] = loss.newest.plt
            figures["recovery_tokens_lost_mlt"] = loss.newest.mlt
        for name, value in figures.items():
            metrics.set(name, value, job=job)
        for each in loss.recoveries if found.leads else ():
            if self._lossy.get(job, 0) < each.epoch <= found.epoch:
                self._lossy[job] = each.epoch
                self._publish(JobEvent.TOKENS_LOST, job=job, epoch=each.epoch, loss=each.to_dict())

    def forget(self, job: str) -> None:
        self._protected_at.pop(job, None)
        for by_job in (self._counted, self._protected_in, self._lossy):
            by_job.pop(job, None)
        self._publish(JobEvent.JOB_ENDED, job=job, epoch=0)
        self._metrics.forget_job(job)
        self._catalogue.forget_job(job)

    def _count(self, host: JobHost, note: Note) -> None:
        job, metrics = host.job, self._metrics
        match note.event:
            case JobEvent.COMMITTED:
                metrics.add("snapshots", job=job, stage="committed")
                if note.rank is not None and note.generation is not None:
                    self._catalogue.publish_stage(
                        job, note.rank, note.generation, SnapshotStage.COMMITTED
                    )
            case JobEvent.PROTECTED:
                ranks = host.engine.ranks
                metrics.add("snapshots", len(ranks), job=job, stage="protected")
                for rank in ranks:
                    if note.generation is not None:
                        self._catalogue.publish_stage(
                            job, rank, note.generation, SnapshotStage.PROTECTED
                        )
            case JobEvent.SKIPPED:
                metrics.add("saves_skipped", job=job, cause="no_free_slot")
            case JobEvent.DEAD:
                metrics.add("saves_skipped", job=job, cause="incomplete")
            case JobEvent.SEAL_FAILED:
                metrics.add("saves_failed", job=job, cause="storage")
            case JobEvent.ARENA_REFUSED:
                metrics.add("saves_failed", job=job, cause="memory_budget")
            case JobEvent.ARENA_OVERGROWN:
                metrics.add("arenas_overgrown", job=job)
            case JobEvent.PARITY_FAILED:
                metrics.add("parity_failures", job=job)
            case JobEvent.CORRUPT:
                metrics.add("corrupt", job=job, kind="arena")
            case JobEvent.SUSPECT:
                metrics.add("corrupt", job=job, kind="wire")
            case JobEvent.CORRUPT_PARITY:
                metrics.add("corrupt", job=job, kind="parity")
            case JobEvent.PERSIST_GIVEN_UP:
                metrics.add("persist_failures", job=job)
            case JobEvent.FENCED:
                metrics.add("stale_epoch_refusals", job=job)
