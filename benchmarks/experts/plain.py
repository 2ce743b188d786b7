"""Plain expert parallelism (EP): every expert on one rank, equally many on each.

What the dispatcher of `holdfast.moe` is measured beside: one all-to-all of counts, one read of the
host, and one all-to-all of tokens each way, without copies of experts and so without a plan.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from holdfast import elastic, moe
from holdfast._moe.dispatcher import HostCopy, count_by_expert
from holdfast._moe.exchanging import (
    ExchangedRows,
    PermutedRows,
    SpreadRows,
    add_rows,
    inverse_of,
)
from holdfast._moe.flows import rows_of, starts_of


class PlainLayer(nn.Module):
    """A Mixture-of-Experts layer with plain EP.

    Args:
        gate: chooses among E experts.
        experts: E / R of them, those of this rank.
        group: all R ranks.
    """

    def __init__(
        self, gate: moe.Gate, experts: moe.SeatedExperts, group: elastic.WorldGroup
    ) -> None:
        super().__init__()
        self.gate, self.experts, self._group = gate, experts, group
        self._ranks = dist.get_world_size(group.now)

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted answers [N, D], and this rank's load-balancing loss."""
        probs_NE, weights_NK, expert_NK = self.gate(x_ND)
        experts, choices, ranks = probs_NE.shape[1], expert_NK.shape[1], self._ranks
        # Exchange the counts; sort meanwhile.
        expert_P = expert_NK.reshape(-1)
        own_E = count_by_expert(expert_P, experts)
        theirs_RL = own_E.new_empty(ranks, experts // ranks)
        exchanging = dist.all_to_all_single(
            theirs_RL.view(-1), own_E, group=self._group.now, async_op=True
        )
        order = expert_P.argsort(stable=True)
        self._group.wait(exchanging)
        rows_L = theirs_RL.sum(0)
        sums = (own_E.view(ranks, -1).sum(1), theirs_RL.sum(1), rows_L)
        copied = HostCopy(torch.cat(sums))
        order_back = inverse_of(order)
        numbers = copied.read()
        sent, received = numbers[:ranks], numbers[ranks : 2 * ranks]
        # Send the tokens, and sort what arrives by experts.
        arrival = rows_of(starts_of(theirs_RL).T, theirs_RL.T, sum(received))
        arrival_back = inverse_of(arrival)
        spread = SpreadRows.apply(x_ND, choices, order, order_back, None)
        arrived = ExchangedRows.apply(self._group, spread, sent, received)
        rows_MD = PermutedRows.apply(arrived, arrival, arrival_back)
        answers = self.experts(rows_MD, numbers[2 * ranks :], rows_L)
        # Send the answers back.
        back = PermutedRows.apply(answers, arrival_back, arrival)
        back = ExchangedRows.apply(self._group, back, received, sent)
        answer_PD = PermutedRows.apply(back, order_back, order)
        weighted_NKD = answer_PD.view(*weights_NK.shape, -1) * weights_NK.to(x_ND).unsqueeze(-1)
        portion_E = (own_E / max(1, expert_P.numel())).to(probs_NE)
        balance = experts * (portion_E * probs_NE.mean(0)).sum()
        return add_rows(weighted_NKD, None), balance
