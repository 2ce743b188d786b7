"""Records of Redis that somebody else may have written."""

from __future__ import annotations

import pytest

from holdfast_core.catalogue import records
from holdfast_core.snapshots.generations import Generation


@pytest.mark.parametrize("number", ["9" * 22, "9" * 4000, "9" * 5000, "-" + "9" * 21])
def test_a_record_with_a_number_of_more_than_64_bits_is_left_out(number: str) -> None:
    known = '{"stages": {"0": {"committed": "1.7"}}, "ranks": []}'
    found = records.states_from({"a": known, "b": known.replace("[]", f'[{{"rank": {number}}}]')})
    assert list(found) == ["a"]
    (stages,) = records.stages_of_state(found["a"]).values()
    assert list(stages.values()) == [Generation(1, 7)]
