"""Moving experts to other seats when the world or their loads change (Lazarus §4.3).

All ranks of the new world state which experts they hold, and how many tokens the experts got
lately. From that, each rank computes the same plan. An expert that stays on a rank keeps its seat.
The others come from ranks that hold them, with their optimizer states. Seats are fixed tensors, so
nothing has to be registered with an optimizer again.

Experts move layer by layer, so a rank needs memory for its moving experts of only one layer. All
that one rank sends to another one is one message: from device to device where the tensors and their
memory allow it, otherwise through host memory. If a rank is lost meanwhile, each layer of the
others has either its old or its new seats, and the next world starts from these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from holdfast._agree.exchange import Exchange
from holdfast._moe.exchanging import deal_rows
from holdfast._moe.gradients import moe_layers
from holdfast._moe.layer import ExpertLayer
from holdfast._moe.statements import (
    Stack,
    Statement,
    check_all_held,
    encode_statement,
    read_statements,
)
from holdfast._restoring.scatter import allocate_agreed
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
    """Changes of the expert plan of one model, on one rank.

    Args:
        model: a model with one `MoELayer` for each layer of its plan.

    Raises:
        InvalidJobError: the numbers of the layers are not those of the plan.
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
        """Number of experts in each layer."""
        return len(self._layers[0].plan.layers[0].copies)

    def seated_experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts in this rank's seats, layer by layer."""
        return tuple(tuple(layer.experts.seat_of) for layer in self._layers)

    @torch.no_grad()
    def follow(
        self, live: LiveState, exchange: Exchange, rank: int, *, outlived: bool, moves: bool
    ) -> None:
        """Plan the seats for the ranks of a new world, and take them. Collective.

        Args:
            live: state of the model, whose tensors were not yet discovered in this world.
            rank: this rank in the new world.
            outlived: whether this process has training state.
            moves: whether the experts move to their new seats, because all of them are live. If
                not, a restore will fill the seats.

        Raises:
            InvalidJobError: the experts do not fit into the seats of the remaining ranks.
            NoRecoveryLineError: no process has training state, and this process was started for
                another number of ranks.
            ProtocolError: the statements of ranks cannot be true.
            UnreachableError: a rank does not take part.
        """
        # Gather the experts of all ranks. If no rank has any, the first plan stays.
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
        # Plan for the present ranks, and keep experts in their seats where possible.
        held = [one.held for one in said]
        plan = renumbered(self._layers[0].plan.renewed(len(said), first.loads), held)
        self._cause = PlanCause.WORLD
        # Move the experts, or only take the seats.
        if moves:
            check_all_held(said, self.experts)
            self._move(live, exchange, rank, plan, moves_of(plan, held), _all_stacks(said))
        else:
            for layer in self._layers:
                layer.take_seats(plan)
        live.discover()  # The same tensors now belong to other experts.
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
        """Move experts to other seats of the same world, if the newest loads justify the cost.
        Return whether experts have moved. Collective; called between two steps.

        Args:
            live: state of the model.
            step_s: duration of recent steps.
            steps: number of steps until the next call.

        Raises:
            ProtocolError: the statements of ranks cannot be true.
            UnreachableError: a rank does not take part.
        """
        # Plan for the newest loads.
        said = self._gather(live, exchange, outlived=True, step_s=step_s)
        check_all_held(said, self.experts)
        held, now = [one.held for one in said], self._layers[0].plan
        plan = renumbered(now.renewed(len(said), said[0].loads), held)
        # Compare the gain until the next call with the cost of the moves.
        moves, stacks = moves_of(plan, held), _all_stacks(said)
        verdict = weigh(
            now,
            plan,
            moves,
            expert_bytes=sum(stack.nbytes for stack in stacks) // len(self._layers),
            step_s=said[0].step_s,
            steps=steps,
        )
        _log.log(
            logging.INFO if verdict.worth else logging.DEBUG,
            "%s: %s",
            "experts move" if verdict.worth else "experts stay",
            verdict.reason,
        )
        if verdict.worth:
            self._cause = PlanCause.LOADS
            self._move(live, exchange, rank, plan, moves, stacks)
            live.discover()
        return verdict.worth

    def report(self, epoch: int, step: int) -> PlanReport:
        """Describe the present plan, for the job's status.

        Args:
            epoch: epoch in which experts took their seats.
            step: step after which they took them.
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
        """Exchange the statements of all ranks, and return them. Collective."""
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
        """Yield the tensors that have a part for each seat."""
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
        """Return the tensor of a stack. An optimizer state that does not exist yet is created with
        zeros."""
        name = TensorName.parse(stack.name)
        anchor = live.anchors.get(str(name.base))
        if anchor is None:
            raise ProtocolError(
                f"a rank has seats in {stack.name!r}, which the model of this rank lacks; run the "
                f"same script on all ranks"
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
        live.sources()  # Discovers the parameters by name.
        for at, layer in enumerate(self._layers):
            seats = len(layer.experts.seat_experts)
            tensors = {
                stack: self._tensor(live, stack, seats)
                for stack in sorted(stacks, key=lambda one: one.name)
                if stack.layer == at
            }
            of_layer = [one for one in moves if one.layer == at]
            if of_layer:
                self._deal(layer, exchange, rank, plan, of_layer, tensors)
            else:
                layer.take_seats(plan)
            for seat, expert in enumerate(layer.experts.seat_experts):
                if expert is None:
                    for tensor in tensors.values():
                        tensor[seat].zero_()

    @staticmethod
    def _deal(
        layer: ExpertLayer,
        exchange: Exchange,
        rank: int,
        plan: ExpertPlan,
        moves: Sequence[ExpertMove],
        tensors: Mapping[Stack, torch.Tensor],
    ) -> None:
        """Exchange the moving experts of one layer, and put them into their seats.

        Tensors on the experts' device and others, such as states in host memory, travel apart,
        according to the statements: a state that a rank has just made may lie elsewhere. Nothing
        is written into a seat before all has arrived, since experts that leave may still lie there.
        """
        given, taken = pairs_of(moves, rank, plan.room.ranks)
        here = next(layer.experts.parameters()).device
        beside = [one for stack, one in tensors.items() if stack.device == here.type]
        others = [one for stack, one in tensors.items() if stack.device != here.type]
        arrived = [
            (some, pass_on(layer, exchange, some, device, given, taken))
            for some, device in ((beside, here), (others, torch.device("cpu")))
            if some
        ]
        layer.take_seats(plan)
        seat_of = layer.experts.seat_of
        for group, flat in arrived:
            parts = [
                _bytes(tensor[seat_of[expert]])
                for expert in chain.from_iterable(taken)
                for tensor in group
            ]
            for into, part in zip(parts, flat.split([len(one) for one in parts]), strict=True):
                into.copy_(part)


def pairs_of(
    moves: Sequence[ExpertMove], rank: int, ranks: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the experts that `rank` sends to each rank, and those that it gets from each."""
    given: list[list[int]] = [[] for _ in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for move in moves:
        if move.source == rank:
            given[move.target].append(move.expert)
        if move.target == rank:
            taken[move.source].append(move.expert)
    return given, taken


def pass_on(
    layer: ExpertLayer,
    exchange: Exchange,
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    given: Sequence[Sequence[int]],
    taken: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Send the parts of `tensors` that belong to moving experts, one message for each pair of
    ranks. Collective.

    On the experts' device, training's own group carries them; elsewhere, or if any rank's device
    has no memory left for the messages, the exchange does, in host memory.

    Args:
        tensors: stacks of the seats, the same on all ranks.
        device: where the messages lie, the experts' device or the host on all ranks; the tensors
            may lie elsewhere.
        given, taken: for each rank the experts that go there, and that come from there.

    Returns:
        What has arrived, uint8, in the order of ranks, experts and tensors.
    """
    each, seat_of = sum(len(_bytes(one[0])) for one in tensors), layer.experts.seat_of
    given_bytes, taken_bytes = [[each * len(one) for one in ranks] for ranks in (given, taken)]
    ends = sum(given_bytes), sum(given_bytes) + sum(taken_bytes)
    room = allocate_agreed(exchange, ends[1], device)
    sent, arrived = room[: ends[0]], room[ends[0] :]
    parts = [_bytes(one[seat_of[e]]) for e in chain.from_iterable(given) for one in tensors]
    for into, part in zip(sent.split([len(one) for one in parts]), parts, strict=True):
        into.copy_(part)
    if room.device.type == next(layer.experts.parameters()).device.type:
        group = layer.dispatcher.group
        deal_rows(group, sent, given_bytes, arrived, taken_bytes)
        group.finish()
    else:
        exchange.deal(sent, given_bytes, arrived, taken_bytes)
    return arrived


def _all_stacks(said: Sequence[Statement]) -> list[Stack]:
    """Return the stacks of all ranks, each once."""
    return list(dict.fromkeys(stack for one in said for stack in one.stacks))


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return part.view(-1).view(torch.uint8)
