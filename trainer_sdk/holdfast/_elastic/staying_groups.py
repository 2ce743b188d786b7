"""Process groups that stay as objects when their world changes.

Libraries keep the groups that they make: device meshes, FSDP2 and DTensors refer to them for good.
So a process that stays does not destroy its groups. It records each group where torch makes it, and
in a new world gives the same objects connections to the present ranks.

Two facilities of torch are private, and this module is the only one that uses them; those of
`connections` come on top:

- `_new_process_group_helper`, through which torch makes every group.
- `_world.group_count`, from which torch derives the names of groups.

A process that joins a later world makes its groups at other times than the processes that stayed:
they have all of them, and it has none yet. So it makes the groups of the others as soon as it
joins, and hands them out when its script asks torch for groups of these names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported by torch
    HashStore,
    Store,
)

from holdfast._agree.exchange import set_timeout
from holdfast._elastic import connections, stage_group
from holdfast._elastic.groups import FORM_S, MeetingPoint, drop, split
from holdfast._elastic.remade_groups import Forming
from holdfast._elastic.stage_group import Carrier
from holdfast_core.errors import InvalidJobError, ProtocolError, StaleEpochError

_FAKE = "fake"
"""Torch's backend without messages."""
_DEFAULT = "0"
"""Torch's name of the default group: the first one that it makes."""
_OWN_COUNT = 2**40
"""Number from which the names of Holdfast's own groups count, beyond any that a script makes."""
_LAST = 2**40
"""Added to the epoch of connections with which a process leaves its groups for good."""


class GroupStatement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank tells the others about a group that it has made, or made as a non-member."""

    name: str
    """Torch's name of it."""
    ranks: tuple[int, ...]
    """Its ranks in the world, in the order of their ranks in the group; empty for all ranks."""
    backend: str
    tag: str = ""
    """Torch's tag, under which libraries find groups."""
    description: str = ""
    timeout_s: float
    """Time that each of its collectives may take."""
    step: int = 0
    """Step in which it was made; 0 before the first."""
    destroyed: bool = False
    """Whether the script has destroyed it."""


_STATEMENTS = msgspec.json.Decoder(list[GroupStatement])
_HANDLES = msgspec.json.Decoder(dict[str, list[str]])
_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True)
class _Group:
    """A group that somebody in this process made, or that is kept for somebody who will."""

    statement: GroupStatement
    result: Any
    """What torch's helper returned: the group, or torch's constant for others, and a store."""
    number: int
    """Torch's count of groups when it was made."""
    asked: bool
    """Whether the script has asked for it. Otherwise it gets this group when it does."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None if this rank does not belong to it, or it has no messages."""
        made = self.result[0]
        connects = isinstance(made, dist.ProcessGroup) and self.statement.backend != _FAKE
        return made if connects else None

    def states(self) -> GroupStatement:
        """The present statement about it."""
        group = self.group
        gone = group is not None and group not in c10d._world.pg_map
        return msgspec.structs.replace(self.statement, destroyed=gone or self.statement.destroyed)


class WorldStore(Store):
    """The store of torch's groups: always that of the present world.

    torch keeps no reference to a store that is written in Python, so a `StayingGroups` does.

    Args:
        form_s: time that a wait may take, unless it is given.
    """

    def __init__(self, form_s: float) -> None:
        super().__init__()
        super().set_timeout(timedelta(seconds=form_s))
        self._form_s = form_s
        self._now: Store | None = None

    def enter(self, store: Store | None) -> None:
        """Use `store` from now on; None until the next world."""
        self._now = store

    @contextmanager
    def of(self, store: Store) -> Iterator[None]:
        """Use `store` within the block."""
        kept, self._now = self._now, store
        try:
            yield
        finally:
            self._now = kept

    def set(self, key: str, value: Any) -> None:
        self._here().set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._here().get(key)
        return value

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> Any:
        return self._here().compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._here().check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._here().wait(keys, timeout or timedelta(seconds=self._form_s))

    def add(self, key: str, value: int) -> int:
        return int(self._here().add(key, value))

    def _here(self) -> Any:
        if self._now is None:
            raise StaleEpochError("the training world has ended; its groups are formed again")
        return self._now


