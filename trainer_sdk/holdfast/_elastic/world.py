"""`World`: the ranks that train together now, and this process's part in it.

The process groups belong to the world. When a rank or a node is lost, the world ends: this process
leaves its groups and forms them again in the next epoch, with the processes that took the places of
the lost ones.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from math import inf

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    HashStore,
)

from holdfast._agree.exchange import Exchange, GlooExchange, make_exchange, wait
from holdfast._daemon.following import Meeting, WorldFollower
from holdfast._elastic import groups
from holdfast._elastic.stage_group import Carrier
from holdfast_core.errors import (
    HoldfastError,
    InvalidJobError,
    UnreachableError,
)
from holdfast_core.protection.standing import (
    NEW,
    RankStanding,
    StandingAction,
    StandingVerdict,
    read_standings,
    standing,
)

_log = logging.getLogger("holdfast")
_WAIT_S = 20.0
"""Time for which one wait for the daemon's news lasts."""
Parts = Sequence[Sequence[int]]
Partition = Parts | Callable[[int], Parts]
"""Lists of ranks, or function that gives them for the number of ranks of a world."""


class WorldGroup:
    """Process group of a part of the world; it changes with the world.

    Pass `group.now` to a collective each time, and keep no reference to it.
    """

    def __init__(self, world: World, partition: Partition, carrier: Carrier | None = None) -> None:
        self._world = world
        self._partition, self._carrier = partition, carrier
        self._now: dist.ProcessGroup | None = None

    @property
    def now(self) -> dist.ProcessGroup:
        """The process group in the present world.

        Raises:
            UnreachableError: this process has left its groups.
        """
        self._world.check_process()
        if self._now is None:
            raise UnreachableError("the training world has ended; its groups are formed again")
        return self._now

    def wait(self, work: dist.Work | None) -> None:
        """Wait for `work` of a collective; see `World.wait`."""
        self._world.wait(work)

    def _parts(self, size: int) -> Parts:
        """The partition of a world of `size` ranks; InvalidJobError when it does not fit."""
        partition = self._partition
        parts = partition(size) if callable(partition) else partition
        if sorted(rank for part in parts for rank in part) != list(range(size)):
            raise InvalidJobError(
                f"partition {[list(part) for part in parts]} must hold each of the {size} ranks "
                f"once"
            )
        return parts


