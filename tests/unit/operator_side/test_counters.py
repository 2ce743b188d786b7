"""What a control loop stores for the next one."""

from __future__ import annotations

import json

import pytest

from holdfast_core.values import Generation
from holdfast_operator.counters import Counters, counters, from_document, remembered, to_document
from holdfast_operator.views import ControlState, Outcome

STATE = ControlState(
    epoch=7,
    restarts=(90.0, 95.5),
    recoveries=5,
    counted=3,
    counted_epoch=7,
    saved=Generation(6, 40),
    renewed=frozenset({2, 1}),
    suspended=True,
    active_since=10.0,
    ran=True,
    no_replacement_since=99.0,
    shape="4 nodes",
    void_epoch=2,
    outcome=Outcome.FAILED,
    outcome_reason="too many",
    outcome_word="MaxRestartsExceeded",
    ended_at=100.0,
)


def test_what_is_stored_is_remembered_on_another_monotonic_clock() -> None:
    document = json.loads(json.dumps(to_document(counters(STATE, now=100.0, wall=5100.0))))
    found = remembered(from_document(document), now=20.0, wall=5120.0)
    assert found == ControlState(
        epoch=7,
        restarts=(-10.0, -4.5),
        recoveries=5,
        counted=3,
        counted_epoch=7,
        saved=Generation(6, 40),
        renewed=frozenset({1, 2}),
        suspended=True,
        active_since=-90.0,
        ran=True,
        no_replacement_since=-1.0,
        shape="4 nodes",
        void_epoch=2,
        outcome=Outcome.FAILED,
        outcome_reason="too many",
        outcome_word="MaxRestartsExceeded",
        ended_at=0.0,
    )


def test_equal_states_give_equal_documents() -> None:
    first = to_document(counters(STATE, now=100.0, wall=5100.123456))
    assert first == to_document(counters(STATE, now=100.0, wall=5100.123456))
    assert to_document(counters(ControlState(), now=1.0, wall=2.0)) == {}


@pytest.mark.parametrize("document", [None, {}, [], "x", {"epoch": "x"}, {"saved": "no"}])
def test_a_document_that_cannot_be_understood_is_blank(document: object) -> None:
    assert from_document(document) == Counters()


def test_what_a_later_version_adds_is_ignored() -> None:
    assert from_document({"epoch": 3, "more": 1}) == Counters(epoch=3)