class StayingGroups:
    """All process groups of this process, from `form` in its first world on. There is one for each
    process, since it sees every group that torch makes.

    Args:
        backend: of the default group: gloo, NCCL, or both for different devices.
        timeout_s: time that each collective of the default group may take.
        nccl_stays: whether groups of NCCL may be made.
        nccl_form_s: time that forming a group may take then.
        local_rank: number of this process, and of its device, on its node.
    """

    stay = always_wakes = True

    def __init__(
        self,
        backend: str,
        timeout_s: float,
        *,
        nccl_stays: bool = False,
        nccl_form_s: float = FORM_S,
        local_rank: int = 0,
    ) -> None:
        self._backend, self._nccl_stays, self._local_rank = backend, nccl_stays, local_rank
        self.form_s = nccl_form_s if nccl_stays else FORM_S
        self._timeout_s, self._store = timeout_s, WorldStore(self.form_s)
        self._groups: dict[str, _Group] = {}
        self._own: list[dist.ProcessGroup] = []
        """Groups of Holdfast in the present world."""
        self._making_own = False
        self._own_count = 0
        self._point: MeetingPoint | None = None
        self._rank, self._size, self._epoch = 0, 0, 0
        self._step = 0
        """The step that runs now; 0 before the first."""
        self._lock = threading.Lock()
        self._formed = False
        """Whether the groups have connections. Guarded by the lock, which `leave` and the thread
        that calls `wake` hold while they close them."""
        self._make: Callable[..., Any] | None = None
        """Torch's own helper; None before the first world."""

    # --- called by the world ----------------------------------------------------------------------

    def form(self, point: MeetingPoint, *, epoch: int, rank: int, size: int) -> None:
        """Connect all groups of this process, and those that other ranks of the world have made
        with it. Collective.

        Args:
            point: meeting point of the world.
            epoch: its membership epoch.

        Raises:
            StaleEpochError: the world has ended.
            InvalidJobError: ranks made different groups.
            ProtocolError: what a rank says cannot be decoded, because it has another version.
            RuntimeError: a rank was lost meanwhile.
        """
        if self._make is None:
            self._make = c10d._new_process_group_helper
            _set_helper(self._make_or_take)
        self._point, self._rank, self._size, self._epoch = point, rank, size, epoch
        self._own_count = 0
        self._store.enter(point.forming_store)
        # All ranks meet here, the late ones too, and learn which groups there are.
        said = point.gather(_encode([each.states() for each in self._groups.values()]))
        stated = _read(_STATEMENTS, said)
        plan = plan_groups(stated)
        if _DEFAULT not in self._groups:
            self._make_default()
        for statement in plan:
            self._prepare(statement)
        # Form them in the same order on all ranks.
        mine = [self._groups[each.name] for each in plan if not each.destroyed]
        mine = [each for each in (self._groups[_DEFAULT], *mine) if each.group is not None]
        handles = {each.statement.name: connections.handles_of(each.group) for each in mine}
        texts = point.gather(_encode(handles), FORM_S)
        of_ranks = _read(_HANDLES, texts)
        with point.forming_store.watch():
            for each in mine:
                self._connect(each, self._handles_of(each.statement, of_ranks))
        with self._lock:
            self._formed = True

    def is_other(self, rank: int, size: int) -> bool:
        """Whether the groups belong to another rank than `rank` of `size`."""
        return self._size > 0 and (rank, size) != (self._rank, self._size)

    def split(
        self,
        parts: Sequence[Sequence[int]],
        rank: int,
        carrier: Carrier | None,
        kept: dist.ProcessGroup | None,
    ) -> dist.ProcessGroup:
        """See `WorldGroups`."""
        if kept is not None:
            return kept
        return split(parts, rank, self._timeout_s, carrier, form_s=self._timeout_s)

    def leave(self, given: Sequence[dist.ProcessGroup] = ()) -> None:
        """Close all connections, which ends pending collectives here and on other ranks. Destroy
        Holdfast's own groups. The groups of the script stay, without connections."""
        del given
        with self._lock:
            formed, self._formed = self._formed, False
            own, self._own = self._own, []
            connections.close([*own, *self._connected()])
        if formed and self._nccl_stays:
            connections.settle()
        self._point = None
        self._store.enter(None)
        for group in own:
            with suppress(ValueError):  # its user has destroyed it
                dist.destroy_process_group(group)
        drop(own)

    def close(self) -> None:
        """Destroy all groups, and let torch make groups as usual. A world that follows begins
        without groups, as in a new process."""
        self.leave()
        self._abandon(self._connected())
        self._rank, self._size, self._step = 0, 0, 0
        held = [each.group for each in self._groups.values() if each.group is not None]
        self._groups.clear()
        if self._make is not None:
            _set_helper(self._make)
            self._make = None
        if dist.is_initialized():
            dist.destroy_process_group()
        drop(held)

    def wake(self, epoch: int, waited: Sequence[dist.ProcessGroup] = ()) -> None:
        """Close all connections of world `epoch`, which has ended. Any thread."""
        del waited
        with self._lock:
            if self._formed and self._epoch == epoch:
                connections.close([*self._own, *self._connected()])

    @property
    def forming(self) -> Forming:
        """See `_forming`."""
        return self._forming

    @contextmanager
    def _forming(self, backend: str | None) -> Iterator[None]:
        """Form groups of Holdfast within the block: they end with their world.

        Raises:
            StaleEpochError: the world has ended.
        """
        del backend
        point = self._point
        if point is None:
            raise StaleEpochError("the training world has ended; its groups are formed again")
        count, self._making_own = c10d._world.group_count, True
        # Torch derives names from this number, and all ranks make these groups equally often.
        self._own_count += 1
        c10d._world.group_count = _OWN_COUNT + (self._epoch << 20) + self._own_count
        try:
            with point.forming_store.watch():
                yield
        finally:
            c10d._world.group_count, self._making_own = count, False

    def begin(self, step: int) -> None:
        """Note that `step` begins."""
        self._step = step

    def go_back_to(self, step: int) -> None:
        """Undo that groups were made after `step`, because these steps are repeated. The script
        gets the same groups if it makes them again."""
        later = [one for one in self._groups.values() if one.asked and one.statement.step > step]
        for each in later:
            each.asked = False
        if later:
            c10d._world.group_count = min(each.number for each in later)

    # --- called by torch --------------------------------------------------------------------------

    def _make_or_take(
        self,
        size: int,
        rank: int | None,
        ranks: list[int],
        backend: str,
        store: Store,
        group_name: str,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Do what torch's helper does, and record the group."""
        assert self._make is not None
        if self._making_own or str(backend) == stage_group.BACKEND:
            made = self._make(size, rank, ranks, backend, store, group_name, *more, **named)
            if self._making_own and isinstance(made[0], dist.ProcessGroup):
                self._own.append(made[0])
            return made
        name = str(group_name)
        here = self._groups.get(name)
        if here is not None and not here.asked and (taken := self._take(here, ranks)) is not None:
            return taken
        # torchtitan makes groups without messages for axes that it does not use.
        if str(backend) != _FAKE:
            _check_backend(str(backend), self._nccl_stays)
        named["enable_reconfigure"] = True
        named.pop("device_id", None)  # torch would connect it at once
        made = self._make(size, rank, ranks, backend, store, group_name, *more, **named)
        group = self._record(name, ranks, backend, made, named, step=self._step)
        if ranks and group.group is not None:
            try:
                self._form_alone(group)
            except BaseException:
                # As if it had not been made: all ranks shall give it the same name next time.
                del self._groups[name]
                c10d._world.pg_group_ranks[group.group] = {}
                connections.close([group.group])
                self._abandon([group.group])
                dist.destroy_process_group(group.group)
                c10d._world.group_count -= 1
                raise
        return made

    # --- inside -----------------------------------------------------------------------------------

    def _take(self, here: _Group, ranks: Sequence[int]) -> Any:
        """Give the script a group for which it asks, and which is there already. Return None if
        it must be made: it was destroyed in a step that is repeated now."""
        statement = here.states()
        _check_ranks(statement, ranks)
        if statement.destroyed and statement.step:
            return None
        if statement.destroyed:
            raise InvalidJobError(
                f"group {statement.name} of ranks {list(ranks)} was destroyed by processes that "
                f"stayed, so a process that joins later cannot use it: keep the groups that are "
                f"made before the first step"
            )
        here.asked, here.number = True, c10d._world.group_count - 1
        here.statement = msgspec.structs.replace(here.statement, step=self._step)
        return here.result

    def _record(
        self,
        name: str,
        ranks: Sequence[int],
        backend: str,
        made: Any,
        named: dict[str, Any],
        *,
        step: int,
        asked: bool = True,
    ) -> _Group:
        timeout = named.get("timeout")
        statement = GroupStatement(
            name=name,
            ranks=tuple(ranks),
            backend=str(backend),
            tag=named.get("pg_tag") or "",
            description=named.get("group_desc") or "",
            timeout_s=self._timeout_s if timeout is None else timeout.total_seconds(),
            step=step,
        )
        number = c10d._world.group_count - 1
        group = _Group(statement=statement, result=made, number=number, asked=asked)
        self._groups[name] = group
        return group

    def _make_default(self) -> None:
        """Make the default group, without connections."""
        dist.init_process_group(
            self._backend,
            store=self._store,
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=self._timeout_s),
            enable_reconfigure=True,
        )

    def _prepare(self, statement: GroupStatement) -> None:
        """Make a group that other ranks have, unless this one has it. The script of this process
        has not asked for it yet."""
        here = self._groups.get(statement.name)
        if here is not None:
            _check_ranks(here.statement, statement.ranks)
            return
        if statement.destroyed:
            kept = _Group(statement=statement, result=(None, None), number=0, asked=False)
            self._groups[statement.name] = kept
            return
        default = dist.group.WORLD
        named: dict[str, Any] = {
            "timeout": timedelta(seconds=statement.timeout_s),
            "pg_tag": statement.tag or None,
            "group_desc": statement.description or None,
            "enable_reconfigure": True,
        }
        assert default is not None and self._make is not None
        ranks = list(statement.ranks)
        made = self._make(
            len(ranks),
            ranks.index(self._rank) if self._rank in ranks else None,
            ranks,
            statement.backend,
            c10d._world.pg_map[default][1],
            statement.name,
            **named,
        )
        group = self._record(
            statement.name, ranks, statement.backend, made, named, step=statement.step, asked=False
        )
        if group.group is not None:
            c10d._world.pg_group_ranks[group.group] = {each: at for at, each in enumerate(ranks)}

    def _form_alone(self, group: _Group) -> None:
        """Connect a group that all of its ranks are making now."""
        point = self._point
        if point is None:
            raise StaleEpochError("the training world has ended; its groups are formed again")
        name, ranks = group.statement.name, group.statement.ranks
        own = _encode({name: connections.handles_of(group.group)})
        said = point.gather_from(name, ranks, own, group.statement.timeout_s)
        handles = [each.get(name, []) for each in _read(_HANDLES, said)]
        with point.forming_store.watch():
            self._connect(group, handles)

    def _connect(self, group: _Group, handles: list[list[str]]) -> None:
        """Give `group` connections to the ranks that stated `handles`, in their order."""
        assert group.group is not None
        connections.connect(
            group.group,
            handles,
            epoch=self._epoch,
            timeout_s=self.form_s,
            local_rank=self._local_rank,
        )
        set_timeout(group.group, group.statement.timeout_s)

    def _abandon(self, abandoned: Sequence[dist.ProcessGroup]) -> None:
        """Make closed groups safe to destroy, whatever has become of their other ranks."""
        if self._nccl_stays:
            with self._store.of(HashStore()):
                connections.close_for_good(
                    abandoned,
                    epoch=_LAST + self._epoch,
                    timeout_s=self.form_s,
                    local_rank=self._local_rank,
                )

    def _handles_of(
        self, statement: GroupStatement, of_ranks: Sequence[dict[str, list[str]]]
    ) -> list[list[str]]:
        """What the ranks of a group have stated of it, from what each rank has stated of all."""
        try:
            return [of_ranks[rank][statement.name] for rank in statement.ranks or range(self._size)]
        except KeyError:
            raise ProtocolError(
                f"a rank of group {statement.name} says nothing of it: run the same script and the "
                f"same version of holdfast on all ranks"
            ) from None

    def _connected(self) -> list[dist.ProcessGroup]:
        """The groups of the script that still exist."""
        # A copy: the training thread may be making a group while another one wakes it.
        groups = [each.group for each in [*self._groups.values()]]
        return [each for each in groups if each is not None and each in c10d._world.pg_map]


