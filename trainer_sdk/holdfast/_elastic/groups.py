"""Process groups that are formed, left and formed again in one process.

This module depends on the following facts of torch's gloo. `abort()` wakes nobody. Dropping the
last reference to a group waits for its pending collectives, which write into their tensors as soon
as the ranks come back that they wait for. When a wait for a message times out, all connections of
its group close. So this module lets such a wait time out to disconnect a group, and then drops the
group on a separate thread.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from holdfast._agree.exchange import set_timeout
from holdfast._causes import chain_of
from holdfast._daemon.sealed_store import SealedStore
from holdfast._elastic import stage_group
from holdfast._elastic.forming import FormingStore, wait_for_keys
from holdfast._elastic.stage_group import Carrier
from holdfast_core.errors import StaleEpochError, UnreachableError

_log = logging.getLogger("holdfast")

FORM_S = 15.0
"""Time to form a group once all ranks have met, in a world that lasts."""
DROP_S = 5.0
"""Time for which a process that ends waits until its groups are destroyed."""
SETTLE_S = 1.0
"""Longest wait for the threads of left groups, in which a failed collective may still compute."""
CONNECT_S = 10.0
"""Time to reach the store of an epoch."""
_ATTEMPT_S = 2.0
"""Time of one attempt to reach it. After each, the process checks whether the world still lasts."""
_NO_TIME = timedelta(milliseconds=1)
_UNUSED_TAG = 2**30
"""A tag with which nobody sends messages."""
_TEXTS = msgspec.msgpack.Decoder(list[str])


class MeetingPoint:
    """The store of one world, at which its ranks meet before they form a group. They meet first
    because some ranks may come late, while forming has a deadline.

    At a meeting each rank writes a text. When all have, rank 0 reads the texts and writes all of
    them as one value, so that every other rank reads only one value.

    Args:
        store_address: `host:port`.
        key: key of the store, which the daemons give to the ranks of this world.
        epoch: membership epoch of the world.
        rank: rank of this process in the world.
        size: number of ranks in the world.
        ended: returns whether the world has ended.
        form_s: time within which each rank must come to a group that is formed.

    Raises:
        StaleEpochError: the world ended before its store was reached.
        ProtocolError: there is no key, because a daemon is too old to pass it on.
        RuntimeError: the store cannot be reached.
    """

    def __init__(
        self,
        store_address: str,
        key: str,
        *,
        epoch: int,
        rank: int,
        size: int,
        ended: Callable[[], bool],
        form_s: float = FORM_S,
    ) -> None:
        self._epoch, self._rank, self._size, self._ended = epoch, rank, size, ended
        world, store = f"world-{epoch}", self._connect(store_address)
        self._sealed = SealedStore(store, world, key)
        self._forming = FormingStore(
            store, f"{world}/gloo", key, epoch=epoch, ended=ended, form_s=form_s
        )
        self._plain = PrefixStore(f"{world}/nccl", store)
        self._meetings = 0

    def meet(self) -> None:
        """Wait until all ranks have called this equally often.

        Raises:
            StaleEpochError: the world ended first.
            UnreachableError: a stranger wrote the value of a rank.
            RuntimeError: the store was lost.
        """
        self._come(b"", lambda said: b"", inf)

    @property
    def forming_store(self) -> FormingStore:
        """The store of this world's gloo groups."""
        return self._forming

    def gather_from(
        self, name: str, ranks: Sequence[int], text: str, timeout_s: float
    ) -> list[str]:
        """Gather the `text` of each of `ranks`, in this order. These ranks call it, once for each
        `name`.

        Raises:
            StaleEpochError: the world ended first.
            UnreachableError: some rank did not call it in time, or a stranger wrote its text.
            RuntimeError: the store was lost.
        """
        keys = [f"of-{name}-{rank}" for rank in ranks]
        self._sealed.set(f"of-{name}-{self._rank}", text.encode())
        late = f"epoch {self._epoch}: some rank of {list(ranks)} did not make group {name}"
        wait_for_keys(self._sealed, keys, timeout_s, self._check_lasts, late)
        return [said.decode() for said in self._sealed.multi_get(keys)]

    def gather(self, text: str, timeout_s: float = inf) -> list[str]:
        """Gather the `text` of each rank, without a process group. All ranks call it.

        Args:
            timeout_s: time within which the other ranks must call it.

        Raises:
            StaleEpochError: the world ended first.
            UnreachableError: some rank did not call it in time, or a stranger wrote its text.
            RuntimeError: the store was lost.
        """
        return _TEXTS.decode(self._come(text.encode(), _encode_texts, timeout_s))

    def _come(
        self, said: bytes, hand_out: Callable[[list[bytes]], bytes], timeout_s: float
    ) -> bytes:
        """Take part in the next meeting, and return the value that rank 0 made of the texts.

        Args:
            said: this rank's text.
            hand_out: makes the common value from the texts of all ranks; called on rank 0.
        """
        self._meetings += 1
        come = [f"come-{self._meetings}-{rank}" for rank in range(self._size)]
        complete = f"complete-{self._meetings}"
        self._sealed.set(come[self._rank], said)
        awaited = come if self._rank == 0 else [complete]
        late = f"epoch {self._epoch}: some rank did not finish its step"
        wait_for_keys(self._sealed, awaited, timeout_s, self._check_lasts, late)
        if self._rank == 0:
            self._sealed.set(complete, hand_out(self._sealed.multi_get(come)))
        return self._sealed.get(complete)

    def _check_lasts(self) -> None:
        if self._ended():
            raise StaleEpochError(f"epoch {self._epoch} ended before its ranks had met")

    def form(self, backend: str, timeout_s: float) -> None:
        """Form the default process group. Collective. Raises as `meet`, or RuntimeError if a rank
        is lost meanwhile."""
        self.meet()
        with self.forming(backend):
            dist.init_process_group(
                backend,
                store=self._plain if has_nccl(backend) else self._forming,
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(seconds=FORM_S),
            )
        assert dist.group.WORLD is not None
        set_timeout(dist.group.WORLD, timeout_s)

    @contextmanager
    def forming(self, backend: str | None) -> Iterator[None]:
        """Form groups of `backend` within the block; None is the backend of training. Forming a
        gloo group stops once the world has ended.

        Raises:
            StaleEpochError: the world has ended.
        """
        if has_nccl(backend or dist.get_backend()):
            yield
            return
        with self._forming.watch():
            world = dist.group.WORLD
            if world is None:
                yield
                return
            # Torch takes the store of a new group from this map; NCCL's threads have theirs.
            kept = c10d._world.pg_map[world]
            c10d._world.pg_map[world] = (kept[0], self._forming)
            try:
                yield
            finally:
                c10d._world.pg_map[world] = kept

    def _connect(self, store_address: str) -> TCPStore:
        host, _, port = store_address.rpartition(":")
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                store = TCPStore(
                    host, int(port), is_master=False, timeout=timedelta(seconds=_ATTEMPT_S)
                )
            except dist.DistError:
                if self._ended():
                    raise StaleEpochError(
                        f"epoch {self._epoch} ended before its store was reached"
                    ) from None
                if time.monotonic() > until:
                    raise
            else:
                store.set_timeout(timedelta(seconds=CONNECT_S))
                return store


