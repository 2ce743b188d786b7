"""The statements of ranks before experts move to other seats: the experts that each rank holds, and
their loads.

All ranks plan from the statements of all ranks. So statements that cannot be true must be refused
first: a wrong number would move experts to ranks that do not expect them, or mix the bytes of two
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import msgspec

from holdfast._state.extras import dtype_of_name
from holdfast_core.errors import CorruptError, ProtocolError

TOKENS_MAX = 2**53
"""Largest number of tokens of an expert, because plans divide them as floats."""
SEAT_BYTES_MAX = 2**48
"""Largest number of bytes of an expert in one tensor."""


class Stack(msgspec.Struct, frozen=True):
    """A tensor whose first dimension counts seats: a parameter, a master or an optimizer state."""

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
    """The statement of one rank."""

    loads: tuple[tuple[int, ...], ...]
    step_s: float = 0.0
    """Duration of recent steps, as this rank measured it."""
    held: tuple[tuple[int, ...], ...] = ()
    """The experts in its seats, layer by layer; empty for a rank without training state."""
    stacks: tuple[Stack, ...] = ()


_STATEMENT = msgspec.msgpack.Decoder(Statement)
encode_statement = msgspec.msgpack.Encoder().encode


def read_statements(
    encoded: Sequence[bytes], *, layers: int, experts: int, seats: int
) -> list[Statement]:
    """Decode and check the statements of all ranks; return them in the order of ranks.

    Args:
        layers, experts, seats: numbers of layers, of experts in each layer, and of seats of a rank
            in each layer.

    Raises:
        ProtocolError: a statement cannot be decoded or is not about this model, or two statements
            contradict each other.
    """
    # Check each statement alone.
    statements = list[Statement]()
    for rank, data in enumerate(encoded):
        try:
            statements.append(_STATEMENT.decode(data))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _wrong(rank, f"cannot be read: {error}") from error
        _check(rank, statements[-1], layers, experts, seats)
    # Ranks must agree about the stacks that several of them have.
    first_seen = dict[tuple[int, str], tuple[int, Stack]]()
    for rank, statement in enumerate(statements):
        for stack in statement.stacks:
            first, same = first_seen.setdefault((stack.layer, stack.name), (rank, stack))
            if stack != same:
                raise _wrong(rank, f"has {stack}, and that of rank {first} {same}")
    return statements


def check_all_held(said: Sequence[Statement], experts: int) -> None:
    """Refuse statements according to which no rank holds some expert.

    Raises:
        ProtocolError: no rank holds some expert; the message names it.
    """
    for layer, of_ranks in enumerate(zip(*(one.held for one in said if one.held), strict=True)):
        lacking = set(range(experts)).difference(*of_ranks)
        if lacking:
            raise ProtocolError(
                f"no rank states any more that it holds experts {sorted(lacking)} of layer "
                f"{layer}, although all experts were there when the ranks agreed to continue"
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
