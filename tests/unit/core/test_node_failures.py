"""Failures of nodes: how they fade, merge, and stay within bounds."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.node_failures import (
    ALIKE_CHARACTERS,
    CLEAN_BELOW,
    FAILURES_MAX,
    FUTURE_S,
    HALF_LIFE_S,
    JOB_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    NODES_MAX,
    REPEAT_S,
    FailureKind,
    NodeFailure,
    Rating,
    Record,
    excused,
    from_document,
    mark_of,
    ratings,
    to_document,
    with_failures,
    with_problem,
)

NOW = 1.7e9
DAY_S = 86400.0
UUID, PCI = "GPU-8f0b2c3d-0a1b-2c3d-4e5f-00112233aabb", "0000:3b:00"
CONFIG_MAP_BYTES_MAX = 1 << 20


def failure(
    days_ago: float = 0.0,
    *,
    kind: FailureKind = FailureKind.LOST_RANK,
    job: str = "team.moe",
    epoch: int = 1,
    alike: str = "",
    device: str = "",
) -> NodeFailure:
    at = NOW - days_ago * DAY_S
    return NodeFailure(kind=kind, job=job, epoch=epoch, at=at, alike=alike, device=device)


def rated(record: dict[str, list[NodeFailure]], *, days_later: float = 0.0) -> dict[str, Rating]:
    now = NOW + days_later * DAY_S
    kept = {node: tuple(failures) for node, failures in record.items()}
    return ratings(kept, now=now, half_life_s=HALF_LIFE_S)


def added(record: Record, *failures: tuple[str, NodeFailure]) -> dict[str, tuple[NodeFailure, ...]]:
    return with_failures(record, failures, now=NOW, half_life_s=HALF_LIFE_S)


FAILURES = st.builds(
    failure,
    st.floats(0.0, 9.0),
    kind=st.sampled_from(FailureKind),
    epoch=st.integers(1, 10**6),
    job=st.sampled_from(["team.moe", "team.other"]),
)
PAIRS = st.tuples(st.sampled_from(["n0", "n1", "n2"]), FAILURES)


def test_a_failure_weighs_half_after_each_half_life_and_the_node_is_clean_in_the_end() -> None:
    record = {"n3": [failure()]}
    scores = [rated(record, days_later=days)["n3"].score for days in (0, 2, 4)]
    assert scores == [1.0, 0.5, CLEAN_BELOW]
    assert rated(record, days_later=4.1) == {}


def test_a_lost_node_weighs_more_than_a_lost_rank() -> None:
    found = rated({"n1": [failure(kind=FailureKind.LOST_NODE)], "n2": [failure()]})
    assert found["n1"].score == 2 * found["n2"].score


@pytest.mark.parametrize(
    ("days_ago", "text"),
    [
        ((0.0,), "1 failure in 1 minute"),
        ((0.02, 0.0), "2 failures in 29 minutes"),
        ((0.2,), "1 failure in 5 hours"),
        ((1.5, 1.0, 0.1), "3 failures in 2 days"),
    ],
)
def test_a_rating_says_how_often_the_node_failed_in_which_time(
    days_ago: tuple[float, ...], text: str
) -> None:
    assert rated({"n3": [failure(days) for days in days_ago]})["n3"].text == text


def test_a_problem_of_the_cluster_adds_to_the_failures() -> None:
    assert with_problem(Rating(), "") == Rating()
    assert with_problem(Rating(), "condition GpuMemWatch") == Rating(1.0, "condition GpuMemWatch")
    both = with_problem(Rating(2.0, "2 failures in 1 hour"), "condition GpuMemWatch")
    assert both == Rating(3.0, "2 failures in 1 hour, condition GpuMemWatch")


def test_a_script_that_fails_alike_on_several_nodes_counts_against_none_of_them() -> None:
    mark = mark_of("ModuleNotFoundError: No module named 'apex'")
    record = {"n1": [failure(alike=mark)]}
    assert rated(record)["n1"].score == 1.0, "one node alone may be the cause"
    record["n2"] = [failure(alike=mark, epoch=2), failure(epoch=3)]
    assert {node: rating.score for node, rating in rated(record).items()} == {"n2": 1.0}
    assert failure(alike=mark) in excused({n: tuple(f) for n, f in record.items()})
    record["n2"][0] = failure(alike=mark, job="team.other")
    assert rated(record)["n1"].score == 1.0, "another job has another script"


def test_a_failure_that_is_seen_again_soon_counts_once() -> None:
    again = failure(-(REPEAT_S - 1) / DAY_S)
    found = with_failures(
        {"n3": (failure(),)}, [("n3", again)], now=NOW + REPEAT_S, half_life_s=HALF_LIFE_S
    )
    assert found == {"n3": (failure(),)}
    assert len(added({"n3": (failure(),)}, ("n3", failure(epoch=2)))["n3"]) == 2
    days_later = added({"n3": (failure(3.0),)}, ("n3", failure()))
    assert len(days_later["n3"]) == 2, "of a job made again, whose epochs begin anew"


def test_a_check_that_goes_on_failing_without_a_job_is_one_failure_in_a_day() -> None:
    """A daemon that starts again does not know that the check had failed before."""

    def check(hours_ago: float, name: str = "disk", job: str = "") -> NodeFailure:
        found = failure(hours_ago / 24, kind=FailureKind.FAILED_CHECK, job=job, epoch=0)
        return msgspec.structs.replace(found, check=name)

    known = {"n3": (check(47),)}
    assert added(known, ("n3", check(24))) == known
    for other in (check(22), check(24, "memory"), check(24, job="team.moe"), check(24, "")):
        assert len(added(known, ("n3", other))["n3"]) == 2
    of_job = [("n3", check(hours_ago, job="team.moe")) for hours_ago in (47, 24)]
    assert len(added({}, *of_job)["n3"]) == 2


@pytest.mark.parametrize("lasts", [FailureKind.STRAGGLING, FailureKind.CORRUPTION])
def test_what_lasts_throughout_an_epoch_is_one_failure_in_it(lasts: FailureKind) -> None:
    before, now = failure(0.5, kind=lasts), failure(kind=lasts)
    assert added({"n3": (before,)}, ("n3", now)) == {"n3": (before,)}
    others = [failure(), failure(kind=lasts, epoch=2)]
    found = added({"n3": (before,)}, *(("n3", each) for each in others))
    assert len(found["n3"]) == 3


@given(st.lists(PAIRS), st.lists(PAIRS))
def test_merging_again_what_was_merged_changes_nothing(
    known: list[tuple[str, NodeFailure]], new: list[tuple[str, NodeFailure]]
) -> None:
    record = added(added({}, *known), *new)
    assert added(record, *[pair for pair in new if pair[1] in record.get(pair[0], ())]) == record
    assert added(record) == record


@given(st.lists(PAIRS, min_size=1), st.floats(0.0, 30.0))
def test_time_alone_does_not_change_which_node_is_worse(
    pairs: list[tuple[str, NodeFailure]], days_later: float
) -> None:
    record = added({}, *pairs)
    before = ratings(record, now=NOW, half_life_s=HALF_LIFE_S)
    after = ratings(record, now=NOW + days_later * DAY_S, half_life_s=HALF_LIFE_S)
    assert after.keys() <= before.keys()
    for one in after:
        for other in after:
            if before[one].score > before[other].score * 1.000001:
                assert after[one].score > after[other].score
            assert after[one].score <= before[one].score


def test_a_record_keeps_the_nodes_that_failed_last_and_their_newest_failures() -> None:
    many = [(f"n{i}", failure(i / 1000)) for i in range(NODES_MAX + 50)]
    found = added({}, *many)
    assert set(found) == {f"n{i}" for i in range(NODES_MAX)}
    often = [("n3", failure(1 - i / 100, epoch=i)) for i in range(20)]
    epochs = [each.epoch for each in added({}, *often)["n3"]]
    assert epochs == list(range(20 - FAILURES_MAX, 20))


def test_the_largest_record_fits_into_a_config_map() -> None:
    pairs = [
        (
            f"{node:0{NAME_CHARACTERS_MAX}d}",
            failure(
                0.123456789 * number,
                kind=FailureKind.FAILED_START,
                job="j" * 400,
                epoch=2**62 + number,
                alike="f" * 99,
                device=UUID,
            ),
        )
        for node in range(NODES_MAX)
        for number in range(FAILURES_MAX)
    ]
    record = added({}, *pairs)
    document = to_document(record)
    assert len(document) == NODES_MAX
    assert {len(failures) for failures in document.values()} == {FAILURES_MAX}
    assert len(json.dumps(document).encode()) < CONFIG_MAP_BYTES_MAX
    first = document[min(document)][0]
    assert len(str(first["job"])) == JOB_CHARACTERS_MAX
    assert len(str(first["alike"])) == ALIKE_CHARACTERS
    assert first["device"] == UUID


@pytest.mark.parametrize(
    ("device", "kept"),
    [(UUID, UUID), ("0000:3b:00", "0000:3b:00"), ("GPU-1", ""), ("\x1b[2J", ""), ("x" * 999, "")],
)
def test_a_device_is_one_or_is_dropped(device: str, kept: str) -> None:
    (known,) = added({}, ("n1", failure(device=device)))["n1"]
    assert known.device == kept
    record, problems = from_document(
        {"n1": [{**to_document({"n1": (failure(),)})["n1"][0], "device": device}]}, now=NOW
    )
    assert [each.device for each in record["n1"]] == [kept] and not problems


def test_a_failure_keeps_the_device_that_is_known_of_it() -> None:
    known = failure(kind=FailureKind.FAILED_CHECK, device=UUID)
    others = [failure(), failure(kind=FailureKind.HARDWARE_FAULT), failure(-1e-4, device=PCI)]
    for other in others:
        for pairs in ([known, other], [other, known]):
            (found,) = added({}, *(("n1", each) for each in pairs))["n1"]
            assert found.device == UUID


def test_old_failures_and_names_of_no_node_are_left_out() -> None:
    assert added({"n3": (failure(99.0),)}) == {}
    assert added({}, ("", failure()), ("n" * 254, failure())) == {}


@given(st.lists(PAIRS))
def test_a_record_survives_its_document(pairs: list[tuple[str, NodeFailure]]) -> None:
    record = added({}, *pairs)
    found, problems = from_document(json.loads(json.dumps(to_document(record))), now=NOW)
    assert problems == ()
    assert to_document(found) == to_document(record)


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(GARBAGE | st.dictionaries(st.text(), st.lists(GARBAGE)))
def test_garbage_is_left_out_and_named(document: object) -> None:
    found, problems = from_document(document, now=NOW)
    assert found == {}
    empty = isinstance(document, dict) and all(value == [] for value in document.values())
    assert problems or empty or document is None


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Sabotage"},
        {"at": NOW + FUTURE_S + 1},
        {"at": -1.0},
        {"at": math.inf},
        {"at": math.nan},
        {"epoch": -1},
        {"epoch": "one"},
        {"job": 7},
    ],
)
def test_one_failure_that_makes_no_sense_does_not_spoil_the_others(
    change: dict[str, object],
) -> None:
    (good,) = to_document({"n3": (failure(1.0),)})["n3"]
    found, problems = from_document({"n3": [{**good, **change}, good]}, now=NOW)
    assert found == {"n3": (failure(1.0),)}
    assert len(problems) == 1 and problems[0].startswith("n3: ")


def test_a_failure_in_the_near_future_counts_as_happening_now() -> None:
    found, problems = from_document(to_document({"n3": (failure(-0.5),)}), now=NOW)
    assert found == {"n3": (failure(),)} and problems == ()
