"""Composition root of a session: which daemon, which rank, which state."""

from __future__ import annotations

import logging
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
from holdfast._agree.interval import DueSaves, SaveInterval
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._capture.registered import RankOfWorld, make_strategy
from holdfast._copying.devices import device_of
from holdfast._daemon.client import DaemonClient, GrpcClient
from holdfast._daemon.unsaved import OF_PROCESS
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.session import ElasticSession, check_staying
from holdfast._elastic.sharded import WorldSharded
from holdfast._elastic.world import World
from holdfast._environment import Environment, read_environment, read_stack_directory
from holdfast._exits import set_exit_codes
from holdfast._moe.checks import check_same_optimizer
from holdfast._moe.layer import ExpertLayer
from holdfast._moe.reseating import SeatChanges
from holdfast._session.interface import Session, WorldSession
from holdfast._session.protected import ProtectedSession
from holdfast._session.unprotected import UnprotectedSession
from holdfast._settings import Settings
from holdfast._stacks import offer_stack
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful
from holdfast._state.conventions import UnitNamer, has_seats
from holdfast._state.dtensors import is_dtensor, raw
from holdfast._state.flat import FlatTensor, gathered_shapes
from holdfast._state.groups import check_optimizers
from holdfast._state.nested import check_nested, notices_steps, with_nested
from holdfast._state.program_start import ProgramStart
from holdfast_core.errors import InvalidJobError, ProtectionRequiredError
from holdfast_core.job.snapshots import Full, Repeats
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")


