"""`Pipeline`: boundaries of the pipeline stages of a training script that moves tensors itself, or
lets a schedule of `torch.distributed.pipelining` move them.

All that a stage learns of the others passes here, so it can be logged, and a lost stage can repeat
steps alone: what its neighbours have sent comes from their logs, and what it sends is compared with
what they had received.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial

import torch
import xxhash

from holdfast._elastic import stage_group
from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key, LogPart, bytes_of
from holdfast._elastic.world import World, WorldGroup
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.topology import Topology

SCHEDULES_FROM = "2.15"
"""Oldest torch whose schedules are repeated to the bit."""
EVERYONE = -1
"""Stands for all ranks in the log, where other messages name one."""


class BoundaryReplay:
    """What a rank that repeats steps has from the logs of others.

    Args:
        parts: by the rank that gave it.

    Raises:
        CorruptError: a message does not match its checksum.
    """

    def __init__(self, plan: ReplayPlan, parts: Mapping[int, LogPart]) -> None:
        self.target = plan.target
        self.divergence = ""
        """First difference from what the neighbours had received; empty while there is none."""
        self._given: dict[tuple[int, Key], bytes] = {}
        self._expected: dict[tuple[int, Key], int] = {}
        self._givers = frozenset(parts)
        for rank, part in parts.items():
            for message in part.sent:
                of = EVERYONE if message.key.crossing is Crossing.SHARED else rank
                self._given[of, message.key] = message.checked_bytes()
            self._expected.update({(rank, key): digest for key, digest in part.received})

    def has(self, rank: int) -> bool:
        """Whether messages with `rank` come from its log."""
        return rank in self._givers

    def take(self, rank: int, key: Key, into: torch.Tensor) -> None:
        """Fill `into` with the message that `rank` had sent; with zeros where it is not logged so,
        which a script bears better than what memory holds."""
        data = self._given.pop((rank, key), b"")
        if len(data) != into.nbytes:
            self.diverges(f"{key} has {into.nbytes} bytes now, and {len(data)} are logged")
            into.detach().zero_()
            return
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            into.detach().copy_(flat.view(into.dtype).view(into.shape))

    def compare(self, rank: int, key: Key, digest: int) -> None:
        """Compare a message that is sent again with what `rank` had received."""
        if self._expected.pop((rank, key), None) != digest:
            self.diverges(f"{key} is not what rank {rank} had received")

    def end(self) -> None:
        """Note what was not repeated."""
        for rank, key in sorted((*self._expected, *self._given))[:1]:
            other = "a sum of all ranks" if rank == EVERYONE else f"with rank {rank}"
            self.diverges(f"{key}, {other}, was not repeated")

    def diverges(self, what: str) -> None:
        """Note a difference. The step goes on, because other ranks of the stage wait for it."""
        self.divergence = self.divergence or what


class _OnWay:
    """A transfer of torch. A schedule may keep it when its world has ended, and its group's sockets
    would stay open with it, at which neighbours wait."""

    def __init__(self, work: torch.distributed.Work | None) -> None:
        self.work = work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class _Arrival:
    """A tensor of a schedule that is being received.

    Args:
        arrive: waits for it, and logs it.
    """

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self.complete = False

    def finish(self) -> None:
        self._arrive()
        self.complete = True


class Pipeline:
    """This rank's place in its pipeline, and the ways to the stages beside it.

    Stages are those of `topology`: rank = (stage · dp + dp index) · tp + tp index. Make one before
    `holdfast.init`, on all ranks, and pass it there. In the body of a step, send and receive by its
    methods only, and let nothing else cross a boundary.

    Args:
        world: the world of `holdfast.elastic.init`.
        topology: as given to `holdfast.init`.
        log_bytes: most bytes of this process's memory for the log of what this rank sends.

    Raises:
        InvalidJobError: the topology has one stage, or does not fit the world.
    """

    def __init__(self, world: World, topology: Topology, *, log_bytes: int) -> None:
        topology.check_world(world.size)
        if topology.pp == 1:
            raise InvalidJobError(
                f"topology {topology} has one pipeline stage: leave the pipeline out"
            )
        self.world, self.topology = world, topology
        per_stage = topology.dp * topology.tp
        self.group = world.group(
            [range(at, at + per_stage) for at in range(0, topology.world_size, per_stage)]
        )
        """Process group of the ranks of this rank's stage."""
        self.log = BoundaryLog(log_bytes)
        self.replay: BoundaryReplay | None = None
        """Replay in which this rank repeats steps."""
        self.is_ring = False
        """Whether the last stage may send to the first one."""
        self._step, self._sums = 0, 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        """Rank → number of tensors that a schedule has begun to receive from it in this step."""
        self._on_way: list[_OnWay] = []
        """Transfers of this step."""
        self._arriving: dict[int, deque[_Arrival]] = {}
        """Rank → tensors of a schedule that are not yet known to be here, in their order."""

    @property
    def stage(self) -> int:
        """Number of this rank's stage, from 0."""
        return self.topology.coordinates(self.world.rank).pp

    @property
    def is_first(self) -> bool:
        """Whether no stage comes before this one."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.stage == self.topology.pp - 1

    def send_activation(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Send a stage's output to the stage after it."""
        self._send(self._beside(1), Crossing.ACTIVATION, microbatch, tensor)

    def receive_activation(self, microbatch: int, into: torch.Tensor) -> torch.Tensor:
        """Fill `into` with the output of the stage before; return it."""
        return self._receive(self._beside(-1), Crossing.ACTIVATION, microbatch, into)

    def send_gradient(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Send the gradient of a stage's input to the stage before it."""
        self._send(self._beside(-1), Crossing.GRADIENT, microbatch, tensor)

    def receive_gradient(self, microbatch: int, into: torch.Tensor) -> torch.Tensor:
        """Fill `into` with the gradient of this stage's output; return it."""
        return self._receive(self._beside(1), Crossing.GRADIENT, microbatch, into)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks of all stages, in place; return it. All ranks call it."""
        key = Key(self._step, Crossing.SHARED, self._sums)
        self._sums += 1
        if self.replay is None:
            self.world.add_up(tensor)
        else:
            self.replay.take(EVERYONE, key, tensor)
        self.log.add_sent(EVERYONE, key, bytes_of(tensor))
        return tensor

    def torch_group(self) -> WorldGroup:
        """Form the process groups of pipelines for `torch.distributed.pipelining`. All ranks call
        it, before `holdfast.init`.

        Make each `PipelineStage` with `group=….now`, and with `input_args` and `output_args`; make
        it and its schedule anew in each step that is `resumed`. What the schedule sends is logged.
        A rank may hold several stages of torch's, which are lost and repeated together.

        Raises:
            InvalidJobError: torch is older than 2.15. The schedules of 2.11 were tried: a repeated
                stage sends what it had not sent before.
        """
        if torch.__version__ < SCHEDULES_FROM:
            raise InvalidJobError(
                f"stages of torch.distributed.pipelining need torch "
                f"{SCHEDULES_FROM} or newer to be repeated alone, and this is "
                f"{torch.__version__}: install it, or send with the methods of Pipeline"
            )
        stage_group.register()
        self.is_ring = True
        at = self.topology
        return self.world.form_group(
            [
                [at.rank_at(dp=dp, tp=tp, pp=pp) for pp in range(at.pp)]
                for dp in range(at.dp)
                for tp in range(at.tp)
            ],
            self,
        )

    # --- called by torch's schedules --------------------------------------------------------------

    def start_send(self, to: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send to rank `to`; see `Carrier`."""
        key = Key(self._step, Crossing.TENSOR, self._sent[to])
        self._sent[to] += 1
        digest = self.log.add_sent(to, key, bytes_of(tensor))
        if self.replay is not None and self.replay.has(to):
            self.replay.compare(to, key, digest)
            return lambda: None
        return self._note(self.world.start_send(_flat(tensor.contiguous()), to)).wait

    def start_receive(self, source: int, into: torch.Tensor) -> Callable[[], None]:
        """Begin to receive from rank `source`; see `Carrier`.

        Tensors of one rank come in their order, so waiting for one ends the wait for those before
        it: before 2.8, torch waits only for the last one of a batch.
        """
        key = Key(self._step, Crossing.TENSOR, self._received[source])
        self._received[source] += 1
        if not into.is_contiguous():
            raise InvalidJobError(f"{key} is to be received into a tensor that is not contiguous")
        work = None
        if self.replay is not None and self.replay.has(source):
            self.replay.take(source, key, into)
        else:
            work = self.world.start_receive(_flat(into), source)
        queue = self._arriving.setdefault(source, deque())
        arrival = _Arrival(partial(self._arrive, source, key, into, self._note(work)))
        queue.append(arrival)
        return partial(_finish, queue, arrival)

    def drop(self) -> None:
        """Let go of all that is on its way; see `Carrier`."""
        for each in self._on_way:
            each.work = None
        self._on_way.clear()

    # --- called by the session --------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin the body of a step."""
        self._on_way.clear()
        self._step, self._sums = step, 0
        self._sent.clear()
        self._received.clear()
        self._arriving.clear()
        self.log.begin(step)

    def complete(self, step: int) -> None:
        """Note that a step is complete.

        Raises:
            InvalidJobError: a schedule has not waited for all that it receives.
        """
        for source, queue in self._arriving.items():
            if queue:
                raise InvalidJobError(
                    f"the schedule of step {step} has not waited for {len(queue)} of the tensors "
                    f"from rank {source}: end the step when all that it receives is there"
                )
        self.log.complete(step)

    def end_replay(self) -> str:
        """End this rank's replay, if there is one; return how it differed from the first execution,
        or nothing."""
        replay, self.replay = self.replay, None
        if replay is None:
            return ""
        replay.end()
        return replay.divergence and f"rank {self.world.rank}: {replay.divergence}"

    # --- inside -----------------------------------------------------------------------------------

    def _beside(self, stages: int) -> int:
        """Rank of this pipeline that is `stages` after this one.

        Raises:
            InvalidJobError: there is no such stage.
        """
        at = self.topology.coordinates(self.world.rank)
        if not 0 <= at.pp + stages < self.topology.pp:
            raise InvalidJobError(
                f"stage {at.pp} of {self.topology.pp} has no stage {at.pp + stages} beside it: "
                f"ask is_first and is_last"
            )
        return self.topology.rank_at(dp=at.dp, tp=at.tp, pp=at.pp + stages)

    def _send(self, to: int, crossing: Crossing, number: int, tensor: torch.Tensor) -> None:
        key, data = Key(self._step, crossing, number), bytes_of(tensor)
        digest = self.log.add_sent(to, key, data)
        if self.replay is not None and self.replay.has(to):
            self.replay.compare(to, key, digest)
        else:
            self.world.send(_flat(tensor.contiguous()), to)

    def _receive(
        self, source: int, crossing: Crossing, number: int, into: torch.Tensor
    ) -> torch.Tensor:
        key = Key(self._step, crossing, number)
        if not into.is_contiguous():
            raise InvalidJobError(f"{key} is to be received into a tensor that is not contiguous")
        if self.replay is not None and self.replay.has(source):
            self.replay.take(source, key, into)
        else:
            self.world.receive(_flat(into), source)
        self.log.add_received(source, key, xxhash.xxh3_64_intdigest(bytes_of(into)))
        return into

    def _note(self, work: torch.distributed.Work | None) -> _OnWay:
        self._on_way.append(_OnWay(work))
        return self._on_way[-1]

    def _arrive(self, source: int, key: Key, into: torch.Tensor, on_way: _OnWay) -> None:
        on_way.wait()
        self.log.add_received(source, key, xxhash.xxh3_64_intdigest(bytes_of(into)))


def _finish(queue: deque[_Arrival], arrival: _Arrival) -> None:
    """Finish the arrivals of a queue up to this one."""
    while not arrival.complete:
        queue[0].finish()
        queue.popleft()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, not copied: backends do not know every type."""
    return tensor.detach().reshape(-1).view(torch.uint8)