def _encode_texts(said: list[bytes]) -> bytes:
    return msgspec.msgpack.encode([text.decode() for text in said])


def has_nccl(backend: str) -> bool:
    """Whether groups of `backend` have collectives of NCCL, perhaps beside others."""
    return "nccl" in backend


def split(
    partition: Sequence[Sequence[int]],
    rank: int,
    timeout_s: float,
    carrier: Carrier | None = None,
    form_s: float = FORM_S,
) -> dist.ProcessGroup:
    """Form one group for each part, on all ranks; return the group of `rank`. Collective.

    Args:
        timeout_s: time that each collective may take.
        form_s: time that forming a group may take.
        carrier: carries the messages of these groups, which then have no collectives; None for
            torch's own groups.
    """
    mine: Any = None
    for part in partition:
        group: Any = dist.new_group(
            list(part),
            timeout=timedelta(seconds=form_s),
            backend=None if carrier is None else stage_group.BACKEND,
            pg_options=carrier,
        )
        if rank in part:
            mine = group
    assert mine is not None
    if carrier is None:
        set_timeout(mine, timeout_s)
    group_of_rank: dist.ProcessGroup = mine
    return group_of_rank


def leave(given: Iterable[Any] = ()) -> None:
    """Destroy all process groups. Their connections close, which wakes the ranks that wait for this
    one. From then on, their collectives write nothing.

    Args:
        given: groups that were given to the script, which may have kept them. No thread may use
            them now.
    """
    if not dist.is_initialized():
        # The first group may have failed to form, but torch has counted it. Then it would name the
        # group of the next world differently from new processes, and they would never meet.
        c10d._world.group_count = 0
        return
    # Disconnect the groups, so that nothing that is still pending can write any more.
    held: list[Any] = [*c10d._world.pg_map]
    for group in held:
        disconnect(group)
    # Make groups that the script has kept fail, and wake threads that wait for NCCL.
    for group in (dist.group.WORLD, *given):
        _retire(group)
    wake()
    # Destroy the groups. An abort has already done that.
    if dist.is_initialized():
        dist.destroy_process_group()
    drop(held)