def init(
    *,
    model: nn.Module,
    optimizer: Any,
    stateful: Mapping[str, Stateful] | None = None,
    topology: Topology | None = None,
    units: UnitNamer | None = None,
    private: Collection[str] = (),
    flat: Sequence[FlatTensor] = (),
    masters: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    settings: Settings | None = None,
    socket: Path | str | None = None,
    job: str | None = None,
    rank: int | None = None,
    daemon: DaemonClient | None = None,
    world: World | None = None,
    pipeline: Pipeline | None = None,
) -> Session:
    """Make the session of this rank. Every rank calls it, after any `init_process_group`.

    Without a daemon (no `HOLDFAST_SOCKET`, `socket` or `daemon`), the session warns once that
    nothing is protected, and training runs without snapshots.

    Args:
        model: the module to train, which DDP or FSDP2 may wrap.
        optimizer: an optimizer of torch, or a list of several; a hook on `step` waits for copies.
        stateful: other objects to save and restore (scheduler, sampler, …), by name.
        topology: tells which ranks hold the same state; by default all ranks are data-parallel
            replicas. In a later world of another size, dp changes with it; tp, pp and ep stay.
        units: (name, tensor) → its `UnitKey`, or None to follow the conventions: experts are the
            numbered children of a module called `experts`, or slices of stacked weights
            `[experts, …]`; gates are called `gate` or `router`; layers are numbered.
        private: names of tensors that no other rank holds, although the topology says so, such as
            the states of a sharded optimizer (`layer.weight:exp_avg`).
        flat: a sharded optimizer's flat tensors; see `FlatTensor` for those that are not named.
        masters: (parameter, its master) for an optimizer that optimizes masters; by default an
            optimizer's masters are those that fit the model's parameters one by one.
        settings: see `Settings`.
        socket: the daemon's Unix socket; by default `HOLDFAST_SOCKET`.
        job: the job's key; by default `HOLDFAST_JOB`.
        rank: this rank; by default `RANK`. It must equal the rank of the process group.
        daemon: the client to use, such as `holdfast.testing.FakeDaemon`.
        world: the world from `holdfast.elastic.init`, to stay when other ranks are lost.
        pipeline: the pipeline of the script's stages in `world`; a lost stage then recovers alone.

    Raises:
        InvalidJobError: the topology does not fit the training world, or an argument lacks what it
            must have or contradicts another; the message says what to change.
        ProtectionRequiredError: there is no daemon, and the settings require protection.
    """
    environment = read_environment()
    offer_stack(read_stack_directory())
    maker = _Maker(
        model=model,
        optimizers=optimizer if isinstance(optimizer, list | tuple) else [optimizer],
        stateful=stateful or {},
        topology=topology,
        units=units,
        private=frozenset(private),
        flat=tuple(flat),
        masters=tuple(masters),
        settings=_complete_settings(settings, environment),
        socket=Path(socket) if socket is not None else environment.socket,
        job=job if job is not None else environment.job,
        rank=rank,
        daemon=daemon,
        world=world,
        environment=environment,
    )
    with OF_PROCESS.making_session():
        maker.check()
        maker.check_pipeline(pipeline)
        if world is None:
            if maker.settings.repeat_steps_share:
                _log.warning(
                    "repeat_steps_share: no step is executed again, because that needs the loop "
                    "of session.steps, and world="
                )
            return maker.session()
        return maker.elastic_session(world, pipeline)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """Maker of sessions: of a single one, or of one for each world."""

    model: nn.Module
    optimizers: Sequence[Any]
    stateful: Mapping[str, Stateful]
    topology: Topology | None
    units: UnitNamer | None
    private: frozenset[str]
    flat: tuple[FlatTensor, ...]
    masters: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    settings: Settings
    socket: Path | None
    job: str
    rank: int | None
    daemon: DaemonClient | None
    world: World | None
    environment: Environment

    @property
    def protects(self) -> bool:
        """Whether sessions have a daemon."""
        return self.daemon is not None or self.socket is not None

    @property
    def can_go_on_live(self) -> bool:
        """Whether training can continue live from the state of the processes that survive."""
        return (
            self.protects
            and self.settings.go_on_live
            and (not self.settings.leaves_experts_out or has_seats(self.model))
            and all(notices_steps(one) for one in self.optimizers)
        )

    def check(self) -> None:
        """Check the arguments against each other, the environment and the model.

        Raises:
            InvalidJobError: a session cannot be made of them.
        """
        _check_stateful(self.stateful)
        if self.daemon is not None and self.world is not None:
            raise InvalidJobError(
                "daemon= is one client, but each world needs its own: leave out daemon= or world="
            )
        if self.protects and self.topology is not None:
            self.topology.check_world(_world(self.environment, self.rank)[1])
        if self.protects:
            check_optimizers(self.optimizers)
            if self.flat and self.settings.window:
                raise InvalidJobError(
                    "sparse windows repeat the steps of single experts, which an optimizer with "
                    "flat tensors cannot take: use snapshot.policy.type Full, PartialExperts or "
                    "Selective"
                )
            check_nested(
                self.optimizers,
                self.settings.repeats if self.settings.window else None,
                stays=self.world is not None,
            )
        if has_seats(self.model):
            _check_seats(self.model, self.topology, self.settings)
            for one in self.optimizers:
                check_same_optimizer(one)

    def check_pipeline(self, pipeline: Pipeline | None) -> None:
        """Check that the session has the world and the topology of `pipeline`, and that snapshots
        hold all that a lost stage begins from.

        Raises:
            InvalidJobError: the session has another world or topology, or a policy that leaves
                experts out.
        """
        if pipeline is None:
            return
        if self.world is not pipeline.world or self.topology != pipeline.topology:
            raise InvalidJobError(
                f"pipeline= is for topology {pipeline.topology}, but topology= is {self.topology}: "
                f"give the topology and the world with which the pipeline was made"
            )
        if not self.protects or self.can_go_on_live:
            return
        if self.settings.leaves_experts_out:
            raise InvalidJobError(
                f"a lost stage repeats steps from a state that is whole, and "
                f"{type(self.settings.policy).__name__} leaves experts out of snapshots, so that "
                f"the log of pipeline= would never be read: use snapshot.policy.type Full or "
                f"Sparse, or leave elastic.Pipeline out, send between stages with "
                f"torch.distributed, and mark waits for other stages with session.bubble"
            )
        _log.warning(
            "pipeline=: no stage recovers alone, because this process takes no votes: it needs "
            "go_on_live, and optimizers of torch"
        )

    def elastic_session(self, world: World, pipeline: Pipeline | None) -> ElasticSession:
        """Make a session for `world` and for the worlds that follow it. Collective."""
        check_staying(self.model, world)
        if world.any_size and self.topology is not None and self.topology.pp > 1:
            raise InvalidJobError(
                f"with {self.topology} a rank has another stage in a world of another size: leave "
                f"any_size out, so that all processes start again when the number of ranks changes"
            )
        for part in self.model.modules():
            if isinstance(part, WorldSharded) and world.any_size:
                part.check(self.optimizers)
        given = self.environment.elastic
        uneven = any(isinstance(module, ExpertLayer) for module in self.model.modules())
        if given is not None and not uneven:
            raise InvalidJobError(
                "spec.elastic of the job seats experts, but the model has no layer with seats: "
                "build its layers with holdfast.moe.MoELayer, or remove spec.elastic"
            )
        begun = None
        if self.protects:
            begun = ProgramStart(self.model, self.optimizers, gathered_shapes(self.flat))
        return ElasticSession(
            world,
            partial(self.session, begun),
            self.optimizers,
            # A vote waits for the slowest rank, as training's own collectives do.
            max(self.settings.exchange_timeout_s, world.timeout_s),
            begun=begun,
            model=self.model,
            votes=self.can_go_on_live,
            pipeline=pipeline,
            reseats=SeatChanges(self.model) if uneven else None,
            rebalance_steps=given.rebalance_steps if given else 0,
            repeat_share=self.settings.repeat_steps_share or 0.0,
        )

    def session(self, begun: ProgramStart | None = None) -> WorldSession:
        """Make a session of the present world. Collective.

        Args:
            begun: the state of the program at its start; None takes the present state.
        """
        if not self.protects:
            if self.settings.require_protection:
                set_exit_codes()
                raise ProtectionRequiredError(
                    "no daemon protects this process, and require_protection is set: start the "
                    "script as a job, with `holdfast run` or in a cluster, or set HOLDFAST_SOCKET "
                    "and HOLDFAST_JOB"
                )
            return UnprotectedSession()
        # A recovery repeats the steps of a window; refuse a model for which that is impossible.
        if self.settings.window:
            _check_repeatable(self.model, self.optimizers, self.settings.repeats)
        # Describe the state to capture.
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
            flat=self.flat,
            masters=self.masters,
            begun=begun,
        )

        # Make one exchange for the session, and one for each service that agrees beside training.
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
            strategy=make_strategy(
                self.settings.policy or Full(),
                RankOfWorld(
                    live=live,
                    rank=rank,
                    world_size=world_size,
                    exchange=exchange,
                    # Half of it, because the training thread gives up a save that does not begin
                    # within all.
                    wait_s=self.settings.start_wait_s / 2,
                ),
            ),
            replica_check=_replica_check(topology, self.settings, exchange),
            interval=_interval(self.settings, exchange),
            device=device_of(raw(parameter) for parameter in self.model.parameters()),
            settings=self.settings,
            hooks=self.world is None,
        )

    def _connect(self, rank: int, ranks: Exchange) -> DaemonClient:
        if not self.job or self.socket is None:
            raise InvalidJobError("the job of the daemon is not given: set HOLDFAST_JOB or job=")
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
    """Agree on a unique name for this world. Collective."""
    return ranks.gather(uuid4().hex.encode())[0].decode()


