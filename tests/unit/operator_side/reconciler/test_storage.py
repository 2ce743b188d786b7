"""What durable storage changes for the control loop: epochs, what it says, what it begins from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from virtual_world import World, make_job, running

from holdfast_core.job.locations import StorageLocation
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_operator.reconciler.observe.views import ConditionType, JobView, NodeView

STORED: dict[str, Any] = {"persistence": {"uri": "s3://bucket/run1", "keep": 2}}


class StoredWorld(World):
    """Daemons that have looked into storage; before epoch 8 they report `reported` of it."""

    reported: dict[str, Any] = {}  # noqa: RUF012

    def node_view(self, name: str) -> NodeView:
        view = super().node_view(name)
        job = view.job
        if job is None or job.epoch >= 8:
            return view
        changed: JobView = msgspec.structs.replace(job, **self.reported)
        return msgspec.structs.replace(view, job=changed)


def world(**reported: Any) -> StoredWorld:
    made = StoredWorld(make_job(spec=STORED))
    made.reported = reported
    return made


def test_the_membership_has_the_location_of_copies() -> None:
    tier = running(make_job(spec=STORED)).membership.tier
    assert tier is not None
    assert (tier.uri, tier.keep) == ("s3://bucket/run1", 2)
    assert running().membership.tier is None


def test_a_job_of_a_known_name_begins_after_the_epochs_in_storage_and_counts_no_failure() -> None:
    made = world(stored_epoch=7, line=None)
    made.settle(2.0)
    assert made.membership.epoch == 8
    assert made.state.recoveries == 0
    assert made.state.restarts == ()
    assert [e.message for e in made.events if e.reason == "EarlierRun"] == [
        "storage holds generations of an earlier run up to epoch 7; epoch 8 begins"
    ]


def test_storage_that_cannot_be_read_is_a_condition_and_ends_nothing() -> None:
    made = world(storage_problem="storage cannot be read: refused", line=None)
    made.settle(120.0)
    assert made.state.outcome is None
    assert made.membership.epoch == 1
    found = {c.type: c for c in made.decision.conditions}
    condition = found[ConditionType.STORAGE_REACHABLE]
    assert (condition.status, condition.message) == (False, "storage cannot be read: refused")


def test_what_is_in_storage_is_a_condition_and_so_is_a_copy_that_was_given_up() -> None:
    made = world()
    made.settle(2.0)
    assert _persisted(made) == (False, "NotYet", "nothing is in storage yet")
    made.reported = {"persisted": Generation(1, 40)}
    made.settle(1.0)
    there = "generation 1.40 is in s3://bucket/run1"
    assert _persisted(made) == (True, "InStorage", there)
    made.reported |= {"persist_failure": "no space left"}
    made.settle(1.0)
    given_up = f"{there}; the newest copy was given up: no space left"
    assert _persisted(made) == (False, "Failing", given_up)


def _persisted(made: World) -> tuple[bool | None, str, str]:
    found = {c.type: c for c in made.decision.conditions}[ConditionType.PERSISTED]
    return found.status, found.reason, found.message


def test_jobs_without_copies_have_no_such_condition() -> None:
    made = running()
    found = {c.type for c in made.decision.conditions}
    assert not found & {ConditionType.STORAGE_REACHABLE, ConditionType.PERSISTED}


def test_the_chosen_copy_counts_until_the_job_has_begun() -> None:
    chosen = {**STORED, "restore": {"from": "3.1200"}}
    made = StoredWorld(make_job(spec=chosen))
    made.reported = {"stored_epoch": 7, "line": None}
    made.settle(2.0)
    assert made.membership.tier is not None
    assert (made.membership.epoch, made.membership.tier.restore_from) == (8, "3.1200")
    made.reported = {"line": Line(generation=None, reason="")}
    made.train(5)
    made.settle(1.0)
    made.kill_node("n0")
    made.settle(10.0)
    assert made.membership.epoch == 9
    assert made.membership.tier.restore_from == ""


def test_the_next_epoch_names_the_newest_copy() -> None:
    made = StoredWorld(make_job(spec=STORED))
    made.settle(1.0)
    made.train(40)
    made.settle(1.0)
    assert _newest_copy(made) == ""
    made.reported = {"persisted": Generation(1, 40)}
    made.settle(1.0)
    assert _newest_copy(made) == ""  # the epoch goes on as it began
    made.lose_rank(0)
    made.settle(1.0)
    assert (made.membership.epoch, _newest_copy(made)) == (2, "1.40")


def test_a_restarted_cluster_still_names_the_newest_copy() -> None:
    made = running(make_job(spec=STORED))
    stored = StoredWorld(made.job)
    stored.reported = {"persisted": Generation(1, 40)}
    stored.settle(2.0)
    again = World(made.job)
    again.restart(stored.stored())
    again.settle(2.0)
    assert again.membership.epoch > 1
    assert _newest_copy(again) == "1.40"


def test_copies_in_another_storage_are_not_expected_in_this_one() -> None:
    made = StoredWorld(make_job(spec=STORED))
    made.reported = {"persisted": Generation(1, 40)}
    made.settle(2.0)
    made.job = make_job(spec={"persistence": {"uri": "s3://bucket/other"}})
    for epoch in (2, 3):
        made.lose_rank(0)
        made.settle(2.0)
        tier = made.membership.tier
        assert tier is not None
        assert (made.membership.epoch, tier.uri, tier.persisted) == (epoch, "s3://bucket/other", "")
    made.reported = {"persisted": Generation(3, 10)}
    made.settle(1.0)
    made.lose_rank(0)
    made.settle(2.0)
    assert _newest_copy(made) == "3.10"


def _newest_copy(made: World) -> str:
    tier = made.membership.tier
    assert tier is not None
    return tier.persisted


# --- locations that the platform team allows ----------------------------------------------------

ALLOWED = (StorageLocation(prefix="s3://bucket/{namespace}"),)
WORDS = (
    "is in no storage location that the platform team allows. Namespace default may use "
    "s3://bucket/default: choose one, or ask the platform team to add it to persistence.locations "
    "of Holdfast's chart"
)


def stored_in(uri: str) -> MoETrainingJob:
    return make_job(spec={"persistence": {"uri": uri}})


def test_a_job_outside_all_locations_is_not_placed_and_names_the_allowed_ones() -> None:
    made = World(stored_in("s3://bucket/other"))
    made.locations = ALLOWED
    made.settle(60.0)
    assert made.actions == []
    assert made.condition("Scheduled") == (
        False,
        "StorageNotAllowed",
        f"spec.persistence.uri = 's3://bucket/other' {WORDS}",
    )
    made.job = stored_in("s3://bucket/default/run1")
    made.settle(1.0)
    assert made.phase() == "Running"
    tier = made.membership.tier
    assert tier is not None and tier.uri == "s3://bucket/default/run1"


def test_with_an_empty_list_no_job_persists_and_others_run() -> None:
    made = World(stored_in("/mnt/shared"))
    made.locations = ()
    made.settle(5.0)
    _, reason, message = made.condition("Scheduled")
    assert (made.actions, reason) == ([], "StorageNotAllowed")
    assert "Namespace default has none: ask the platform team" in message
    made.job = make_job()
    made.settle(1.0)
    assert made.phase() == "Running"


@pytest.mark.parametrize("before", ["s3://bucket/default", None])
def test_a_running_job_does_not_get_out_of_its_locations_by_an_edit(before: str | None) -> None:
    made = World(stored_in(before) if before else make_job())
    made.locations = ALLOWED
    made.settle(2.0)
    made.job = stored_in("s3://theirs")
    made.lose_rank(0)
    made.settle(2.0)
    assert (made.membership.epoch, made.phase()) == (2, "Running")
    tier = made.membership.tier
    assert (tier.uri if tier else None) == before
    status, reason, message = _persisted(made)
    assert (status, reason) == (False, "NotAllowed")
    assert message.endswith(f"spec.persistence.uri = 's3://theirs' {WORDS}")
