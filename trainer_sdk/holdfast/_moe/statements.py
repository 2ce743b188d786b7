"""Statements of ranks before experts take other seats: what each holds, and what its experts got.

All ranks plan from the statements of all. So what cannot be true must not get that far: a wrong
number would move experts to ranks that do not expect them, or mix the bytes of two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import msgspec

from holdfast._state.extras import dtype_of_name
from holdfast_core.errors import CorruptError, ProtocolError

TOKENS_MAX = 2**53
"""Most tokens of an expert: plans divide them as floats."""
SEAT_BYTES_MAX = 2**48
"""Most bytes of an expert in one tensor."""


class Stack(msgspec.Struct, frozen=True):
    """Tensor whose first dimension counts seats: a parameter, a master or an optimizer state."""

    layer: int
    name: str
    """Text of its `TensorName`."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of one seat."""
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes of one seat."""
        return prod(self.shape) * dtype_of_name(self.dtype).itemsize


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has."""

    loads: tuple[tuple[int, ...], ...]
    step_s: float = 0.0
    """Time of a step, as this rank sees it."""
    held: tuple[tuple[int, ...], ...] = ()
    """For each layer the experts in its seats; empty for a rank without training state."""
    stacks: tuple[Stack, ...] = ()


_STATEMENT = msgspec.msgpack.Decoder(Statement)
encode_statement = msgspec.msgpack.Encoder().encode


def read_statements(
    encoded: Sequence[bytes], *, layers: int, experts: int, seats: int
) -> list[Statement]:
    """The statements of all ranks, in their order.

    Args:
        layers, experts, seats: shape of this rank's model, and seats of a rank in each layer.

    Raises:
        ProtocolError: one cannot be read, or is not of this model, or two contradict each other.
    """
    found = list[Statement]()
    for rank, data in enumerate(encoded):
        try:
            found.append(_STATEMENT.decode(data))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _wrong(rank, f"cannot be read: {error}") from error
        _check(rank, found[-1], layers, experts, seats)
    known = dict[tuple[int, str], tuple[int, Stack]]()
    for rank, one in enumerate(found):
        for stack in one.stacks:
            first, same = known.setdefault((stack.layer, stack.name), (rank, stack))
            if stack != same:
                raise _wrong(rank, f"has {stack}, and that of rank {first} {same}")
    return found


def check_all_held(said: Sequence[Statement], experts: int) -> None:
    """Refuse statements by which no rank holds some expert.

    Raises:
        ProtocolError: there is such an expert.
    """
    for layer, of_ranks in enumerate(zip(*(one.held for one in said if one.held), strict=True)):
        lacking = set(range(experts)).difference(*of_ranks)
        if lacking:
            raise ProtocolError(
                f"no rank states any more to hold experts {sorted(lacking)} of layer {layer}, of "
                f"which all were there when ranks agreed to go on"
            )


def _check(rank: int, one: Statement, layers: int, experts: int, seats: int) -> None:
    if [len(of_layer) for of_layer in one.loads] != [experts] * layers:
        raise _wrong(
            rank,
            f"has loads of {[len(of_layer) for of_layer in one.loads[:8]]} experts; this rank's "
            f"model has {layers} layers of {experts}",
        )
    if not all(0 <= tokens <= TOKENS_MAX for of_layer in one.loads for tokens in of_layer):
        raise _wrong(rank, f"has loads that are not 0 to {TOKENS_MAX} tokens")
    if not 0 <= one.step_s < inf:
        raise _wrong(rank, f"has step_s={one.step_s}, which is no time")
    if one.held and len(one.held) != layers:
        raise _wrong(rank, f"has seats in {len(one.held)} layers instead of {layers}")
    for layer, held in enumerate(one.held):
        if len(set(held)) != len(held) or len(held) > seats:
            raise _wrong(rank, f"has experts {held[:64]} in the {seats} seats of layer {layer}")
        if not all(0 <= expert < experts for expert in held):
            raise _wrong(rank, f"has experts {held} in layer {layer}, which has {experts}")
    for stack in one.stacks:
        if not 0 <= stack.layer < layers or not all(size >= 0 for size in stack.shape):
            raise _wrong(rank, f"has {stack} in {layers} layers")
        try:
            nbytes = stack.nbytes
        except CorruptError as error:
            raise _wrong(rank, f"has {stack}: {error}") from error
        if nbytes > SEAT_BYTES_MAX:
            raise _wrong(rank, f"has {stack} of {nbytes} bytes in a seat")


def _wrong(rank: int, how: str) -> ProtocolError:
    return ProtocolError(
        f"rank {rank}'s statement of its experts {how}; run the same script and the same version "
        f"of holdfast on all ranks"
    )