def plan_groups(said: Sequence[Sequence[GroupStatement]]) -> list[GroupStatement]:
    """The groups of a world, in the order in which all ranks form them, from what each rank says it
    has. The default group is not among them.

    A group that one of its ranks has destroyed is destroyed.
    """
    named: dict[str, GroupStatement] = {}
    place: dict[str, int] = {}
    for rank, statements in enumerate(said):
        for at, each in enumerate(statements):
            if each.name == _DEFAULT:
                continue
            known = named.setdefault(each.name, each)
            place[each.name] = min(at, place.get(each.name, at))
            if each.destroyed and rank in each.ranks and not known.destroyed:
                named[each.name] = msgspec.structs.replace(known, destroyed=True)
    return [named[name] for name in sorted(named, key=lambda name: (place[name], name))]


def _check_ranks(statement: GroupStatement, ranks: Sequence[int]) -> None:
    """Raise InvalidJobError if a group of other ranks than `ranks` has the name of theirs."""
    if statement.ranks != tuple(ranks):
        raise InvalidJobError(
            f"ranks made group {statement.name} of ranks {list(ranks)} and of "
            f"{list(statement.ranks)}: let all ranks make the same groups in the same order"
        )


def _check_backend(backend: str, nccl_stays: bool) -> None:
    """Raise InvalidJobError if a group of `backend` cannot stay."""
    backends = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values()
    if problem := connections.why_not(",".join(map(str, backends)), nccl_stays=nccl_stays):
        raise InvalidJobError(
            f"a process group with backend {backend!r} cannot get new ranks, so this process could "
            f"not stay when its world changes: {problem}. Otherwise let this process end with its "
            f"world: holdfast.elastic.init(…, stay=False)"
        )


def _read(decoder: msgspec.json.Decoder[_T], texts: Sequence[str]) -> list[_T]:
    try:
        return [decoder.decode(text) for text in texts]
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"cannot decode what a rank says about its process groups: {error}; run the same "
            f"version of holdfast on all ranks"
        ) from error


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _set_helper(helper: Any) -> None:
    module: Any = c10d
    module._new_process_group_helper = helper
