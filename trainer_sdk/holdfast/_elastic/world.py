"""`World`: the ranks that train together at present, as one of their processes sees it.

Process groups belong to a world. When a rank or a node is lost, the world ends: this process leaves
its groups. In the next epoch it forms them again, with the processes that replace the lost ones.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    HashStore,
)

from holdfast._agree.exchange import Exchange, GlooExchange, make_exchange, wait
from holdfast._daemon.following import Meeting, WorldFollower
from holdfast._elastic import connections, groups
from holdfast._elastic.ddp import FirstPass, Prepare, WorldDDP
from holdfast._elastic.remade_groups import RemadeGroups, WorldGroups
from holdfast._elastic.sharded import Replaced, WorldSharded
from holdfast._elastic.stage_group import Carrier
from holdfast._elastic.staying_groups import StayingGroups
from holdfast_core.batches import BatchPlan, plan_batch
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
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")
_WAIT_S = 20.0
"""Longest single wait for news from the daemon."""
_SHOWN_AFTER = 0.5
"""Part of `reform_s` after which a process that has not left its world shows where it is."""
_ASK_AGAIN_S = 0.2
"""Pause before a daemon that has not answered is asked again."""
Parts = Sequence[Sequence[int]]
Partition = Parts | Callable[[int], Parts]
"""Lists of ranks, or a function that returns them for a number of ranks."""


class WorldGroup:
    """The process group of a part of the world. Each world has a new one.

    Pass `group.now` to each collective, and keep no reference to it.
    """

    def __init__(self, world: World, partition: Partition, carrier: Carrier | None = None) -> None:
        self._world = world
        self._partition, self._carrier = partition, carrier
        self._now: dist.ProcessGroup | None = None
        self._newest: dist.ProcessGroup | None = None
        """The group of the newest world that had one."""

    @property
    def now(self) -> dist.ProcessGroup:
        """The process group of the present world.

        Raises:
            UnreachableError: the world has ended, and the next one has no groups yet.
        """
        self._world.check_process()
        if self._now is None:
            raise UnreachableError("the training world has ended; its groups are formed again")
        return self._now

    def wait(self, work: dist.Work | None) -> None:
        """Wait for `work` of a collective; see `World.wait`."""
        self._world.wait(work)

    def finish(self) -> None:
        """Wait for the results of all collectives; see `World.finish_collectives`."""
        self._world.finish_collectives()

    def _parts(self, size: int) -> Parts:
        """Return the partition of a world of `size` ranks. Raises InvalidJobError if it does not
        name each rank once."""
        partition = self._partition
        parts = partition(size) if callable(partition) else partition
        if sorted(rank for part in parts for rank in part) != list(range(size)):
            raise InvalidJobError(
                f"partition {[list(part) for part in parts]} must hold each of the {size} ranks "
                f"once"
            )
        return parts


class World:
    """The training world of this process, made by `holdfast.elastic.init`.

    Args:
        backend: torch's backend for training's collectives.
        following: news from the daemon; None if this process ends with its world.
        any_size: whether this process also stays for worlds of another size.
        store_address: `host:port` of the store in torchrun's environment; empty without torchrun.
        local_rank: number of this process among the processes of its node.
        nproc: number of processes on each node.
        timeout_s: time that each of training's collectives may take.
        reform_s: time to wait for a new world after a collective has failed.
        nccl_stays: whether groups of NCCL stay as objects.

    Raises:
        InvalidJobError: `nccl_stays`, and this torch cannot do it.
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
        nccl_stays: bool = False,
    ) -> None:
        self._backend, self._following, self._any_size = backend, following, any_size
        self._local_rank, self._nproc = local_rank, nproc
        self._timeout_s, self._reform_s = timeout_s, reform_s
        self._all: WorldGroups = RemadeGroups(backend, timeout_s)
        """All groups of this process."""
        self._why_not = connections.why_not(backend, nccl_stays=nccl_stays)
        self._on_device = groups.has_nccl(backend) or (nccl_stays and not self._why_not)
        """Whether collectives may end on the device, where this process does not notice it."""
        self._messages = 0
        """Number of messages that this rank has begun to send or to receive."""
        self._last = (-1, connections.Begun())
        """The newest epoch whose groups were ended here, and what this rank had begun in them."""
        if following is not None:
            self._let_groups_stay(nccl_stays)
        self._groups: list[WorldGroup] = []
        self._ddps: list[WorldDDP] = []
        self._sharded: list[WorldSharded] = []
        self._wakes_default = False
        self._exchanges: list[GlooExchange] = []
        self._point: groups.MeetingPoint | None = None
        self._rank, self._size, self._epoch = 0, 1, 0
        self._store_address = store_address
        self._meeting: Meeting | None = None
        """The world whose meeting point this process has joined, until its groups are formed."""
        self._reached = 0
        """Newest epoch whose meeting point this process has joined."""
        self._stood = False
        """Whether the ranks of that epoch have all stated what they have."""
        self._left = True
        self._over = threading.Event()
        """Set once this process has left the groups of its newest world."""
        self._has_session = False
        self._process = os.getpid()
        self.failure: Exception | None = None
        """The newest failure of a collective of this world; None if none has failed."""
        self.verdict: StandingVerdict | None = None
        """Verdict on the statements of all ranks when this process joined its first world; None if
        this process ends with its world."""

    @property
    def rank(self) -> int:
        """Rank of this process in the present world. It may differ in the next one."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the present world."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Number of this process among the processes of its node, and of its device."""
        return self._local_rank

    @property
    def nproc(self) -> int:
        """Number of processes on each node."""
        return self._nproc

    @property
    def timeout_s(self) -> float:
        """Seconds that each of training's collectives may take."""
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
    def any_size(self) -> bool:
        """Whether this process also stays for worlds of another size."""
        return self._any_size

    @property
    def stays(self) -> bool:
        """Whether this process stays when its world changes."""
        return self._following is not None

    @property
    def groups_stay(self) -> bool:
        """Whether process groups stay as objects when this world changes and keeps its size, also
        those that libraries made: of device meshes, FSDP2 and DTensors."""
        return self._all.stay

    @property
    def why_groups_go(self) -> str:
        """Why process groups do not stay as objects, and what to change; empty if they stay."""
        return "" if self._all.stay else self._why_not or "this process ends with its world"

    @property
    def ended(self) -> bool:
        """Whether this world has ended: its collectives fail, and its saves are refused."""
        return self._left or (self._following is not None and self._following.epoch > self._epoch)

    def group(self, partition: Partition) -> WorldGroup:
        """Split the world into process groups, now and in each later world.

        All ranks call it with equal arguments, before `holdfast.init`, because later worlds form
        these groups before any other.

        Args:
            partition: lists of ranks that together name each rank of the world exactly once. With
                `any_size`, a function that returns such lists for a number of ranks.

        Returns:
            The group of this rank.

        Raises:
            InvalidJobError: a rank is missing, or in several parts; lists are given although the
                world has `any_size`; or `holdfast.init` was called before.
        """
        return self.form_group(partition, None)

    def ddp(
        self,
        module: nn.Module,
        *,
        group: WorldGroup | None = None,
        prepare: Prepare | None = None,
        first_pass: FirstPass | None = None,
        **options: Any,
    ) -> WorldDDP:
        """Wrap `module` so that its gradients are averaged over the ranks of the present world.
        Each world gets a `DistributedDataParallel` of its own around the same module.

        All ranks call it, before `holdfast.init`. It makes no collective: the first forward pass of
        each world does, so nothing is broadcast here, and each rank builds its model from the seed.

        Args:
            module: on its device already.
            group: where only a part of the world averages; None: all ranks.
            prepare: called with each new DDP, to register a communication hook. State of the hook
                is lost with its world.
            first_pass: computes a loss from any batch through the DDP that it is given, and draws
                random numbers from the usual generators at most. In each world, DDP sorts its
                buckets by the order in which this pass computes gradients; without it, by the
                order of the parameters, backwards. Needed with `static_graph`.
            **options: further arguments of `DistributedDataParallel`.

        Raises:
            InvalidJobError: an argument follows from the world; `static_graph` without
                `first_pass`; after `holdfast.init`.
        """
        if self._has_session:
            raise InvalidJobError(
                "world.ddp after holdfast.init: wrap the module first, and give holdfast.init what "
                "world.ddp returns"
            )
        made = WorldDDP(module, partial(self._group_now, group), prepare, first_pass, options)
        if not self._wakes:
            self._wake_at_its_end()
        self._ddps.append(made)
        return made

    def sharded(self, build: Callable[[], nn.Module]) -> WorldSharded:
        """Build a model that is sharded over the ranks of the present world: by FSDP2, HSDP or
        another use of DTensors. In a world of another size it is built again.

        All ranks call it, before `holdfast.init`.

        Args:
            build: builds the model from the seed, makes meshes for `world.size` ranks, and shards
                the model over them. It makes no other collective, and is also called later.

        Raises:
            InvalidJobError: groups do not stay in this process; after `holdfast.init`.
        """
        if self._has_session:
            raise InvalidJobError(
                "world.sharded after holdfast.init: build the model first, and give holdfast.init "
                "what world.sharded returns"
            )
        if self.stays and not self.groups_stay:
            raise InvalidJobError(
                f"world.sharded needs process groups that stay when the world changes, and these "
                f"do not: {self.why_groups_go}. Otherwise leave `world` out, so that all processes "
                f"start again after a failure"
            )
        made = WorldSharded(build)
        self._sharded.append(made)
        return made

    def batch_plan(
        self,
        global_batch: int,
        *,
        micro_batch: int | None = None,
        topology: Topology | None = None,
    ) -> BatchPlan:
        """Return this rank's part of a step that has `global_batch` samples in any world. Make it
        anew in each world (`step.resumed`).

        Args:
            micro_batch: largest number of samples that fits one pass of a rank; None: no limit.
            topology: as for `holdfast.init`, if tp or pp is above 1.

        Raises:
            InvalidJobError: a rank of the present world would have no sample, or the topology does
                not fit this world.
        """
        return plan_batch(
            global_batch,
            rank=self._rank,
            size=self._size,
            micro_batch=micro_batch,
            topology=topology,
        )

    def wait(self, work: dist.Work | None) -> None:
        """Wait for the `work` of a collective with `async_op=True`, until this world ends.

        A collective without `async_op` notices when a rank dies, but not when a node falls silent.
        For `isend` and `irecv`, call their own `wait` instead: gloo aborts them when a wait for
        them times out.

        Raises:
            UnreachableError: the world has ended.
            RuntimeError: the collective failed.
        """
        self.check_process()
        if work is None:  # This rank is not in the group of the collective.
            return
        try:
            if not self._on_device:
                wait(work, lambda: self.ended)
            else:
                work.wait()
        except Exception as error:
            self.failure = error
            raise

    def send(self, flat: torch.Tensor, to: int) -> None:
        """Send bytes, uint8 [n], to rank `to`."""
        self._messages += 1
        dist.send(flat, to)

    def receive(self, flat: torch.Tensor, source: int) -> None:
        """Fill `flat`, uint8 [n], with the bytes that rank `source` sends."""
        self._messages += 1
        dist.recv(flat, source)

    def start_send(self, flat: torch.Tensor, to: int) -> dist.Work:
        """Begin `send`."""
        self._messages += 1
        work = dist.isend(flat, to)
        assert work is not None, "this rank is in the default group"
        return work

    def start_receive(self, flat: torch.Tensor, source: int) -> dist.Work:
        """Begin `receive`."""
        self._messages += 1
        work = dist.irecv(flat, source)
        assert work is not None, "this rank is in the default group"
        return work

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all ranks, in place. Collective."""
        self.wait(dist.all_reduce(tensor, async_op=True))

    def close(self) -> None:
        """Leave the groups for good. From then on, a failure elsewhere ends this process."""
        if self._following is not None:
            self._following.close()
        self.leave()
        self._all.close()

    def wake_default_group(self) -> None:
        """Let the thread that watches for the end of a world also end collectives of the default
        group, in which a framework reduces gradients: torch waits for them by itself."""
        wakes, self._wakes_default = self._wakes, True
        if not wakes:
            self._wake_at_its_end()

    # --- called by the session --------------------------------------------------------------------

    def build_again(
        self, optimizers: Sequence[Any], on_replaced: Callable[[Replaced], None]
    ) -> str:
        """Build the models whose meshes belong to another world; see `WorldSharded.build_again`.
        Collective. Return why they lack the values of the old ones; empty if they have them."""
        stale = [each for each in self._sharded if each.stale]
        problems = [each.build_again(optimizers, on_replaced) for each in stale]
        return next((problem for problem in problems if problem), "")

    def form_group(self, partition: Partition, carrier: Carrier | None) -> WorldGroup:
        """Form groups as `group` does. If `carrier` is given, it sends and receives for them."""
        if self._sharded:
            raise InvalidJobError(
                "world.group was called after world.sharded: worlds of another size form the "
                "groups of world.group first; call it before world.sharded"
            )
        if self._has_session:
            raise InvalidJobError(
                "world.group was called after holdfast.init: processes that stay would form groups "
                "in another order than new ones; form all groups before holdfast.init"
            )
        if self._any_size and not callable(partition):
            raise InvalidJobError(
                f"partition {[list(part) for part in partition]} is for {self._size} ranks only, "
                f"but this process stays for any number of ranks (any_size=True): give a function "
                f"that returns the partition for a number of ranks"
            )
        made = WorldGroup(self, partition, carrier)
        self._split(made)
        self._groups.append(made)
        return made

    def exchange(self, timeout_s: float) -> Exchange:
        """Make an exchange between the ranks of this world. Collective."""
        self._has_session = True
        if self._point is None:
            return make_exchange(self._size, timeout_s)
        self._point.meet()
        epoch = self._epoch
        made = GlooExchange(
            timeout_s,
            lambda: self.ended or self._epoch != epoch,
            form_s=groups.FORM_S,
            forming=self._all.forming,
            device_backend="gloo" if self._all.stay else None,
        )
        self._exchanges.append(made)
        return made

    def gather_patiently(self, text: str) -> list[str]:
        """Gather the `text` of each rank of this world, however long the slowest rank takes.
        Collective.

        Raises:
            StaleEpochError: the world ended before all ranks had sent theirs.
            RuntimeError: the store was lost.
        """
        if self._point is None:
            raise UnreachableError("the training world has ended")
        return self._point.gather(text)

    def begin_step(self, step: int) -> None:
        """Note that the body of `step` begins; see `go_back_to`."""
        self._all.begin(step)

    def go_back_to(self, step: int) -> None:
        """Undo that groups were made after `step`: the steps that made them are repeated."""
        self._all.go_back_to(step)

    def begin_alone(self, *, held_beside: bool) -> None:
        """Report that training started from the beginning and could not continue live without this
        member. If the report does not arrive, the daemon keeps this process when its world changes,
        and the process then ends by itself.

        Args:
            held_beside: whether training could continue live without this rank alone.
        """
        following = self._following
        if following is None:
            return
        try:
            following.arrive(
                self._rank, self._store_address, began_alone=True, held_beside=held_beside
            )
        except HoldfastError as error:
            _log.info("the daemon was not told that this member cannot be kept: %s", error)

    def check_process(self) -> None:
        """Raise InvalidJobError in a process that was forked from the one that made this world: it
        has the sockets of its parent, but no thread that serves them."""
        if self._process != os.getpid():
            raise InvalidJobError("a forked process cannot use its parent's world")

    def join(self) -> None:
        """Join the first world of this process, which has no training state yet: wait for the
        newest world and form its groups. `holdfast.elastic.init` calls it.

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
        """Tell the ranks of the newest world what training state this process has, and return the
        verdict on the statements of all of them.

        Afterwards this process has left its old groups, but has formed no new ones; see `form`.

        Args:
            own: the training state of this process.
            cause: the failure that ended the previous world; None if it did not fail. It is raised
                if no newer world comes within about `reform_s` (see `_patience_s`).

        Raises:
            ProtocolError: the statement of a rank cannot be decoded.
            HoldfastError: the daemon refuses this process.
        """
        self.check_process()
        following, statement = self._following, msgspec.json.encode(own).decode()
        assert following is not None
        while True:
            # Leave a world that has ended, and wait for a newer one.
            meeting = self._meeting
            if meeting is None or following.epoch > meeting.epoch:
                self.leave()
                meeting = self._next(following, cause, self._patience_s(own))
            # Join its meeting point, and gather the statements of all ranks. If that fails, this
            # world has ended as well.
            try:
                if meeting is not self._meeting:
                    self._meet(following, meeting)
                assert self._point is not None
                # Before the first statements a rank may still be starting; later all are here.
                timeout_s = self._timeout_s if self._stood else inf
                texts = self._point.gather(statement, timeout_s)
            except (RuntimeError, OSError, HoldfastError) as error:
                _log.warning("epoch %d: its ranks could not meet: %s", meeting.epoch, error)
                cause = error if isinstance(error, HoldfastError) else UnreachableError(str(error))
                self.leave()
                continue
            # All ranks have the same statements, so all reach the same verdict.
            self._stood = True
            verdict = standing(read_standings(texts))
            _log.info("epoch %d: %s: %s", meeting.epoch, verdict.action, verdict.reason)
            return verdict

    def form(self) -> None:
        """Form the groups of the world whose meeting point this process has joined. Collective.

        Raises:
            UnreachableError: the groups could not be formed; this process has left all of them.
        """
        following, meeting, began_s = self._following, self._meeting, time.monotonic()
        assert following is not None and meeting is not None and self._point is not None
        self._epoch, self._store_address = meeting.epoch, meeting.store_address
        self._rank, self._size = self._rank_in(meeting), meeting.nodes * self._nproc
        # The default group first, then the groups of the script, in the order of its calls.
        try:
            stale = any(each.stale for each in self._sharded)  # building one was cut off
            if stale or self._all.is_other(self._rank, self._size):
                self._drop_groups()
            self._all.form(self._point, epoch=self._epoch, rank=self._rank, size=self._size)
            for group in self._groups:
                self._split(group)
        except (RuntimeError, OSError, HoldfastError) as error:
            self.leave()
            raise UnreachableError(
                f"epoch {meeting.epoch}: its groups could not be formed: {error}"
            ) from error
        self._meeting, self._left, self.failure = None, False, None
        self._over = threading.Event()
        # Collectives that torch waits for by itself do not notice the end of a world, so a thread
        # wakes them.
        if self._wakes:
            self._wake_at_its_end()
        self._log_formed(began_s)

    def leave(self) -> None:
        """Leave all groups. That wakes the ranks that wait for this one in a collective."""
        self._left = True
        for each in self._ddps:
            each.drop()
        given = [group._now for group in self._groups if group._now is not None]
        for group in self._groups:
            group._now = None
            if group._carrier is not None:
                group._carrier.drop()
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()
        self._point = self._meeting = None
        self._note_last(self._epoch, [*c10d._world.pg_map])
        self._all.leave(given)
        self._over.set()

    def survives(self, error: Exception) -> bool:
        """Whether `error` results from the end of this world, so that this process continues in the
        next one. If so, the collectives of other threads end soon as well."""
        if self._following is None or self._process != os.getpid():
            return False
        if not (self.ended or groups.is_of_group(error)):
            return False
        self._left = True
        return True

    def finish_collectives(self, since: connections.Begun | None = None) -> connections.Begun:
        """Wait until all collectives that this rank has begun have their results, and all messages
        between stages have arrived. Those of NCCL return before the device has computed them, and
        end without a result, but also without an error, when their world does.

        Args:
            since: what an earlier call returned. If no collective and no message was begun since,
                this returns at once.

        Raises:
            InvalidJobError: a CUDA graph is being captured.
            UnreachableError: one was ended before, or the world has ended.
        """
        if not self._on_device:
            return connections.Begun()
        begun = [*c10d._world.pg_map]
        if since is not None and since.messages == self._messages:
            epoch, last = self._last  # torch has forgotten the groups of a world that has ended
            ended_so = not begun and epoch == self._epoch and last.is_like(since)
            if ended_so or not since.more(begun):
                return since
        try:
            connections.finish(begun)
            if self.ended:
                raise UnreachableError("the training world has ended")
        except Exception as error:
            self.failure = error
            raise
        return connections.Begun(begun, self._messages)

    # --- inside -----------------------------------------------------------------------------------

    def _note_last(self, epoch: int, of_groups: list[dist.ProcessGroup]) -> None:
        """Note what this rank has begun in the groups of `epoch`, which begin nothing more. Empties
        `of_groups`."""
        if self._on_device and of_groups:
            self._last = (epoch, connections.Begun(of_groups, self._messages))
        of_groups.clear()

    def _let_groups_stay(self, nccl_stays: bool) -> None:
        """Let process groups stay as objects if torch can do that. Raises InvalidJobError if it
        was asked for with NCCL and is impossible."""
        if not self._why_not:
            self._all = StayingGroups(
                self._backend,
                self._timeout_s,
                nccl_stays=nccl_stays,
                nccl_form_s=self._reform_s,
                local_rank=self._local_rank,
            )
        elif nccl_stays and groups.has_nccl(self._backend):
            raise InvalidJobError(
                f"holdfast.elastic.init({self._backend!r}, nccl_stays=True): process groups cannot "
                f"stay when the world changes: {self._why_not}. Without nccl_stays and "
                f"HOLDFAST_NCCL_STAYS each world makes them again"
            )

    def _patience_s(self, own: RankStanding) -> float:
        """Seconds to wait for a newer world after a failure.

        If no process was lost, no newer world comes, and all processes would give up at the same
        moment and lose their state. So a process without state gives up first, or else rank 0: its
        end brings a new world, in which the others continue.
        """
        turn = 0 if own.step == NEW else 1 if self._rank == 0 else 2
        return self._reform_s * (1 + turn / 6)

    def _next(
        self, following: WorldFollower, cause: Exception | None, patience_s: float
    ) -> Meeting:
        """Wait for a world that is newer than the newest one that this process has joined.

        Args:
            cause: raised if no newer epoch begins within `patience_s`; None waits on.
        """
        if cause is not None and not following.wait_newer(self._reached, patience_s):
            raise cause
        while True:
            meeting = following.wait_ready(self._reached, _WAIT_S)
            if meeting is None:
                _log.info("waiting for a world newer than epoch %d", self._reached)
            elif meeting.keep or not self._reached:
                self._check_same_rank(meeting)
                return meeting
            else:
                # A new process replaces this one, which its launcher is about to end.
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

    def _check_same_rank(self, meeting: Meeting) -> None:
        """Raise UnreachableError if groups stay, but belong to another rank than this process would
        have in the world of `meeting`."""
        rank, size = self._rank_in(meeting), meeting.nodes * self._nproc
        if self._all.is_other(rank, size) and not self._any_size:
            raise UnreachableError(
                f"epoch {meeting.epoch}: this process would be rank {rank} of {size}, but its "
                f"groups and shards are those of rank {self._rank} of {self._size}; a new process "
                f"takes its place"
            )

    def _meet(self, following: WorldFollower, meeting: Meeting) -> None:
        """Join the meeting point of a world."""
        self._reached, self._stood = meeting.epoch, False
        self._arrive(following, meeting)
        self._point = groups.MeetingPoint(
            meeting.store_address,
            meeting.store_key,
            epoch=meeting.epoch,
            rank=self._rank_in(meeting),
            size=meeting.nodes * self._nproc,
            ended=lambda: following.epoch > meeting.epoch,
            form_s=self._all.form_s,
        )
        self._meeting = meeting

    def _arrive(self, following: WorldFollower, meeting: Meeting) -> None:
        """Tell the launcher that this process has left the old world, so that it need not kill it.
        A daemon that does not answer, perhaps because it is just being replaced, is asked again.

        Raises:
            HoldfastError: the world has ended, or the daemon did not answer within `reform_s`.
        """
        until = time.monotonic() + self._reform_s
        while True:
            try:
                following.arrive(self._rank_in(meeting), meeting.store_address)
            except UnreachableError as error:
                if time.monotonic() > until or following.wait_newer(meeting.epoch, _ASK_AGAIN_S):
                    raise
                _log.info("epoch %d: asking again: %s", meeting.epoch, error)
            else:
                return

    def _rank_in(self, meeting: Meeting) -> int:
        """Rank of this process in the world of `meeting`."""
        return meeting.node_rank * self._nproc + self._local_rank

    def _split(self, group: WorldGroup) -> None:
        """Form the process groups of `group` in the present world. Collective."""
        parts = group._parts(self._size)
        group._now = group._newest = self._all.split(
            parts, self._rank, group._carrier, group._newest
        )

    def _drop_groups(self) -> None:
        """Forget the groups of the script: they belong to another rank, or to a world of another
        size, and this process makes all of them again, as a new one does."""
        self._all.close()
        for group in self._groups:
            group._newest = None
        for each in self._sharded:
            each.stale = True

    def _form_alone(self) -> None:
        """Form the groups of torchrun's environment or, without one, a world of one process."""
        began_s = time.monotonic()
        if self._store_address:
            dist.init_process_group(self._backend, timeout=timedelta(seconds=self._timeout_s))
        else:
            dist.init_process_group(self._backend, store=HashStore(), rank=0, world_size=1)
        self._rank, self._size, self._left = dist.get_rank(), dist.get_world_size(), False
        self._log_formed(began_s)

    def _log_formed(self, began_s: float) -> None:
        """Log how long it took to form the groups. The epoch is 0 if it is not known yet."""
        _log.info(
            "epoch %d: rank %d of %d, groups formed in %.3f s",
            self._epoch,
            self._rank,
            self._size,
            time.monotonic() - began_s,
        )

    def _group_now(self, group: WorldGroup | None) -> dist.ProcessGroup:
        """The process group of `group`, or of all ranks, in the present world."""
        if group is not None:
            return group.now
        self.check_process()
        if self._left or dist.group.WORLD is None:
            raise UnreachableError("the training world has ended; its groups are formed again")
        return dist.group.WORLD

    @property
    def _wakes(self) -> bool:
        """Whether a thread wakes this process at the end of the present world."""
        return self._all.always_wakes or bool(self._ddps) or self._wakes_default

    def _wake_at_its_end(self) -> None:
        """Have a thread wake this process out of collectives that torch waits for by itself, on a
        device or in a backward pass, once the present world has ended."""
        if self._following is not None:
            args = (self._following, self._epoch, self._over)
            threading.Thread(target=self._wake_at_end, args=args, daemon=True).start()

    def _wake_at_end(self, following: WorldFollower, epoch: int, over: threading.Event) -> None:
        """Wake collectives that torch waits for by itself, once `epoch` has ended. If the process
        stays in that world all the same, show where it is before its launcher kills it."""
        while not following.wait_newer(epoch, _WAIT_S):
            if over.is_set():
                return
        waited = [each.group for each in self._ddps]
        if self._wakes_default:
            waited.append(dist.group.WORLD)
        ended = [*c10d._world.pg_map]
        self._all.wake(epoch, [group for group in waited if group is not None])
        self._note_last(epoch, ended)  # afterwards: until then others may have been begun
        stays_s = self._reform_s * _SHOWN_AFTER
        if not over.wait(stays_s):
            _log.error(
                "epoch %d ended %.0f s ago, and this process has not left it: something outside of "
                "its collectives holds it up. Its threads are here:",
                epoch,
                stays_s,
            )
            faulthandler.dump_traceback()
