"""Names of exported tensors: rules that turn names in the model into names that other tools expect.

Rules are regular expressions over the names that training uses, where stacked experts are listed
one by one (`layers.0.moe.experts.w_in[5]`). A rule may transpose a tensor (stacked experts of
grouped GEMMs are `[in, out]`, linear layers `[out, in]`) and may cut a fused weight into parts. A
tensor that matches no rule is an error: a model that silently lacks a weight is worse than no
model.

`HUGGING_FACE` fits the example model; docs/loading-elsewhere.md shows how to write other rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from holdfast_core.durable.set_tensors import SetTensor
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole


class NameRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule for tensors whose whole name matches."""

    match: str
    """Regular expression."""
    names: tuple[str, ...] = ()
    r"""The new name, with `\1` for the match of the first group; several names for parts of equal
    length along the first dimension; none to leave the tensor out."""
    transpose: bool = False
    """Swap the last two dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """One tensor of the export, and the part of the set from which it is read."""

    name: str
    tensor: SetTensor
    first: int
    """Index along the first dimension where the part begins."""
    shape: tuple[int, ...]
    """Shape of the part in the set, before it is transposed."""
    transpose: bool = False

    @property
    def new_shape(self) -> tuple[int, ...]:
        """Shape in the export."""
        *outer, rows, columns = self.shape if self.transpose else (*self.shape, 1, 1)
        return (*outer, columns, rows) if self.transpose else self.shape

    @property
    def nbytes(self) -> int:
        size = self.tensor.item_bytes
        for length in self.shape:
            size *= length
        return size


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    rules: tuple[NameRule, ...]


_TABLE = msgspec.json.Decoder(_Table)

_LAYER, _OUT = r"layers\.([0-9]+)\.", r"model.layers.\1."

HUGGING_FACE: tuple[NameRule, ...] = (
    NameRule(match=r"embedding\.weight", names=("model.embed_tokens.weight",)),
    NameRule(match=r"position", names=("model.embed_positions.weight",)),
    NameRule(
        match=_LAYER + r"qkv\.weight",
        names=tuple(f"{_OUT}self_attn.{part}_proj.weight" for part in "qkv"),
    ),
    NameRule(match=_LAYER + r"proj\.weight", names=(_OUT + "self_attn.o_proj.weight",)),
    NameRule(match=_LAYER + r"attn_norm\.weight", names=(_OUT + "input_layernorm.weight",)),
    NameRule(match=_LAYER + r"moe_norm\.weight", names=(_OUT + "post_attention_layernorm.weight",)),
    NameRule(match=_LAYER + r"moe\.gate\.weight", names=(_OUT + "block_sparse_moe.gate.weight",)),
    NameRule(
        match=_LAYER + r"moe\.experts\.w_in\[([0-9]+)\]",
        names=(_OUT + r"block_sparse_moe.experts.\2.w1.weight",),
        transpose=True,
    ),
    NameRule(
        match=_LAYER + r"moe\.experts\.w_out\[([0-9]+)\]",
        names=(_OUT + r"block_sparse_moe.experts.\2.w2.weight",),
        transpose=True,
    ),
    NameRule(match=r"norm\.weight", names=("model.norm.weight",)),
    NameRule(match=r"head\.weight", names=("lm_head.weight",)),
)
"""The example model (examples/train_moe.py) in the names of Hugging Face's Mixtral."""


def decode_rules(data: bytes) -> tuple[NameRule, ...]:
    """Rules from a JSON document `{"rules": [{"match": …, "names": […], "transpose": …}, …]}`.

    Raises:
        InvalidJobError: when `data` is not such a document, or an expression is invalid.
    """
    try:
        rules = _TABLE.decode(data).rules
        for rule in rules:
            re.compile(rule.match)
    except (msgspec.DecodeError, UnicodeError, RecursionError, re.error) as error:
        raise InvalidJobError(f"the table of names cannot be read: {error}") from error
    return rules


def tensors_to_export(
    tensors: Iterable[SetTensor], rules: Sequence[NameRule] | None, *, optimizer: bool = False
) -> list[Exported]:
    """The tensors to export, sorted by new name.

    Args:
        rules: the first that matches counts; None keeps all names.
        optimizer: export optimizer states too, not only parameters and buffers.

    Raises:
        InvalidJobError: when a tensor matches no rule or cannot be cut or transposed as its rule
            requires, or when two tensors get one name.
    """
    by_name: dict[str, Exported] = {}
    unknown = []
    for tensor in tensors:
        state = tensor.key or tensor.role in (TensorRole.OPTIMIZER, TensorRole.MASTER)
        if state and not optimizer:
            continue
        rule, match = _rule(tensor.name, rules)
        if rule is None:
            unknown.append(tensor.name)
            continue
        for index, name in enumerate(rule.names):
            new = name if match is None else _expand(match, name, rule)
            if new in by_name:
                raise InvalidJobError(
                    f"two tensors would be called {new!r}: {tensor.name} and "
                    f"{by_name[new].tensor.name}"
                )
            by_name[new] = _part(new, tensor, rule, index)
    if unknown:
        raise InvalidJobError(
            f"{len(unknown)} tensors match no rule, such as {', '.join(unknown[:5])}; add a rule "
            f"that names them, or one without names that leaves them out"
        )
    return [by_name[name] for name in sorted(by_name)]


def _rule(
    name: str, rules: Sequence[NameRule] | None
) -> tuple[NameRule | None, re.Match[str] | None]:
    if rules is None:
        return NameRule(match="", names=(name,)), None
    for rule in rules:
        if match := re.fullmatch(rule.match, name):
            return rule, match
    return None, None


def _expand(match: re.Match[str], name: str, rule: NameRule) -> str:
    try:
        return match.expand(name)
    except (re.error, IndexError) as error:
        raise InvalidJobError(f"{name!r} of the rule {rule.match!r}: {error}") from error


def _part(name: str, tensor: SetTensor, rule: NameRule, index: int) -> Exported:
    parts, shape = len(rule.names), tensor.shape
    if parts > 1:
        if not shape or shape[0] % parts:
            raise InvalidJobError(
                f"{tensor.name} of shape {list(shape)} cannot be cut into {parts} equal parts"
            )
        shape = (shape[0] // parts, *shape[1:])
    if rule.transpose and len(shape) < 2:
        raise InvalidJobError(f"{tensor.name} of shape {list(shape)} cannot be transposed")
    first = index * shape[0] if shape else 0
    return Exported(name=name, tensor=tensor, first=first, shape=shape, transpose=rule.transpose)
