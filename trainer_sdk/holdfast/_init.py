"""Composition root of a session: which daemon, which rank, which state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn

from holdfast._agree.exchange import Alone, Exchange, make_exchange
from holdfast._agree.expert_counts import ExpertCounts
from holdfast._agree.interval import DueSaves, SaveInterval
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.window_order import WindowDecisions
from holdfast._capture.gradients import NO_GRADIENTS, Gradients
from holdfast._capture.partial import PartialCapture
from holdfast._capture.strategy import CaptureStrategy
from holdfast._capture.whole import WholeCapture
from holdfast._capture.windows import WindowCapture
from holdfast._copying.devices import device_of
from holdfast._daemon.client import DaemonClient, GrpcClient
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.session import ElasticSession, check_staying
from holdfast._elastic.world import World
from holdfast._environment import Environment, read_environment
from holdfast._exits import set_exit_codes
from holdfast._moe.checks import check_same_optimizer
from holdfast._moe.layer import MoELayer
from holdfast._moe.reseating import SeatChanges
from holdfast._session.interface import Session, WorldSession
from holdfast._session.protected import ProtectedSession
from holdfast._session.unprotected import UnprotectedSession
from holdfast._settings import Settings
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful
from holdfast._state.conventions import Seats, UnitNamer
from holdfast._state.dtensors import raw
from holdfast._state.groups import check_optimizers
from holdfast._state.nested import check_nested, notices_steps, with_nested
from holdfast._state.program_start import ProgramStart
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.policies import policy_of
from holdfast_core.job.snapshots import Full, PartialExperts, Repeats, Selective, SparseWindows
from holdfast_core.topology import Topology


def init(
    *,
    model: nn.Module,
    optimizer: Any,
    stateful: Mapping[str, Stateful] | None = None,
    topology: Topology | None = None,
    units: UnitNamer | None = None,
    private: Collection[str] = (),
    settings: Settings | None = None,
    socket: Path | str | None = None,
    job: str | None = None,
    rank: int | None = None,
    daemon: DaemonClient | None = None,
    world: World | None = None,
    pipeline: Pipeline | None = None,
) -> Session:
    """Make a session for this rank. Every rank calls it, after any `init_process_group`.

    Without a daemon (no `HOLDFAST_SOCKET`, `socket` or `daemon`) the session logs one warning that
    nothing is protected, and training runs as before.

    Args:
        model: the trained module, which DDP or FSDP2 may wrap.
        optimizer: one of torch, or several in a list; a hook on `step` waits for staged saves.
        stateful: other objects that a restore must bring back (scheduler, sampler, …), by name.
        topology: which ranks hold the same state; without it all ranks are data-parallel replicas.
            In a later world of another size, dp follows from it, and tp, pp and ep stay.
        units: (name, tensor) → its `UnitKey`, or None to follow the conventions: experts are the
            numbered children of a module called `experts`, or slices of stacked weights
            `[experts, …]`; gates are called `gate` or `router`; layers are numbered.
        private: names of tensors that no other rank holds, contrary to the topology, such as the
            states of a sharded optimizer (`layer.weight:exp_avg`).
        settings: see `Settings`.
        socket: the daemon's Unix socket, instead of `HOLDFAST_SOCKET`.
        job: the job's key, instead of `HOLDFAST_JOB`.
        rank: this rank, instead of `RANK`; a process group's rank must equal it.
        daemon: a client to use as it is, such as `holdfast.testing.FakeDaemon`.
        world: the world of `holdfast.elastic.init`: then train in `session.steps`, and this process
            stays when other ranks are lost.
        pipeline: with `world`, so that a pipeline stage that is lost recovers alone.

    Raises:
        InvalidJobError: when the topology does not fit the training world, an optimizer lacks
            `param_groups` and `state`, something in `stateful` lacks `state_dict` or
            `load_state_dict`, or arguments contradict each other.
    """
    environment = read_environment()
    maker = _Maker(
        model=model,
        optimizers=optimizer if isinstance(optimizer, list | tuple) else [optimizer],
        stateful=stateful or {},
        topology=topology,
        units=units,
        private=frozenset(private),
        settings=_complete_settings(settings, environment),
        socket=Path(socket) if socket is not None else environment.socket,
        job=job if job is not None else environment.job,
        rank=rank,
        daemon=daemon,
        world=world,
        environment=environment,
    )
    maker.check()
    _check_pipeline(pipeline, topology, world)
    if world is None:
        return maker.session()
    if daemon is not None:
        raise InvalidJobError("daemon= is one client, and each world needs its own: leave out one")
    return maker.elastic_session(world, pipeline)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """What sessions are made of: one session, or one in each world."""

    model: nn.Module
    optimizers: Sequence[Any]
    stateful: Mapping[str, Stateful]
    topology: Topology | None
    units: UnitNamer | None
    private: frozenset[str]
    settings: Settings
    socket: Path | None
    job: str
    rank: int | None
    daemon: DaemonClient | None
    world: World | None
    environment: Environment

    @property
    def protects(self) -> bool:
        """Whether there is a daemon."""
        return self.daemon is not None or self.socket is not None

    @property
    def can_go_on_live(self) -> bool:
        """Whether training can go on from what processes have, after others were lost."""
        return (
            self.protects
            and self.settings.go_on_live
            and (not self.settings.leaves_experts_out or _has_seats(self.model))
            and all(notices_steps(one) for one in self.optimizers)
        )

    def check(self) -> None:
        """Check that the topology is that of the world in which this process begins, and fits the
        model, and that what is stateful has a state."""
        _check_stateful(self.stateful)
        if self.protects and self.topology is not None:
            self.topology.check_world(_world(self.environment, self.rank)[1])
        if self.protects:
            check_optimizers(self.optimizers)
            check_nested(
                self.optimizers,
                self.settings.repeats if self.settings.window else None,
                stays=self.world is not None,
            )
        if _has_seats(self.model):
            _check_seats(self.topology, self.settings)
            for one in self.optimizers:
                check_same_optimizer(one)

    def elastic_session(self, world: World, pipeline: Pipeline | None) -> ElasticSession:
        """Make a session for `world` and those that follow it. Collective."""
        check_staying(self.model)
        given = self.environment.elastic
        uneven = any(isinstance(module, MoELayer) for module in self.model.modules())
        if given is not None and not uneven:
            raise InvalidJobError(
                "spec.elastic of the job says how experts are seated, and the model has no layer "
                "that seats any: build its layers with holdfast.moe.MoELayer, or remove "
                "spec.elastic"
            )
        begun = None
        if self.protects:
            begun = ProgramStart(self.model, self.optimizers)
        return ElasticSession(
            world,
            partial(self.session, begun),
            self.optimizers,
            # A vote waits for the slowest rank, as training's own collectives do.
            max(self.settings.exchange_timeout_s, world.timeout_s),
            votes=self.can_go_on_live,
            pipeline=pipeline,
            reseats=SeatChanges(self.model) if uneven else None,
            rebalance_steps=given.rebalance_steps if given else 0,
        )

    def session(self, begun: ProgramStart | None = None) -> WorldSession:
        """Make a session of the present world. Collective.

        Args:
            begun: what the program has whenever it starts; what it has now when None.
        """
        if not self.protects:
            return UnprotectedSession()
        if self.settings.window:
            _check_repeatable(self.model, self.optimizers, self.settings.repeats)
        rank, world_size = _world(self.environment, self.rank)
        given = self.topology
        topology = Topology(dp=world_size) if given is None else given.resized(world_size)
        live = LiveState(
            self.model,
            self.optimizers,
            topology,
            rank,
            units=self.units,
            private=self.private,
            begun=begun,
        )

        def exchange() -> Exchange:
            timeout_s = self.settings.exchange_timeout_s
            if self.world is not None:
                return self.world.exchange(timeout_s)
            return make_exchange(world_size, timeout_s)

        ranks = exchange()
        return ProtectedSession(
            live=live,
            stateful=self.stateful,
            topology=topology,
            rank=rank,
            client=self.daemon or self._connect(rank, ranks),
            exchange=ranks,
            strategy=_strategy(live, rank, world_size, self.settings, exchange),
            replica_check=_replica_check(topology, self.settings, exchange),
            interval=_interval(self.settings, exchange),
            device=device_of(raw(parameter) for parameter in self.model.parameters()),
            settings=self.settings,
            hooks=self.world is None,
        )

    def _connect(self, rank: int, ranks: Exchange) -> DaemonClient:
        if not self.job or self.socket is None:
            raise InvalidJobError("a daemon is named without a job; set HOLDFAST_JOB or pass job=")
        set_exit_codes()
        store = self.environment.store_address
        if self.world is not None:
            store = self.world.store_address
        return GrpcClient(
            self.socket,
            self.job,
            rank,
            store,
            self.settings.rpc_timeout_s,
            self.environment.token_file,
            "" if self.environment.run_id == self.job else _world_name(ranks),
        )


def _world_name(ranks: Exchange) -> str:
    """Agree on a name of this world, which no other world has. Collective."""
    return ranks.gather(uuid4().hex.encode())[0].decode()


def _check_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Refuse what has no state that could be captured, before a save does."""
    if not isinstance(stateful, Mapping):
        raise InvalidJobError(
            f'stateful is a {type(stateful).__qualname__}: give a dict, such as {{"scheduler": …}}'
        )
    for name, item in stateful.items():
        if not all(hasattr(item, method) for method in ("state_dict", "load_state_dict")):
            raise InvalidJobError(
                f"stateful[{name!r}] is a {type(item).__qualname__} without `state_dict` and "
                f"`load_state_dict`: give an object that has both, perhaps one of your own around "
                f"it"
            )


