"""`Pipeline`: the boundaries between the pipeline stages of a training script. The script moves the
tensors itself, or a schedule of `torch.distributed.pipelining` moves them.

Everything that a stage learns from the other stages passes through here, so it can be logged. Then
a lost stage can repeat steps alone: it gets the messages of its neighbours from their logs, and its
own messages are compared with the ones that they had received. The waits for other stages are
bubbles of the session, in which snapshots are copied.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from holdfast._elastic import stage_group
from holdfast._elastic.boundary_log import (
    EVERYONE,
    BoundaryLog,
    Crossing,
    Key,
    LogPart,
)
from holdfast._elastic.message_copies import SideCopies, bytes_of
from holdfast._elastic.world import World, WorldGroup
from holdfast_core.errors import InvalidJobError
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.topology import Topology

SCHEDULES_FROM = "2.15"
"""Oldest torch whose schedules compute the same bits when they are repeated."""

MICROBATCHES_MAX = 1 << 32
"""Number of micro-batches of a step, at most."""


class BoundaryReplay:
    """The logs of other ranks, from which one rank repeats steps.

    Args:
        plan: the steps to repeat, and the ranks that repeat them.
        parts: rank → the part of its log that it has handed over.

    Raises:
        CorruptError: a message does not match its checksum.
    """

    def __init__(self, plan: ReplayPlan, parts: Mapping[int, LogPart]) -> None:
        self.target = plan.target
        self.divergence = ""
        """First difference from the messages of the first execution; empty if there is none."""
        self._given: dict[tuple[int, Key], bytes] = {}
        self._expected: dict[tuple[int, Key], int] = {}
        self._givers = frozenset(parts)
        for rank, part in parts.items():
            for message in part.sent:
                of = EVERYONE if message.key.crossing is Crossing.SHARED else rank
                self._given[of, message.key] = message.checked_bytes()
            self._expected.update({(rank, key): digest for key, digest in part.received})

    def has(self, rank: int) -> bool:
        """Whether messages from and to `rank` are replaced by its log."""
        return rank in self._givers

    def take(self, rank: int, key: Key, into: torch.Tensor) -> None:
        """Fill `into` with the message that `rank` had sent. If the log has no such message, fill
        it with zeros, which a script tolerates better than arbitrary memory."""
        data = self._given.pop((rank, key), b"")
        if len(data) != into.nbytes:
            self.diverges(f"{key} has {into.nbytes} bytes now, but {len(data)} are logged")
            into.detach().zero_()
            return
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            into.detach().copy_(flat.view(into.dtype).view(into.shape))

    def compare(self, rank: int, key: Key, digest: int) -> None:
        """Compare a repeated message with the one that `rank` had received."""
        if self._expected.pop((rank, key), None) != digest:
            self.diverges(f"{key} is not the message that rank {rank} had received")

    def end(self) -> None:
        """Note a message that was not repeated, if there is one."""
        for rank, key in sorted((*self._expected, *self._given))[:1]:
            other = "a sum of all ranks" if rank == EVERYONE else f"with rank {rank}"
            self.diverges(f"{key}, {other}, was not repeated")

    def diverges(self, what: str) -> None:
        """Note a difference. The step continues, because other ranks of the stage wait for it."""
        self.divergence = self.divergence or what


class _OnWay:
    """A transfer of torch, which can be dropped. A schedule may keep its transfers when its world
    has ended; they would keep open the sockets of its group, at which neighbours wait."""

    def __init__(self, work: torch.distributed.Work | None) -> None:
        self.work = work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class _Arrival:
    """A tensor that a schedule is receiving.

    Args:
        arrive: waits for the tensor, and logs it.
    """

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self.complete = False

    def finish(self) -> None:
        self._arrive()
        self.complete = True


class Pipeline:
    """This rank's place in its pipeline, and its channels to the neighbouring stages.

    The topology defines the stages: rank = (stage · dp + dp index) · tp + tp index. Make a Pipeline
    on all ranks, before `holdfast.init`, and pass it to that. Within the body of a step, send and
    receive only with its methods: nothing else may cross a stage's boundary. Outside of a body, do
    not use them: what they log there belongs to no step. A micro-batch may have several tensors,
    which are received in the order in which they were sent.

    Args:
        world: the world from `holdfast.elastic.init`.
        topology: the same as for `holdfast.init`.
        log_bytes: memory of this process for its log of messages.
        log_received: whether the log also has the messages that this rank receives, which takes
            twice the memory. Then a rank that gets its state from a replica also gets its log back
            from its neighbours. Equal on all ranks.
        log_on_side_stream: whether CUDA devices copy their messages for the log on a side stream,
            and a thread hashes them. Otherwise the training thread waits for the device at each
            message. Off as long as it has not run on a device.

    Raises:
        InvalidJobError: the topology has one stage, or does not fit the world; or processes are to
            stay in worlds of any size.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        log_bytes: int,
        log_received: bool = False,
        log_on_side_stream: bool = False,
    ) -> None:
        topology.check_world(world.size)
        if topology.pp == 1:
            raise InvalidJobError(
                f"topology {topology} has one pipeline stage: leave the pipeline out"
            )
        if world.any_size:
            raise InvalidJobError(
                "a rank has another stage in a world of another size: leave any_size out, so that "
                "all processes start again when the number of ranks changes"
            )
        self.world, self.topology = world, topology
        per_stage = topology.dp * topology.tp
        self.group = world.group(
            [range(at, at + per_stage) for at in range(0, topology.world_size, per_stage)]
        )
        """The process group of the ranks in this rank's stage."""
        self.log = BoundaryLog(log_bytes, keeps_received=log_received)
        self._side_copies = SideCopies() if log_on_side_stream else None
        self.replay: BoundaryReplay | None = None
        """The replay in which this rank repeats steps; None outside of a replay."""
        self.idle: Callable[[], AbstractContextManager[None]] = nullcontext
        """Marks a time in which this rank waits for another stage: `Session.bubble` of the session
        that has this pipeline."""
        self.is_ring = False
        """Whether the last stage may send to the first one."""
        self._step, self._sums = 0, 0
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        """Rank → number of tensors that a schedule has begun to receive from it in this step."""
        self._turns: Counter[tuple[bool, int, Crossing, int]] = Counter()
        """(Whether this rank sends, other rank, kind, micro-batch) → number of messages in this
        step."""
        self._on_way: list[_OnWay] = []
        """The transfers of this step."""
        self._arriving: dict[int, deque[_Arrival]] = {}
        """Rank → tensors that a schedule is receiving from it, in their order."""

    @property
    def stage(self) -> int:
        """Number of this rank's stage, from 0."""
        return self.topology.coordinates(self.world.rank).pp

    @property
    def is_first(self) -> bool:
        """Whether this stage is the first."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage is the last."""
        return self.stage == self.topology.pp - 1

    def send_activation(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Send the output of this stage to the next stage."""
        self._send(self._beside(1), Crossing.ACTIVATION, microbatch, tensor)

    def receive_activation(self, microbatch: int, into: torch.Tensor) -> torch.Tensor:
        """Fill `into` with the output of the previous stage; return `into`."""
        return self._receive(self._beside(-1), Crossing.ACTIVATION, microbatch, into)

    def send_gradient(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Send the gradient of this stage's input to the previous stage."""
        self._send(self._beside(-1), Crossing.GRADIENT, microbatch, tensor)

    def receive_gradient(self, microbatch: int, into: torch.Tensor) -> torch.Tensor:
        """Fill `into` with the gradient of this stage's output; return `into`."""
        return self._receive(self._beside(1), Crossing.GRADIENT, microbatch, into)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks of all stages, in place; return `tensor`. All ranks call
        it."""
        key = Key(self._step, Crossing.SHARED, self._sums)
        self._sums += 1
        if self.replay is None:
            with self.idle():
                self.world.add_up(tensor)
        else:
            self.replay.take(EVERYONE, key, tensor)
        self._log_sent(EVERYONE, key, tensor)
        return tensor

    def torch_group(self) -> WorldGroup:
        """Form the process groups for `torch.distributed.pipelining`, one for each pipeline. All
        ranks call it, before `holdfast.init`.

        Make each `PipelineStage` with `group=….now`, and with `input_args` and `output_args`. Make
        the stage and its schedule again in each step that is `resumed`. The messages of the
        schedule are logged. If a rank has several stages of torch, they are lost and repeated
        together.

        Raises:
            InvalidJobError: torch is older than 2.15. With the schedules of 2.11, a repeated stage
                sends messages that differ from those of its first execution.
        """
        if torch.__version__ < SCHEDULES_FROM:
            raise InvalidJobError(
                f"stages of torch.distributed.pipelining can only be repeated alone with torch "
                f"{SCHEDULES_FROM} or newer, and this is torch {torch.__version__}: install a "
                f"newer one, or send with the methods of Pipeline"
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
        if self._repeats(to, key, tensor):
            return lambda: None
        self._log_sent(to, key, tensor)
        work = self.world.start_send(_flat(tensor.contiguous()), to)
        return partial(self._wait, self._note(work))

    def start_receive(self, source: int, into: torch.Tensor) -> Callable[[], None]:
        """Begin to receive from rank `source`; see `Carrier`.

        Tensors from one rank arrive in order, so waiting for one also completes the earlier ones:
        torch before 2.8 waits only for the last tensor of a batch.
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
        """Drop all transfers; see `Carrier`."""
        for each in self._on_way:
            each.work = None
        self._on_way.clear()

    # --- called by the session --------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin the body of `step`, and its log."""
        self._on_way.clear()
        self._step, self._sums = step, 0
        self._sent.clear()
        self._received.clear()
        self._turns.clear()
        self._arriving.clear()
        self.log.begin(step)

    def complete(self, step: int) -> None:
        """Note that `step` is complete.

        Raises:
            InvalidJobError: a schedule has not waited for all tensors that it receives.
        """
        for source, queue in self._arriving.items():
            if queue:
                raise InvalidJobError(
                    f"the schedule of step {step} has not waited for {len(queue)} of the tensors "
                    f"from rank {source}: end the step only when all of its tensors have arrived"
                )
        self.log.complete(step)

    def end_replay(self) -> str:
        """End this rank's replay, if there is one. Return how it differed from the first execution;
        empty if it did not."""
        replay, self.replay = self.replay, None
        if replay is None:
            return ""
        replay.end()
        return replay.divergence and f"rank {self.world.rank}: {replay.divergence}"

    # --- inside -----------------------------------------------------------------------------------

    def _beside(self, stages: int) -> int:
        """Return the rank of this pipeline that is `stages` stages after this rank.

        Raises:
            InvalidJobError: there is no such stage.
        """
        at = self.topology.coordinates(self.world.rank)
        if not 0 <= at.pp + stages < self.topology.pp:
            raise InvalidJobError(
                f"stage {at.pp} of {self.topology.pp} has no stage {at.pp + stages} beside it: "
                f"check is_first and is_last before sending and receiving"
            )
        return self.topology.rank_at(dp=at.dp, tp=at.tp, pp=at.pp + stages)

    def _key(self, crossing: Crossing, number: int, rank: int, *, sends: bool) -> Key:
        """Name the next message of micro-batch `number` to or from `rank`.

        Raises:
            InvalidJobError: `number` is not an integer from 0 on.
        """
        try:
            number = operator.index(number)
        except TypeError as error:
            raise InvalidJobError(
                f"micro-batches are numbered by integers, and this is {number!r}"
            ) from error
        if not 0 <= number < MICROBATCHES_MAX:
            raise InvalidJobError(
                f"micro-batches are numbered from 0 to {MICROBATCHES_MAX - 1}, and this is {number}"
            )
        turn = (sends, rank, crossing, number)
        key = Key(self._step, crossing, number, self._turns[turn])
        self._turns[turn] += 1
        return key

    def _send(self, to: int, crossing: Crossing, number: int, tensor: torch.Tensor) -> None:
        key = self._key(crossing, number, to, sends=True)
        if self._repeats(to, key, tensor):
            return
        self._log_sent(to, key, tensor)
        flat = _flat(tensor.contiguous())
        with self.idle():
            self.world.send(flat, to)

    def _receive(
        self, source: int, crossing: Crossing, number: int, into: torch.Tensor
    ) -> torch.Tensor:
        key = self._key(crossing, number, source, sends=False)
        if not into.is_contiguous():
            raise InvalidJobError(f"{key} is to be received into a tensor that is not contiguous")
        if self.replay is not None and self.replay.has(source):
            self.replay.take(source, key, into)
        else:
            with self.idle():
                self.world.receive(_flat(into), source)
        self._log_received(source, key, into)
        return into

    def _repeats(self, to: int, key: Key, tensor: torch.Tensor) -> bool:
        """If a replay stands for rank `to`, log a message to it, compare it with the one that the
        rank had received, and return True."""
        if self.replay is None or not self.replay.has(to):
            return False
        digest = self.log.add_sent(to, key, bytes_of(tensor))
        self.replay.compare(to, key, digest)
        return True

    def _log_sent(self, to: int, key: Key, tensor: torch.Tensor) -> None:
        if self._side_copies is not None and tensor.is_cuda:
            copy = self._side_copies.begin(tensor)
            self.log.add_sent_later(to, key, tensor.nbytes, copy)
        else:
            self.log.add_sent(to, key, bytes_of(tensor))

    def _log_received(self, source: int, key: Key, into: torch.Tensor) -> None:
        if self._side_copies is not None and into.is_cuda:
            copy = self._side_copies.begin(into)
            self.log.add_received_later(source, key, into.nbytes, copy)
        else:
            self.log.add_received(source, key, bytes_of(into))

    def _wait(self, on_way: _OnWay) -> None:
        with self.idle():
            on_way.wait()

    def _note(self, work: torch.distributed.Work | None) -> _OnWay:
        self._on_way.append(_OnWay(work))
        return self._on_way[-1]

    def _arrive(self, source: int, key: Key, into: torch.Tensor, on_way: _OnWay) -> None:
        self._wait(on_way)
        self._log_received(source, key, into)


def _finish(queue: deque[_Arrival], arrival: _Arrival) -> None:
    """Finish the arrivals of `queue` up to `arrival`."""
    while not arrival.complete:
        queue[0].finish()
        queue.popleft()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, because backends do not support every dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
