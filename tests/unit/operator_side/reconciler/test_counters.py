"""What a control loop stores for the next one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from holdfast_core.corruption import Proof
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy
from holdfast_operator.reconciler.observe.counters import (
    _TIMES,
    Counters,
    Outcome,
    Setback,
    from_document,
    to_document,
)
from holdfast_operator.reconciler.observe.last_failure import (
    LastCorruption,
    MemoryShortage,
    TrainerFailure,
)
from holdfast_operator.reconciler.observe.shape import Shape
from holdfast_operator.reconciler.observe.views import ControlState

SHAPE = Shape(
    nodes=4, nproc_per_node=8, dp=8, tp=2, pp=2, ep=4, redundancy=Redundancy.RAIM6, group_size=4
)
WORDS = "4 nodes of 8, dp 8 tp 2 pp 2 ep 4, RAIM6 in groups of 4"
"""What earlier versions stored of that shape."""

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
    shape=SHAPE,
    void_epoch=2,
    outcome=Outcome.FAILED,
    outcome_reason="too many",
    outcome_word="MaxRestartsExceeded",
    ended_at=100.0,
)


def counters_of(state: ControlState) -> Counters:
    return Counters(**{each.name: getattr(state, each.name) for each in fields(Counters)})


def test_what_is_stored_is_remembered_on_another_monotonic_clock() -> None:
    document = json.loads(json.dumps(to_document(STATE, now=100.0, wall=5100.0)))
    found = from_document(document, now=20.0, wall=5120.0)
    assert ControlState.remembering(found) == ControlState(
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
        shape=SHAPE,
        void_epoch=2,
        outcome=Outcome.FAILED,
        outcome_reason="too many",
        outcome_word="MaxRestartsExceeded",
        ended_at=0.0,
    )


def test_no_time_is_in_the_future_after_the_clock_was_set_back() -> None:
    setback = Setback(node="n1", times=2, at=98.0)
    state = replace(STATE, setbacks=(setback,), resized_at=97.0)
    found = from_document(to_document(state, now=100.0, wall=90_000.0), now=20.0, wall=3600.0)
    assert found.setbacks == (setback._replace(at=20.0),)
    assert found.restarts == (20.0, 20.0)
    times = (found.resized_at, found.no_replacement_since, found.active_since, found.ended_at)
    assert times == (20.0, 20.0, 20.0, 20.0)


FULL = replace(
    STATE,
    resized_at=97.0,
    joining=((1, "n2"),),
    replaced=frozenset({1}),
    setbacks=(Setback(node="n1", times=2, at=98.25),),
    noticed=frozenset({"n1"}),
    copy_request="a",
    stored=Generation(6, 30),
    stored_in="s3://b",
    failure=TrainerFailure(epoch=6, member=1, text="rank 1", exit_code=1, last_lines="a_b: c"),
    losses=JobLoss(
        k=1,
        experts_max=8,
        limit=0.05,
        routed_tokens=100,
        at_risk=0.1,
        at_risk_mlt=0.2,
        lost=0.0,
        lost_mlt=0.0,
        lost_tokens=3,
    ),
)
OF_AN_EARLIER_VERSION = {
    "epoch": 7,
    "restarted_at": [5090.0, 5095.5],
    "recoveries": 5,
    "counted": 3,
    "counted_epoch": 7,
    "renewed": [1, 2],
    "resized_at": 5097.0,
    "joining": [[1, "n2"]],
    "replaced": [1],
    "setbacks": [["n1", 2, 5098.25]],
    "no_replacement_since": 5099.0,
    "noticed": ["n1"],
    "copy_request": "a",
    "saved": "6.40",
    "stored": "6.30",
    "stored_in": "s3://b",
    "losses": {
        "k": 1,
        "experts_max": 8,
        "limit": 0.05,
        "routed_tokens": 100,
        "at_risk": 0.1,
        "at_risk_mlt": 0.2,
        "lost": 0.0,
        "lost_mlt": 0.0,
        "lost_tokens": 3,
        "newest": None,
    },
    "failure": {
        "epoch": 6,
        "member": 1,
        "text": "rank 1",
        "exit_code": 1,
        "last_lines": "a_b: c",
        "times": 1,
    },
    "suspended": True,
    "active_since": 5010.0,
    "ran": True,
    "shape": {
        "nodes": 4,
        "nproc_per_node": 8,
        "dp": 8,
        "tp": 2,
        "pp": 2,
        "ep": 4,
        "redundancy": "RAIM6",
        "group_size": 4,
    },
    "void_epoch": 2,
    "outcome": "Failed",
    "outcome_reason": "too many",
    "outcome_word": "MaxRestartsExceeded",
    "ended_at": 5100.0,
}


def test_what_an_earlier_version_stored_is_read_and_written_in_the_new_form() -> None:
    found = from_document(OF_AN_EARLIER_VERSION, now=100.0, wall=5100.0)
    assert found == counters_of(FULL)
    document = to_document(found, now=100.0, wall=5100.0)
    assert document["restartedAt"] == ["1970-01-01T01:24:50.000Z", "1970-01-01T01:24:55.500Z"]
    assert from_document(document, now=100.0, wall=5100.0) == found


def test_an_earlier_version_that_is_put_back_still_understands_that_a_job_has_ended() -> None:
    """It reads the names that it knows, in the form that it knows, and ignores the others."""
    document = to_document(FULL, now=100.0, wall=5100.0)
    known = {name: value for name, value in document.items() if name in OF_AN_EARLIER_VERSION}
    assert known == {name: OF_AN_EARLIER_VERSION[name] for name in known}
    assert {"epoch", "outcome", "saved", "suspended", "recoveries"} <= known.keys()


def test_names_are_in_camel_case_and_times_in_rfc_3339() -> None:
    document = to_document(FULL, now=100.0, wall=5100.0)

    def names(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
            for each in value.values():
                yield from names(each)
        elif isinstance(value, list):
            for each in value:
                yield from names(each)

    assert [
        name for name in names(document) if not re.fullmatch("[a-z]+([A-Z][a-z]*)*", name)
    ] == []
    times = [name for name in document if name.endswith(("Since", "At"))]
    assert len(times) == 5
    for name in times:
        value = document[name]
        for text in value if isinstance(value, list) else [value]:
            assert re.fullmatch(r"1970-01-01T01:2\d:\d\d\.\d{3}Z", text), text
    assert document["nodeSetbacks"] == [
        {"node": "n1", "times": 2, "at": "1970-01-01T01:24:58.250Z"}
    ]
    assert document["joiningMembers"] == [{"member": 1, "node": "n2"}]


LATER = replace(
    FULL,
    homes=("n0", "n1"),
    wait_members=frozenset({1, 2}),
    replaced_stragglers=frozenset({1}),
    straggler_replaced_at=96.5,
    shortage=MemoryShortage(epoch=6, step=40, times=2),
    corruption=LastCorruption(
        epoch=6,
        step=41,
        proof=Proof.MAJORITY,
        equal_step=40,
        unit="layer0/gate",
        ranks=(2, 3),
        member=1,
        node="n1",
        compared_all=True,
        text="ranks 2 and 3 are wrong",
    ),
    corruption_undone_at=95.5,
    corruption_undone_epoch=2,
    corruption_left_at=94.5,
    corrupt_nodes=frozenset({"n2"}),
)
"""With values for the fields that earlier versions do not have."""


def test_every_field_comes_back() -> None:
    """Also those that are added later: those of simple kinds get a value here, others in LATER."""
    samples: dict[str, object] = {"bool": True, "int": 3, "str": "x", "float": 5.25}
    for each in fields(Counters):
        value = getattr(LATER, each.name)
        if value == each.default and each.name != "plan":
            value = samples[str(each.type).partition(" ")[0]]
        given = replace(Counters(), **{each.name: value})
        document = json.loads(json.dumps(to_document(given, now=100.0, wall=5100.0)))
        assert from_document(document, now=100.0, wall=5100.0) == given, each.name
        if each.name in _TIMES:  # read on a machine whose clock began earlier
            later = from_document(document, now=1100.0, wall=5100.0)
            assert getattr(later, each.name) == getattr(given, each.name) + 1000.0, each.name


def test_documents_keep_their_form() -> None:
    assert to_document(STATE, now=100.0, wall=5100.0) == {
        "epoch": 7,
        "restartedAt": ["1970-01-01T01:24:50.000Z", "1970-01-01T01:24:55.500Z"],
        "recoveries": 5,
        "counted": 3,
        "countedEpoch": 7,
        "saved": "6.40",
        "renewed": [1, 2],
        "suspended": True,
        "activeSince": "1970-01-01T01:23:30.000Z",
        "ran": True,
        "noReplacementSince": "1970-01-01T01:24:59.000Z",
        "jobShape": {
            "nodes": 4,
            "nprocPerNode": 8,
            "dp": 8,
            "tp": 2,
            "pp": 2,
            "ep": 4,
            "redundancy": "RAIM6",
            "groupSize": 4,
        },
        "voidEpoch": 2,
        "outcome": "Failed",
        "outcomeReason": "too many",
        "outcomeWord": "MaxRestartsExceeded",
        "endedAt": "1970-01-01T01:25:00.000Z",
    }


def test_a_document_may_spell_out_its_defaults() -> None:
    given = {"epoch": 2, "restarted_at": [], "saved": "", "stored": "2.9", "outcome": None}
    found = from_document(given | {"losses": None, "renewed": []}, now=1.0, wall=2.0)
    assert found == Counters(epoch=2, stored=Generation(2, 9))


def test_a_shape_that_an_earlier_version_wrote_in_words_is_read() -> None:
    document = OF_AN_EARLIER_VERSION | {"shape": WORDS}
    assert from_document(document, now=100.0, wall=5100.0) == counters_of(FULL)
    assert str(SHAPE) == WORDS


@pytest.mark.parametrize("words", ["", "4 nodes", WORDS + " or so", WORDS.replace("RAIM6", "X")])
def test_words_that_are_no_shape_leave_it_unknown_and_lose_nothing_else(words: str) -> None:
    document = OF_AN_EARLIER_VERSION | {"shape": words}
    found = from_document(document, now=100.0, wall=5100.0)
    assert found == replace(counters_of(FULL), shape=None)


@pytest.mark.parametrize("redundancy", Redundancy)
@pytest.mark.parametrize("group_size", [None, 3])
def test_the_words_of_every_shape_lead_back_to_it(
    redundancy: Redundancy, group_size: int | None
) -> None:
    shape = replace(SHAPE, redundancy=redundancy, group_size=group_size)
    assert Shape.parse(str(shape)) == shape


def test_equal_states_give_equal_documents() -> None:
    first = to_document(STATE, now=100.0, wall=5100.123456)
    assert first == to_document(STATE, now=100.0, wall=5100.123456)
    assert to_document(ControlState(), now=1.0, wall=2.0) == {}


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        [],
        "x",
        {"epoch": "x"},
        {"saved": "no"},
        {"saved": 6.4},
        {"stored": "7"},
        {"shape": {"nodes": 4}},
        {"jobShape": {"nodes": 4}},
        {"endedAt": "yesterday"},
        {"restartedAt": 5},
        {"setbacks": [{"node": "n1"}]},
        {"joining": [1]},
    ],
)
def test_a_document_that_cannot_be_understood_is_blank(document: object) -> None:
    assert from_document(document, now=1.0, wall=2.0) == Counters()


def test_what_a_later_version_adds_is_ignored() -> None:
    assert from_document({"epoch": 3, "more": 1}, now=1.0, wall=2.0) == Counters(epoch=3)
