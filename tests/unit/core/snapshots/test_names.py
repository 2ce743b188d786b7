"""Names of tensors are data: any text is a name, and no two tensors have one name."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName

MARKS = ["(buffer)", "/master", "[5]", "[٣]", "[", "]", "optimizer/", "0/parameter3", ":", ":1:"]
CODES = ["%3A", "%25", "%2F", "%28", "%5B", "%uD800", "%", "%%", "3A", "uD800"]
OTHERS = [
    "w",
    ".",
    "²",
    "\ud800",
    "\udfff",
    "frame1/",
    "rank-00000/",
    "\n",
    "5",
    "@",
    "~",
    "x" * 999,
]
fragments = st.lists(st.sampled_from(MARKS + CODES + OTHERS), min_size=1, max_size=6).map("".join)
texts = fragments | st.text(st.characters(exclude_categories=[]), min_size=1, max_size=9)
names = st.builds(
    TensorName,
    texts,
    st.sampled_from([NameKind.PARAMETER, NameKind.BUFFER, NameKind.MASTER]),
    st.none() | st.integers(0, 10**9 - 1),
    st.none() | st.just("") | texts,
) | st.builds(TensorName.orphan, st.integers(0, 99), st.integers(0, 99))


@given(names)
@example(TensorName("user:buys.weight", key="exp_avg"))
@example(TensorName("w[5]", expert=5, key="a:b"))
@example(TensorName("optimizer/0/parameter3"))
def test_a_name_is_read_back_from_its_text_which_json_can_hold(name: TensorName) -> None:
    text = str(name)
    assert TensorName.parse(json.loads(json.dumps(text).encode())) == name
    assert str(TensorName.parse(text)) == text


@given(names, names)
def test_different_names_have_different_texts(one: TensorName, other: TensorName) -> None:
    assert (one == other) == (str(one) == str(other))


def test_names_without_marks_are_written_as_they_were_before_there_were_codes() -> None:
    assert str(TensorName("a.b²%/c", expert=5, key="exp_avg")) == "a.b²%/c[5]:exp_avg"
    assert str(TensorName("a.w", NameKind.MASTER, 3, "step")) == "a.w/master[3]:step"
    assert str(TensorName("a.mean", NameKind.BUFFER)) == "a.mean(buffer)"
    assert str(TensorName.orphan(0, 3).state("exp_avg")) == "optimizer/0/parameter3:exp_avg"


def test_a_name_knows_what_it_is_a_part_or_a_state_of() -> None:
    name = TensorName.parse("a.w/master[3]:step")
    assert (str(name.base), str(name.whole)) == ("a.w/master[3]", "a.w/master:step")
    assert name.is_state
    assert not name.base.is_state
    assert name.base.slice(4).state("step") == TensorName.parse("a.w/master[4]:step")


def test_an_entry_of_an_earlier_version_has_the_colons_of_its_path() -> None:
    """Such snapshots could not be restored, and their weights can still be exported."""
    for role in (TensorRole.COMPUTE, TensorRole.BUFFER):
        assert TensorName.of_entry("parts.user:buys.weight", role).path == "parts.user:buys.weight"
    assert TensorName.of_entry("w:exp_avg", TensorRole.OPTIMIZER) == TensorName("w", key="exp_avg")