class World:
    """Training world of this process. Made by `holdfast.elastic.init`.

    Args:
        backend: torch's backend for training's collectives.
        following: the daemon's news; None where this process ends with its world.
        any_size: whether this process stays for worlds of another size too.
        store_address: `host:port` of the store of torchrun's environment; empty without torchrun.
        local_rank: number of this process among its node's.
        nproc: processes of each node.
        timeout_s: time that one of training's collectives may take.
        reform_s: time to wait for a new world after a collective has failed.
    """

    def __init__(
        self,
        backend: str,
        following: WorldFollower | None,
        *,
        any_size: bool = False,
        store_address: str,
        local_rank: int,
        nproc: int,
        timeout_s: float,
        reform_s: float,
    ) -> None:
        self._backend, self._following, self._any_size = backend, following, any_size
        self._local_rank, self._nproc = local_rank, nproc
        self._timeout_s, self._reform_s = timeout_s, reform_s
        self._groups: list[WorldGroup] = []
        self._exchanges: list[GlooExchange] = []
        self._point: groups.MeetingPoint | None = None
        self._rank, self._size, self._epoch = 0, 1, 0
        self._store_address = store_address
        self._meeting: Meeting | None = None
        """World at whose meeting point this process is, before its groups are formed."""
        self._reached = 0
        """Newest epoch whose meeting point this process has come to."""
        self._stood = False
        """Whether the ranks of that epoch have stated what they have."""
        self._left = True
        self._has_session = False
        self._process = os.getpid()
        self.failure: Exception | None = None
        """Failure of the newest collective of this world that was waited for in vain."""
        self.verdict: StandingVerdict | None = None
        """What followed from the statements of all ranks when this process came to this world; None
        where it ends with its world."""

    @property
    def rank(self) -> int:
        """Rank of this process in the present world; another one may give it another."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the present world."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Number of this process among its node's: the number of its device."""
        return self._local_rank

    @property
    def nproc(self) -> int:
        """Number of processes of each node."""
        return self._nproc

    @property
    def timeout_s(self) -> float:
        """Seconds that one of training's collectives may take."""
        return self._timeout_s

    @property
    def epoch(self) -> int:
        """Membership epoch of the present world; 0 without a daemon."""
        return self._epoch

    @property
    def store_address(self) -> str:
        """`host:port` of the store at which the ranks met; empty in a world of one process."""
        return self._store_address

    @property
    def stays(self) -> bool:
        """Whether this process stays when its world changes."""
        return self._following is not None

    @property
    def ended(self) -> bool:
        """Whether this world has ended: its collectives fail, and its saves are refused."""
        return self._left or (self._following is not None and self._following.epoch > self._epoch)

    def group(self, partition: Partition) -> WorldGroup:
        """Form process groups of parts of the world, now and in each later world.

        All ranks call it with equal arguments, before `holdfast.init`: in later worlds these groups
        come first.

        Args:
            partition: lists of ranks; each rank of the world is in exactly one of them. With
                `any_size`, a function that returns them for a number of ranks.

        Returns:
            The group that this rank is in.

        Raises:
            InvalidJobError: when a rank is missing, or in several parts; when lists are given with
                `any_size`; after `holdfast.init`.
        """
        return self.form_group(partition, None)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for `work` of a collective with `async_op=True`, no longer than this world lasts.

        A collective without it notices when a rank dies, but not when a node falls silent. Wait for
        `isend` and `irecv` with their own `wait`: gloo ends them when a wait for them times out.

        Raises:
            UnreachableError: the world has ended.
            RuntimeError: the collective failed.
        """
        self.check_process()
        if work is None:  # this rank is not in the collective's group
            return
        try:
            if "nccl" not in self._backend:
                wait(work, lambda: self.ended)
            else:
                work.wait()
        except Exception as error:
            self.failure = error
            raise

    def send(self, flat: torch.Tensor, to: int) -> None:
        """Send bytes, uint8 [n], to rank `to`."""
        dist.send(flat, to)

    def receive(self, flat: torch.Tensor, source: int) -> None:
        """Fill `flat`, uint8 [n], with the bytes that rank `source` sends."""
        dist.recv(flat, source)

    def start_send(self, flat: torch.Tensor, to: int) -> dist.Work:
        """Begin `send`."""
        work = dist.isend(flat, to)
        assert work is not None, "this rank is in the default group"
        return work

    def start_receive(self, flat: torch.Tensor, source: int) -> dist.Work:
        """Begin `receive`."""
        work = dist.irecv(flat, source)
        assert work is not None, "this rank is in the default group"
        return work

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks, in place. Collective."""
        self.wait(dist.all_reduce(tensor, async_op=True))

    def close(self) -> None:
        """Leave the groups for good. From now on, a failure elsewhere ends this process."""
        if self._following is not None:
            self._following.close()
        self.leave()

    # --- called by the session --------------------------------------------------------------------

    def form_group(self, partition: Partition, carrier: Carrier | None) -> WorldGroup:
        """Form groups as `group` does, in which `carrier`, if given, sends and receives."""
        if self._has_session:
            raise InvalidJobError(
                "world.group after holdfast.init: processes that stay would form groups in another "
                "order than new ones; form all groups before holdfast.init"
            )
        if self._any_size and not callable(partition):
            raise InvalidJobError(
                f"partition {[list(part) for part in partition]} is for {self._size} ranks only, "
                f"and this process is to stay for any number (any_size=True): give a function of "
                f"the number of ranks"
            )
        made = WorldGroup(self, partition, carrier)
        self._split(made)
        self._groups.append(made)
        return made

    def exchange(self, timeout_s: float) -> Exchange:
        """Make an exchange of this world's ranks. Collective."""
        self._has_session = True
        if self._point is None:
            return make_exchange(self._size, timeout_s)
        self._point.meet()
        epoch = self._epoch
        made = GlooExchange(
            timeout_s,
            lambda: self.ended or self._epoch != epoch,
            form_s=groups.FORM_S,
            forming=functools.partial(self._point.forming, "gloo"),
        )
        self._exchanges.append(made)
        return made

    def gather_patiently(self, text: str) -> list[str]:
        """Gather the `text` of each rank of this world, however long the slowest one takes.
        Collective.

        Raises:
            StaleEpochError: the world ended first.
            RuntimeError: the store was lost.
        """
        if self._point is None:
            raise UnreachableError("the training world has ended")
        return self._point.gather(text)

    def begin_alone(self) -> None:
        """Report that training has begun from the beginning, and that it cannot go on live without
        this member. A daemon that does not answer keeps this process, which then ends by itself."""
        following = self._following
        if following is None:
            return
        try:
            following.arrive(self._rank, self._store_address, began_alone=True)
        except HoldfastError as error:
            _log.info("the daemon does not know that nothing could be kept: %s", error)

    def check_process(self) -> None:
        """Raise InvalidJobError in a process that was forked from this world's: it has its parent's
        sockets, and no thread that serves them."""
        if self._process != os.getpid():
            raise InvalidJobError("a forked process cannot use its parent's world")

    def join(self) -> None:
        """Form the groups of the newest world, as soon as there is one, as a process that has no
        training state.

        Raises:
            HoldfastError: the daemon refuses this process.
        """
        self.check_process()
        self.failure = None
        if self._following is None:
            self._form_alone()
            return
        cause: Exception | None = None
        while True:
            self.verdict = self.stand(RankStanding(), cause)
            if self.verdict.action is StandingAction.FORWARD:
                continue
            try:
                self.form()
                return
            except UnreachableError as error:
                _log.warning("%s", error)
                cause = error

    def stand(self, own: RankStanding, cause: Exception | None = None) -> StandingVerdict:
        """State at the meeting point of the newest world what this process has; return what follows
        from the statements of all its ranks. The old groups are left; none are formed.

        Args:
            cause: failure of the world before; raised when no newer one comes in `reform_s`, or
                somewhat later where others are to end first.

        Raises:
            ProtocolError: a rank's statement cannot be read.
            HoldfastError: the daemon refuses this process.
        """
        self.check_process()
        following, statement = self._following, msgspec.json.encode(own).decode()
        assert following is not None
        while True:
            meeting = self._meeting
            if meeting is None or following.epoch > meeting.epoch:
                self.leave()
                meeting = self._next(following, cause, self._patience_s(own))
            try:
                if meeting is not self._meeting:
                    self._meet(following, meeting)
                assert self._point is not None
                # The first time some rank may still be starting; after that, all are here.
                timeout_s = self._timeout_s if self._stood else inf
                texts = self._point.gather(statement, timeout_s)
            except (RuntimeError, OSError, HoldfastError) as error:
                _log.warning("epoch %d: its ranks could not meet: %s", meeting.epoch, error)
                cause = error if isinstance(error, HoldfastError) else UnreachableError(str(error))
                self.leave()
                continue
            self._stood = True
            verdict = standing(read_standings(texts))
            _log.info("epoch %d: %s: %s", meeting.epoch, verdict.action, verdict.reason)
            return verdict

    def form(self) -> None:
        """Form the groups of the world at whose meeting point this process is.

        Raises:
            UnreachableError: they could not be formed; then they are left.
        """
        following, meeting, began_s = self._following, self._meeting, time.monotonic()
        assert following is not None and meeting is not None and self._point is not None
        self._epoch, self._store_address = meeting.epoch, meeting.store_address
        self._rank, self._size = self._rank_in(meeting), meeting.nodes * self._nproc
        try:
            self._point.form(self._backend, self._timeout_s)
            for group in self._groups:
                self._split(group)
        except (RuntimeError, OSError, HoldfastError) as error:
            self.leave()
            raise UnreachableError(
                f"epoch {meeting.epoch}: its groups could not be formed: {error}"
            ) from error
        self._meeting, self._left, self.failure = None, False, None
        if "nccl" in self._backend:
            threading.Thread(
                target=self._wake_at_end, args=(following, meeting.epoch), daemon=True
            ).start()
        self._log_formed(began_s)

    def leave(self) -> None:
        """Leave all groups, which wakes the ranks that wait for this one."""
        self._left = True
        given = [group._now for group in self._groups if group._now is not None]
        for group in self._groups:
            group._now = None
            if group._carrier is not None:
                group._carrier.drop()
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()
        self._point = self._meeting = None
        groups.leave(given)

    def survives(self, error: Exception) -> bool:
        """Whether `error` follows from the end of this world, so that this process goes on in the
        next one. If so, collectives of other threads end soon."""
        if self._following is None or self._process != os.getpid():
            return False
        if not (self.ended or groups.is_of_group(error)):
            return False
        self._left = True
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _patience_s(self, own: RankStanding) -> float:
        """Time to wait for a newer world after a failure.

        Where no process was lost, nobody begins one, and all would end at the same moment, with all
        that they have. So one that has nothing ends first, or else rank 0: that brings a new world,
        in which the others go on.
        """
        turn = 0 if own.step == NEW else 1 if self._rank == 0 else 2
        return self._reform_s * (1 + turn / 6)

    def _next(
        self, following: WorldFollower, cause: Exception | None, patience_s: float
    ) -> Meeting:
        """Wait for a world newer than the present one."""
        if cause is not None and not following.wait_newer(self._reached, patience_s):
            raise cause
        while True:
            meeting = following.wait_ready(self._reached, _WAIT_S)
            if meeting is None:
                _log.info("waiting for a world newer than epoch %d", self._reached)
            elif meeting.keep or not self._reached:
                return meeting
            else:
                # Another process takes this one's place; its launcher is about to end this one.
                size = meeting.nodes * self._nproc
                _log.warning(
                    "epoch %d: a new process takes the place of this one%s",
                    meeting.epoch,
                    ""
                    if self._any_size or size == self._size
                    else f": there are {size} ranks now, and it stays for {self._size} only "
                    "(any_size)",
                )
                following.wait_newer(meeting.epoch, _WAIT_S)

    def _meet(self, following: WorldFollower, meeting: Meeting) -> None:
        """Come to the meeting point of a world."""
        self._reached, self._stood = meeting.epoch, False
        # From here on, the launcher waits for others only: this process is free of the old world.
        following.arrive(self._rank_in(meeting), meeting.store_address)
        self._point = groups.MeetingPoint(
            meeting.store_address,
            meeting.store_key,
            epoch=meeting.epoch,
            rank=self._rank_in(meeting),
            size=meeting.nodes * self._nproc,
            ended=lambda: following.epoch > meeting.epoch,
        )
        self._meeting = meeting

    def _rank_in(self, meeting: Meeting) -> int:
        """Rank of this process in the world of `meeting`."""
        return meeting.node_rank * self._nproc + self._local_rank

    def _split(self, group: WorldGroup) -> None:
        parts = group._parts(self._size)
        forming: AbstractContextManager[None] = nullcontext()
        if self._point is not None:
            self._point.meet()
            forming = self._point.forming(self._backend)
        with forming:
            group._now = groups.split(parts, self._rank, self._timeout_s, group._carrier)

    def _form_alone(self) -> None:
        """Form the groups that torchrun's environment names, or those of one process."""
        began_s = time.monotonic()
        if self._store_address:
            dist.init_process_group(self._backend, timeout=timedelta(seconds=self._timeout_s))
        else:
            dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
        self._rank, self._size, self._left = dist.get_rank(), dist.get_world_size(), False
        self._log_formed(began_s)

    def _log_formed(self, began_s: float) -> None:
        """Log the time that forming the groups took. The epoch is 0 where it is not known yet."""
        _log.info(
            "epoch %d: rank %d of %d, groups formed in %.3f s",
            self._epoch,
            self._rank,
            self._size,
            time.monotonic() - began_s,
        )

    def _wake_at_end(self, following: WorldFollower, epoch: int) -> None:
        """Wake this process out of collectives on its device once `epoch` has ended."""
        while not following.wait_newer(epoch, _WAIT_S):
            if self._epoch != epoch or self._left:
                return
        if self._epoch == epoch:
            groups.wake()