def _check_pipeline(
    pipeline: Pipeline | None, topology: Topology | None, world: World | None
) -> None:
    """Check that the session is for the world and the stages of `pipeline`.

    Raises:
        InvalidJobError: it is for others.
    """
    if pipeline is not None and (world is not pipeline.world or topology != pipeline.topology):
        raise InvalidJobError(
            f"pipeline= is for topology {pipeline.topology}, and topology= is {topology}: give the "
            f"topology and the world with which it was made"
        )


def _has_seats(model: nn.Module) -> bool:
    """Whether the model has experts in seats, whose copies lie on ranks that the plan chooses."""
    return any(isinstance(module, Seats) for module in model.modules())


def _check_seats(topology: Topology | None, settings: Settings) -> None:
    """Check what experts in seats need.

    Raises:
        InvalidJobError: when the topology gives ranks other parts, or snapshots are windows.
    """
    if topology is not None and topology != Topology(dp=topology.world_size):
        raise InvalidJobError(
            f"the experts of holdfast.moe may be on any rank, and all else is on each, which is "
            f"not what {topology} describes: leave topology out, and give the job parallelism "
            f"{{dp: {topology.world_size}}}"
        )
    if settings.window:
        raise InvalidJobError(
            "only the ranks that captured a sparse window can repeat its steps, and experts of "
            "holdfast.moe change ranks: use snapshot.policy.type Full, PartialExperts or Selective"
        )