def _check_stateful(stateful: Mapping[str, Stateful]) -> None:
    """Refuse objects whose state cannot be captured, now rather than in the first save."""
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


def _check_seats(model: nn.Module, topology: Topology | None, settings: Settings) -> None:
    """Check that the model, the topology and the policy allow experts in seats.

    Raises:
        InvalidJobError: ranks have different parts of a parameter, or the topology says so; or
            recoveries would repeat the training steps of windows.
    """
    sharded = (name for name, one in model.named_parameters() if is_dtensor(one))
    if (first := next(sharded, None)) is not None:
        raise InvalidJobError(
            f"the experts of holdfast.moe may be on any rank, and every rank has all other state, "
            f"but {first} is divided among ranks: leave fully_shard and parallelize_module out, or "
            f"use expert parallelism with Topology.fitted in place of holdfast.moe"
        )
    if topology is not None and topology != Topology(dp=topology.world_size):
        raise InvalidJobError(
            f"the experts of holdfast.moe may be on any rank, and every rank has all other state, "
            f"which is not what {topology} describes: leave topology out, and give the job "
            f"parallelism {{dp: {topology.world_size}}}; or use expert parallelism with "
            f"Topology.fitted in place of holdfast.moe"
        )
    if settings.window and settings.repeats is Repeats.TRAINING:
        raise InvalidJobError(
            "the training steps of a sparse window are repeated only with each expert on the ranks "
            "that it was on, and experts of holdfast.moe change ranks: set "
            "snapshot.policy.sparse.repeats to Optimizer, or use another snapshot.policy.type"
        )


