"""What a job's events tell of its recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast_cli.commands.recorded_recoveries import History, RecoveryStage, history_of
from holdfast_core.catalogue.records import EventView
from holdfast_core.experts.loss_reports import RecoveryLoss
from holdfast_core.snapshots.generations import Generation

LOSS = RecoveryLoss(
    epoch=2,
    step=7,
    lost_tokens=10,
    plt=0.01,
    mlt=0.02,
    k_before=1,
    k_after=2,
    total_tokens=10,
    total_plt=0.01,
    total_mlt=0.02,
)


Event = tuple[float, str, int, dict[str, Any]]


def history(*events: Event) -> History:
    """Of events (time, name, epoch, other fields)."""

    def views() -> Iterator[EventView]:
        for number, (time, name, epoch, others) in enumerate(events):
            event = {"event": name, "time": time, "epoch": epoch, **others}
            yield EventView(id=str(number), event=event)

    return history_of(views())


START: list[Event] = [
    (100.0, "epoch_began", 1, {"node": "a"}),
    (101.0, "epoch_began", 1, {"node": "b"}),
    (101.5, "line", 1, {"detail": "fresh"}),
    (103.0, "session_opened", 1, {"rank": 0}),
    (104.0, "session_opened", 1, {"rank": 1}),
]
RECOVERY: list[Event] = [
    (200.0, "rank_lost", 1, {"rank": 1}),
    (200.5, "rank_lost", 1, {"rank": 0}),
    (201.0, "epoch_began", 2, {"node": "a"}),
    (202.0, "epoch_began", 2, {"node": "c"}),
    (202.5, "line", 2, {"generation": "1.7", "detail": "everything is there"}),
    (204.0, "rebuilt", 2, {"rank": 1}),
    (205.0, "went_live", 2, {"rank": 0}),
    (206.0, "session_opened", 2, {"rank": 0, "stayed": True}),
    (207.0, "session_opened", 2, {"rank": 1}),
    (207.5, "tokens_lost", 2, {"loss": LOSS.to_dict()}),
    (210.0, "protected", 2, {"generation": "2.8"}),
    (211.0, "protected", 2, {"generation": "2.8"}),
]


def test_a_recovery_lasts_from_the_first_loss_to_the_last_that_reached_each_stage() -> None:
    start, recovery = history(*START, *RECOVERY).recoveries
    assert start.is_start and start.line is None and start.reason == "fresh"
    assert start.seconds(RecoveryStage.AT_WORK) == 4.0
    assert {stage: recovery.seconds(stage) for stage in RecoveryStage} == {
        RecoveryStage.EPOCH: 2.0,
        RecoveryStage.LINE: 2.5,
        RecoveryStage.REPAIRED: 4.0,
        RecoveryStage.AT_WORK: 7.0,
        RecoveryStage.PROTECTED: 10.0,
    }
    assert (recovery.line, recovery.lost_ranks) == (Generation(1, 7), [1, 0])
    assert (recovery.rebuilt, recovery.loaded, recovery.loss) == ([1], [], LOSS)
    assert (recovery.live, recovery.stayed) == (True, [0])
    assert (start.live, start.stayed) == (False, [])


def test_a_session_that_opens_later_does_not_prolong_a_recovery_that_is_over() -> None:
    later = (900.0, "session_opened", 2, {"rank": 0})
    *_, recovery = history(*START, *RECOVERY, later).recoveries
    assert recovery.seconds(RecoveryStage.AT_WORK) == 7.0


def test_a_later_job_of_the_same_name_has_a_history_of_its_own() -> None:
    ended = (300.0, "job_ended", 0, {"node": "a"})
    again = [(time + 400, name, epoch, fields) for time, name, epoch, fields in START]
    assert history(*START, ended).ended_at == 300.0
    found = history(*START, *RECOVERY, ended, ended, *again)
    assert [each.epoch for each in found.recoveries] == [1, 2, 1]
    assert found.ended_at is None


def test_what_cannot_be_read_is_left_out_and_what_is_missing_is_unknown() -> None:
    nonsense: list[Any] = [
        (100.0, "eaten", 1, {}),
        ("soon", "epoch_began", 1, {}),
        (float("nan"), "epoch_began", 1, {}),
        (100.0, "epoch_began", "1", {}),
        (100.0, "tokens_lost", 2, {"loss": {"epoch": "x"}}),
        (202.0, "session_opened", 2, {"rank": 0, "stayed": "x"}),
        (202.0, "session_opened", 2, {"stayed": True}),
    ]
    begun = (201.0, "epoch_began", 2, {"node": "a"})
    (recovery,) = history(*nonsense, begun, (202.0, "line", 2, {"generation": "x"})).recoveries
    assert (recovery.line, recovery.loss, recovery.noticed_at) == (None, None, 201.0)
    assert recovery.seconds(RecoveryStage.REPAIRED) is None and recovery.stayed == []


def test_other_events_are_counted() -> None:
    stored = (150.0, "persisted", 1, {"generation": "1.3"})
    assert history(*START, stored, stored).counts == {"persisted": 2}
