"""Exchange of rows between ranks: uneven all-to-alls, forward and backward.

Rows are sent as bytes, because not every backend supports every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast._elastic.world import WorldGroup


def exchange(
    group: WorldGroup, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
) -> torch.Tensor:
    """Send each rank its rows of `sent`, and return the rows from all ranks, in the order of ranks.
    Collective.

    Args:
        sent: [rows, width], of any dtype and device.
        sent_rows, received_rows: number of rows to and from each rank of the group.
    """
    given = sent.contiguous().view(torch.uint8)
    taken = given.new_empty(sum(received_rows), given.shape[1])
    deal_rows(group, given, sent_rows, taken, received_rows)
    return taken.view(sent.dtype)


def deal_rows(
    group: WorldGroup,
    given: torch.Tensor,
    given_rows: Sequence[int],
    taken: torch.Tensor,
    taken_rows: Sequence[int],
) -> None:
    """Send each rank its rows of `given`, and fill `taken` with those from all ranks. Collective.

    Args:
        given, taken: uint8, with the rows for, or from, the ranks in their order.
        given_rows, taken_rows: number of rows for, or from, each rank of the group.
    """
    work = dist.all_to_all_single(
        taken, given, list(taken_rows), list(given_rows), group=group.now, async_op=True
    )
    group.wait(work)


class ExchangedRows(torch.autograd.Function):
    """`exchange`; the backward pass sends the gradients of the rows back."""

    @staticmethod
    def forward(
        ctx: Any,
        group: WorldGroup,
        sent: torch.Tensor,
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
    ) -> torch.Tensor:
        ctx.group, ctx.sent_rows, ctx.received_rows = group, sent_rows, received_rows
        return exchange(group, sent, sent_rows, received_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = ExchangedRows.apply(ctx.group, grads[0], ctx.received_rows, ctx.sent_rows)
        return None, back, None, None


class PermutedRows(torch.autograd.Function):
    """Rows in another order. The backward pass adds nothing, so no order of additions can vary.

    Args of `apply`: rows [n, width], and two permutations [n] that are inverse to each other: the
    source of each row, and its destination.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.order, ctx.inverse = order, inverse
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return PermutedRows.apply(grads[0], ctx.inverse, ctx.order), None, None


class SpreadRows(torch.autograd.Function):
    """K copies of each row, in another order.

    Args of `apply`: rows [N, D]; K; two permutations [N·K] that are inverse to each other, the
    first one the source of each copy among the K of row 0, the K of row 1 and so on; and the order
    in which the gradients of a row's copies are added, as in `add_rows`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        copies: int,
        order: torch.Tensor,
        inverse: torch.Tensor,
        sequence: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.order, ctx.inverse, ctx.sequence = order, inverse, sequence
        ctx.shape = (rows.shape[0], copies, rows.shape[1])
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = PermutedRows.apply(grads[0], ctx.inverse, ctx.order)
        return add_rows(back.view(ctx.shape), ctx.sequence), None, None, None, None


def add_rows(rows_NKD: torch.Tensor, sequence_NK: torch.Tensor | None) -> torch.Tensor:
    """Add up the K rows of each of N tokens.

    Args:
        sequence_NK: for each token its rows in the order in which they are added one by one; None
            leaves the order to torch.
    """
    if sequence_NK is None:
        return rows_NKD.sum(1)
    count, choices, width = rows_NKD.shape
    first = torch.arange(count, device=rows_NKD.device).unsqueeze(1) * choices
    order = (first + sequence_NK).reshape(-1)
    sorted_PD: torch.Tensor = PermutedRows.apply(
        rows_NKD.reshape(-1, width), order, inverse_of(order)
    )
    total, *others = sorted_PD.view(count, choices, width).unbind(1)
    for one in others:
        total = total + one
    return total


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
