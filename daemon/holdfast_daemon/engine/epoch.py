"""The epoch that a node takes part in, as one value: present as a whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.reports import Directive


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """An epoch: its membership, the member on this node, and the leader's decisions so far."""

    membership: Membership
    me: int
    """The member on this node."""
    directive: Directive

    @property
    def number(self) -> int:
        return self.membership.epoch

    @property
    def leads(self) -> bool:
        return self.me == self.membership.leader

    @property
    def group(self) -> tuple[int, ...]:
        """The members of this member's parity group."""
        return self.membership.group_of(self.me)

    @property
    def ranks(self) -> range:
        """The ranks that live here."""
        return self.membership.ranks_of(self.me)

    @property
    def members_changed(self) -> bool:
        """Whether whole members restart, move, leave or join in this epoch, and not only ranks
        restart."""
        return bool(self.membership.restarting) or self.membership.since == self.number

    @property
    def line(self) -> Line | None:
        """The recovery line, as the leader has announced it."""
        return self.directive.line

    @property
    def retained(self) -> Generation | None:
        """The generation that the leader has promised to keep."""
        return self.directive.retained

    @property
    def persisting(self) -> Generation | None:
        """The generation that is to be written to the durable tier now."""
        order = self.directive.persist
        return None if order is None or order.ended else order.generation