def drop(held: list[Any]) -> None:
    """Drop the last references to destroyed groups on a thread, since that may take long.

    Args:
        held: the only list that still holds them.
    """
    dropping = threading.Thread(target=held.clear, name="holdfast-leave", daemon=True)
    dropping.start()
    dropping.join(SETTLE_S)
    if dropping.is_alive():
        atexit.register(dropping.join, DROP_S)  # A half destroyed group would abort the process.


def disconnect(group: Any) -> None:
    """Close all connections of `group`, which ends its pending collectives. Any thread.

    Otherwise a collective that waits for a stopped or unreachable rank would write when that rank
    comes back: into the gradients of a later world, or into the parameters that an interrupted
    restore was filling.
    """
    for _, backend in _gloo_backends(group):
        for other in range(group.size()):
            if other != group.rank():
                # Lost connections raise immediately. The first one that is not lost times out, and
                # closes all.
                with suppress(RuntimeError):
                    backend.recv([torch.empty(1, device="cpu")], other, _UNUSED_TAG).wait(_NO_TIME)


def _gloo_backends(group: Any) -> list[tuple[torch.device, Any]]:
    """Return the devices of `group` that gloo serves, with their backends."""
    served = [(device, group._get_backend(device)) for device in group._device_types]
    return [each for each in served if isinstance(each[1], dist.ProcessGroupGloo)]


class _NoStore(Store):
    """The store of a retired group: no rank ever finds another one in it."""

    def set(self, key: str, value: Any) -> None:
        del key, value

    def wait(self, *keys: Any) -> None:
        del keys
        raise StaleEpochError(
            "this process group belongs to a world that has ended: pass `group.now` to each "
            "collective, and keep no reference to it"
        )


_no_store = _NoStore()


def _retire(group: Any) -> None:
    """Let all collectives of `group` fail from now on, because the script may have kept a reference
    to it.

    Otherwise the surviving ranks could still reach each other in it, and a collective that one rank
    began before the end of the world could meet another that a different rank begins afterwards.
    """
    for device, _ in _gloo_backends(group):
        group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, _nowhere())


@functools.cache
def _nowhere() -> dist.ProcessGroupGloo:
    """Make the backend of a retired group: its first collective looks for the other ranks, and
    raises that the world has ended."""
    create: Any = dist.ProcessGroupGloo.create_device
    try:
        device = create(hostname="127.0.0.1", lazy_init=True)
    except TypeError:  # Torch 2.6 always connects immediately.
        return _make_deserted()
    return dist.ProcessGroupGloo(_no_store, 0, 2, _options(device, _NO_TIME))


def _make_deserted() -> dist.ProcessGroupGloo:
    """Make the backend of a group whose only other rank has left, so its first collective fails."""
    store = HashStore()
    made: dict[int, dist.ProcessGroupGloo] = {}

    def join(rank: int) -> None:
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options = _options(device, timedelta(seconds=FORM_S))
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    del made[1]
    return made[0]


def _options(device: Any, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [device], timeout
    return options


def wake() -> None:
    """Wake the collectives of this process that are blocked on a device. Any thread may call it."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        _abort()


def _abort() -> None:
    try:
        c10d._abort_process_group()
    except Exception as error:
        # NCCL may fail in ways that only machines with several devices show.
        _log.warning(
            "NCCL's groups could not be aborted (%s: %s); if this process hangs, its launcher ends "
            "it after reformSeconds",
            type(error).__name__,
            error,
        )


def is_of_group(error: BaseException) -> bool:
    """Whether `error`, or one of its causes, comes from a collective or a store."""
    return any(
        isinstance(one, dist.DistError | UnreachableError | StaleEpochError)
        or (isinstance(one, RuntimeError) and any(name in str(one) for name in ("gloo", "NCCL")))
        for one in chain_of(error)
    )