def _replica_check(
    topology: Topology, settings: Settings, exchange: Callable[[], Exchange]
) -> ReplicaCheck:
    """Make the comparison of replicas in saves after the first one; it compares nothing if there
    are no replicas. Collective."""
    every = settings.compare_replicas_every if settings.check_replicas else None
    if not every or len(topology.dense_replicas(0)) == 1:
        return ReplicaCheck(Alone(), topology, 0)
    return ReplicaCheck(exchange(), topology, every)


def _check_repeatable(model: nn.Module, optimizers: Sequence[Any], repeats: Repeats) -> None:
    """Check that the steps of a sparse window can be repeated with frozen units.

    Raises:
        InvalidJobError: an optimizer is not torch's, or computes one update from all parameters;
            torch may compute other bits when a step is repeated; or, if only optimizers repeat
            their steps, an optimizer holds parameters that the model lacks.
    """
    trained = {id(parameter) for parameter in model.parameters()}
    if repeats is Repeats.TRAINING and not torch.are_deterministic_algorithms_enabled():
        raise InvalidJobError(
            "sparse windows repeat steps, which must compute the same bits again, but torch may "
            "use nondeterministic algorithms: call torch.use_deterministic_algorithms(True) before "
            "holdfast.init, or use snapshot.policy.type Full"
        )
    for optimizer in optimizers:
        name = type(optimizer).__qualname__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidJobError(
                f"{name} is not a torch.optim.Optimizer, so sparse windows cannot repeat its steps "
                f"with frozen units; derive it from that class, or use snapshot.policy.type Full"
            )
        if any(isinstance(one, torch.optim.LBFGS) for one in with_nested(optimizer)):
            raise InvalidJobError(
                f"{name} computes one update from all parameters, so none can be frozen when steps "
                f"of a sparse window are repeated; use snapshot.policy.type Full"
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if repeats is Repeats.OPTIMIZER and not trained.issuperset(map(id, held)):
            raise InvalidJobError(
                f"{name} holds parameters that the model lacks, such as separate masters, whose "
                f"gradients are computed within its step: keep masters in the optimizer's state, "
                f"or use snapshot.policy.sparse.repeats Training"
            )


def _interval(settings: Settings, exchange: Callable[[], Exchange]) -> DueSaves:
    """Make the object that chooses which saves to take. Collective if the interval is measured."""
    if settings.recoveries_per_day is None:
        return DueSaves()
    return SaveInterval(exchange(), settings.recoveries_per_day)


def _complete_settings(settings: Settings | None, environment: Environment) -> Settings:
    """Complete `settings` from the environment. Explicit values have precedence."""
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
    """Return (rank, world size), from the process group or, without one, from the environment."""
    if dist.is_available() and dist.is_initialized():
        if rank not in (None, dist.get_rank()):
            raise InvalidJobError(
                f"rank={rank}, but the process group has {dist.get_rank()}; leave rank out"
            )
        return dist.get_rank(), dist.get_world_size()
    return environment.rank if rank is None else rank, environment.world_size
