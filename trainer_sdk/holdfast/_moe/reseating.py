"""Experts that take other seats when the world or their loads change (Lazarus §4.3).

All ranks of the new world state what they hold, and how many tokens experts got lately; from that
each computes the same plan. An expert that stays on a rank keeps its seat; the others come from
ranks that hold them, with everything that optimizers know of them. Seats are fixed tensors, so
nothing is registered with an optimizer again.

Layer by layer, so that what is on its way needs as much host memory as one layer's experts of a
rank. A rank that is lost meanwhile leaves each layer of the others in its old or its new seats, and
the next world begins with what they then hold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from holdfast._agree.exchange import Exchange
from holdfast._moe.gradients import moe_layers
from holdfast._moe.layer import MoELayer
from holdfast._moe.statements import (
    Stack,
    Statement,
    check_all_held,
    encode_statement,
    read_statements,
)
from holdfast._state.capture import LiveState
from holdfast._state.extras import dtype_name, dtype_of_name
from holdfast_core.elastic_experts.moving import ExpertMove, moves_of, renumbered
from holdfast_core.elastic_experts.plans import ExpertPlan
from holdfast_core.elastic_experts.rebalancing import weigh
from holdfast_core.elastic_experts.reports import PlanCause, PlanReport
from holdfast_core.errors import InvalidJobError, NoRecoveryLineError, ProtocolError
from holdfast_core.snapshots.names import TensorName

_log = logging.getLogger("holdfast")


class SeatChanges:
    """Changes of the plan of one model, on one rank.

    Args:
        model: has at least one `MoELayer`, and one for each layer of its plan.

    Raises:
        InvalidJobError: when layers have different plans, or there is not one for each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = sorted(moe_layers(model), key=lambda layer: layer.layer)
        planned = len(self._layers[0].plan.layers)
        if [layer.layer for layer in self._layers] != list(range(planned)):
            raise InvalidJobError(
                f"layers {[layer.layer for layer in self._layers]} of an expert plan with "
                f"{planned}: give each MoELayer its own number, and plan for all of them together"
            )
        self._cause = PlanCause.START

    @property
    def experts(self) -> int:
        """Experts of each layer."""
        return len(self._layers[0].plan.layers[0].copies)

    def seated_experts(self) -> tuple[tuple[int, ...], ...]:
        """For each layer the experts in this rank's seats."""
        return tuple(tuple(layer.experts.seat_of) for layer in self._layers)

    @torch.no_grad()
    def follow(
        self, live: LiveState, exchange: Exchange, rank: int, *, outlived: bool, moves: bool
    ) -> None:
        """Take the seats of a plan for the present ranks. Collective.

        Args:
            live: state of the model, not yet looked at in this world.
            rank: this rank in the new world.
            outlived: whether this process has training state.
            moves: whether experts move there, too, as all of them are live; otherwise they are to
                be restored.

        Raises:
            InvalidJobError: when the experts do not fit the ranks that are left.
            NoRecoveryLineError: when no process has training state, and this one was made for
                another number of ranks.
            ProtocolError: when what ranks state cannot be true.
            UnreachableError: when a rank does not take part.
        """
        said = self._gather(live, exchange, outlived=outlived)
        first = next((one for one in said if one.held), None)
        if first is None:
            began = self._layers[0].plan.room.ranks
            if began != len(said):
                raise NoRecoveryLineError(
                    f"this process began with an expert plan for {began} ranks, and now "
                    f"there are {len(said)}; it ends so that a new one can begin"
                )
            return
        held = [one.held for one in said]
        plan = renumbered(self._layers[0].plan.renewed(len(said), first.loads), held)
        self._cause = PlanCause.WORLD
        if moves:
            check_all_held(said, self.experts)
            self._move(live, exchange, rank, plan, moves_of(plan, held), _all_stacks(said))
        else:
            for layer in self._layers:
                layer.take_seats(plan)
        live.discover()  # experts have other tensors now, though the tensors are the same
        _log.info(
            "expert plan for %d ranks, every expert on at least %d nodes: %s",
            len(said),
            plan.least_nodes,
            plan.reason,
        )

    @torch.no_grad()
    def rebalance(
        self, live: LiveState, exchange: Exchange, rank: int, *, step_s: float, steps: int
    ) -> bool:
        """Take other seats in the same world, if the newest loads are worth the moves; return
        whether experts have moved. Collective, between two steps.

        Args:
            live: state of the model.
            step_s: time of a step lately.
            steps: steps until the next call.

        Raises:
            ProtocolError: when what ranks state cannot be true.
            UnreachableError: when a rank does not take part.
        """
        said = self._gather(live, exchange, outlived=True, step_s=step_s)
        check_all_held(said, self.experts)
        held, now = [one.held for one in said], self._layers[0].plan
        plan = renumbered(now.renewed(len(said), said[0].loads), held)
        moves, stacks = moves_of(plan, held), _all_stacks(said)
        found = weigh(
            now,
            plan,
            moves,
            expert_bytes=sum(stack.nbytes for stack in stacks) // len(self._layers),
            step_s=said[0].step_s,
            steps=steps,
        )
        _log.log(
            logging.INFO if found.worth else logging.DEBUG,
            "%s: %s",
            "experts move" if found.worth else "experts stay",
            found.reason,
        )
        if found.worth:
            self._cause = PlanCause.LOADS
            self._move(live, exchange, rank, plan, moves, stacks)
            live.discover()
        return found.worth

    def report(self, epoch: int, step: int) -> PlanReport:
        """The plan in numbers.

        Args:
            step: after which experts took their seats, in `epoch`.
        """
        plan = self._layers[0].plan
        return PlanReport(
            epoch=epoch,
            step=step,
            cause=self._cause,
            ranks=plan.room.ranks,
            rank_seats=plan.room.rank_seats,
            layers=len(plan.layers),
            experts=self.experts,
            least_nodes=plan.least_nodes,
            busiest_node=1 + plan.chosen.imbalance,
        )

    # --- inside -----------------------------------------------------------------------------------

    def _gather(
        self, live: LiveState, exchange: Exchange, *, outlived: bool, step_s: float = 0.0
    ) -> list[Statement]:
        """State what this rank has, and return the statements of all. Collective."""
        own = Statement(
            loads=tuple(layer.history.tokens for layer in self._layers),
            step_s=step_s,
            held=self.seated_experts() if outlived else (),
            stacks=tuple(self._stacks(live)) if outlived else (),
        )
        return read_statements(
            exchange.gather(encode_statement(own)),
            layers=len(self._layers),
            experts=self.experts,
            seats=len(self._layers[0].experts.seat_experts),
        )

    def _stacks(self, live: LiveState) -> Iterator[Stack]:
        """Tensors that have a part for each seat."""
        numbers = {id(layer.experts): at for at, layer in enumerate(self._layers)}
        for source in live.sources():
            if source.seats is not None and id(source.seats) in numbers:
                yield Stack(
                    layer=numbers[id(source.seats)],
                    name=str(TensorName.parse(source.name).whole),
                    dtype=dtype_name(source.tensor.dtype),
                    shape=tuple(source.tensor.shape),
                    device=source.tensor.device.type,
                )

    @staticmethod
    def _tensor(live: LiveState, stack: Stack, seats: int) -> torch.Tensor:
        """The tensor, made of zeros where an optimizer does not have it yet."""
        name = TensorName.parse(stack.name)
        anchor = live.anchors.get(str(name.base))
        if anchor is None:
            raise ProtocolError(
                f"a rank has seats in {stack.name!r}, which this rank's model does not have; run "
                f"the same script on all ranks"
            )
        if name.key is None:
            return anchor.parameter.detach()
        state = live.state_of(anchor, name.key)
        assert state is not None, "experts in seats are this rank's"
        if name.key not in state:
            here = anchor.parameter.device
            state[name.key] = torch.zeros(
                (seats, *stack.shape),
                dtype=dtype_of_name(stack.dtype),
                device=here if here.type == stack.device else stack.device,
            )
        found: torch.Tensor = state[name.key]
        return found

    def _move(
        self,
        live: LiveState,
        exchange: Exchange,
        rank: int,
        plan: ExpertPlan,
        moves: Sequence[ExpertMove],
        stacks: Sequence[Stack],
    ) -> None:
        """Send experts and receive others, layer by layer, and take the new seats."""
        live.sources()  # finds the parameters by name
        for at, layer in enumerate(self._layers):
            seats = len(layer.experts.seat_experts)
            tensors = [
                self._tensor(live, stack, seats)
                for stack in sorted(stacks, key=lambda one: one.name)
                if stack.layer == at
            ]
            of_layer = [one for one in moves if one.layer == at]
            if of_layer:
                self._deal(layer, exchange, rank, plan, of_layer, tensors)
            else:
                layer.take_seats(plan)
            for seat, expert in enumerate(layer.experts.seat_experts):
                if expert is None:
                    for tensor in tensors:
                        tensor[seat].zero_()

    @staticmethod
    def _deal(
        layer: MoELayer,
        exchange: Exchange,
        rank: int,
        plan: ExpertPlan,
        moves: Sequence[ExpertMove],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Exchange the moving experts of one layer, and put them into their seats."""
        seat_of = layer.experts.seat_of
        each = sum(_bytes(tensor[0]).numel() for tensor in tensors)
        given = [
            [m.expert for m in moves if (m.source, m.target) == (rank, to)] for to in _all(plan)
        ]
        taken = [
            [m.expert for m in moves if (m.source, m.target) == (of, rank)] for of in _all(plan)
        ]
        parts = [
            _bytes(tensor[seat_of[expert]]).cpu()
            for experts in given
            for expert in experts
            for tensor in tensors
        ]
        sent = torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])
        arrived = torch.empty(each * sum(map(len, taken)), dtype=torch.uint8, device="cpu")
        exchange.deal(
            sent, [each * len(one) for one in given], arrived, [each * len(one) for one in taken]
        )
        layer.take_seats(plan)
        seat_of, start = layer.experts.seat_of, 0
        for expert in (expert for experts in taken for expert in experts):
            for tensor in tensors:
                into = _bytes(tensor[seat_of[expert]])
                into.copy_(arrived[start : start + into.numel()])
                start += into.numel()


def _all_stacks(said: Sequence[Statement]) -> list[Stack]:
    """The stacks that any rank has."""
    return list(dict.fromkeys(stack for one in said for stack in one.stacks))


def _all(plan: ExpertPlan) -> range:
    return range(plan.room.ranks)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """Bytes of a contiguous tensor, in place."""
    return part.view(-1).view(torch.uint8)