def _replica_check(
    topology: Topology, settings: Settings, exchange: Callable[[], Exchange]
) -> ReplicaCheck:
    """Make the comparison of replicas after the first save, where there are any. Collective."""
    every = settings.compare_replicas_every if settings.check_replicas else None
    if not every or len(topology.dense_replicas(0)) == 1:
        return ReplicaCheck(Alone(), topology, 0)
    return ReplicaCheck(exchange(), topology, every)


def _check_repeatable(model: nn.Module, optimizers: Sequence[Any], repeats: Repeats) -> None:
    """Check that steps can be repeated with frozen units.

    Raises:
        InvalidJobError: when an optimizer does not say when it steps, or mixes parameters, or torch
            may choose kernels that give other bits when a step is repeated; or, where optimizers
            repeat theirs, when one holds parameters that the model does not.
    """
    trained = {id(parameter) for parameter in model.parameters()}
    if repeats is Repeats.TRAINING and not torch.are_deterministic_algorithms_enabled():
        raise InvalidJobError(
            "sparse windows repeat steps, which must give the bits of their first execution, and "
            "torch may use algorithms that do not: call torch.use_deterministic_algorithms(True) "
            "before holdfast.init, or use snapshot.policy.type Full"
        )
    for optimizer in optimizers:
        name = type(optimizer).__qualname__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidJobError(
                f"{name} is not a torch.optim.Optimizer, whose steps sparse windows repeat with "
                f"frozen units; derive it from that class, or use snapshot.policy.type Full"
            )
        if any(isinstance(one, torch.optim.LBFGS) for one in with_nested(optimizer)):
            raise InvalidJobError(
                f"{name} computes one update from all parameters, so none can be frozen when steps "
                f"of a sparse window are repeated; use snapshot.policy.type Full"
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if repeats is Repeats.OPTIMIZER and not trained.issuperset(map(id, held)):
            raise InvalidJobError(
                f"{name} holds parameters that the model does not, such as masters beside it, and "
                f"their gradients are made in its step: keep masters in the optimizer's state, or "
                f"use snapshot.policy.sparse.repeats Training"
            )


def _strategy(
    live: LiveState,
    rank: int,
    world_size: int,
    settings: Settings,
    exchange: Callable[[], Exchange],
) -> CaptureStrategy:
    """Make this rank's part of the policy. Collective."""
    # Half of it, because the training thread gives up a save that does not begin within all.
    wait_s = settings.start_wait_s / 2
    match settings.policy:
        case None | Full():
            return WholeCapture()
        case SparseWindows() as policy:
            return WindowCapture(policy, WindowDecisions(exchange(), policy), wait_s)
        case PartialExperts() | Selective() as policy:
            counts = ExpertCounts(exchange(), rank, world_size)
            gradients = Gradients(live) if policy.recompute else NO_GRADIENTS
            return PartialCapture(policy_of(policy), counts, wait_s, gradients)


def _interval(settings: Settings, exchange: Callable[[], Exchange]) -> DueSaves:
    """Make the choice of the saves to take. Collective where the interval is measured."""
    if settings.recoveries_per_day is None:
        return DueSaves()
    return SaveInterval(exchange(), settings.recoveries_per_day)


def _complete_settings(settings: Settings | None, environment: Environment) -> Settings:
    """Settings of the session: `settings`, completed from the environment."""
    tuned = settings if settings is not None else Settings()
    if settings is None and environment.copy_threads is not None:
        tuned = replace(tuned, copy_threads=environment.copy_threads)
    left = {k: v for k, v in environment.settings.items() if getattr(tuned, k) is None}
    tuned = replace(tuned, **left)
    if tuned.recoveries_per_day is None:
        tuned = replace(tuned, recoveries_per_day=environment.recoveries_per_day)
    if tuned.policy is None:
        tuned = replace(tuned, policy=environment.policy.chosen)
    return tuned


def _world(environment: Environment, rank: int | None) -> tuple[int, int]:
    """Pair (rank, world size): the process group's if there is one, else the environment's."""
    if dist.is_available() and dist.is_initialized():
        if rank not in (None, dist.get_rank()):
            raise InvalidJobError(
                f"rank={rank}, but the process group has {dist.get_rank()}; leave rank out"
            )
        return dist.get_rank(), dist.get_world_size()
    return environment.rank if rank is None else rank, environment.world_size
