"""Events for people, which never hold up the operator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fake_api import FakeApi
from samples import job_resource

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.events import REPEAT_S, WAITING_MAX, Recorder
from holdfast_operator.reconciler.observe.views import Event

LOST = Event(reason="Recovering", message="rank 2 lost", warning=True)


class Desk:
    def __init__(self) -> None:
        self.api, self.now, self.dropped = FakeApi(), 0.0, 0

    def posted(self, *steps: Callable[[Recorder], None]) -> list[Object]:
        """Run `steps` on a recorder, and return the events that it posts."""

        async def run() -> None:
            recorder = Recorder(
                self.api,
                instance="pod",
                clock=lambda: self.now,
                wall=lambda: 1_700_000_000.25,
                on_drop=self._drop,
            )
            for step in steps:
                step(recorder)
            task = asyncio.create_task(recorder.run())
            await recorder.flush(5.0)
            task.cancel()

        asyncio.run(run())
        return [found for key, found in self.api.objects.items() if key[0] == "events"]

    def _drop(self) -> None:
        self.dropped += 1


def post(event: Event) -> Callable[[Recorder], None]:
    return lambda recorder: recorder.post(job_resource(), event)


def test_an_event_about_a_node_is_in_the_default_namespace() -> None:
    metadata = {"name": "n1", "uid": "node-uid", "namespace": ""}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    (event,) = Desk().posted(lambda recorder: recorder.post(node, LOST))
    assert event["metadata"]["namespace"] == "default"
    assert event["regarding"] == {"apiVersion": "v1", "kind": "Node", **metadata}


def test_an_event_regards_its_job() -> None:
    (event,) = Desk().posted(post(LOST))
    assert event["regarding"]["uid"] == "job-uid"
    assert (event["reason"], event["type"], event["note"]) == (
        "Recovering",
        "Warning",
        "rank 2 lost",
    )
    assert event["eventTime"] == "2023-11-14T22:13:20.250000Z"
    assert event["metadata"]["namespace"] == "team"


def test_an_event_can_regard_another_kind_of_object() -> None:
    about = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "d", "namespace": "hf", "uid": "u"},
    }
    (event,) = Desk().posted(lambda recorder: recorder.post(about, LOST))
    assert event["metadata"]["namespace"] == "hf"
    assert event["regarding"]["apiVersion"] == "apps/v1"
    assert event["regarding"]["kind"] == "DaemonSet"


def test_the_same_event_is_posted_at_most_once_per_interval() -> None:
    desk = Desk()

    def later(recorder: Recorder) -> None:
        desk.now += REPEAT_S

    assert len(desk.posted(post(LOST), post(LOST), later, post(LOST))) == 2


def test_a_refused_event_is_counted_and_the_next_is_posted() -> None:
    desk = Desk()
    desk.api.refuse = ApiError("no", status=403)
    other = Event(reason="Running", message="on we go")
    (event,) = desk.posted(post(LOST), post(other))
    assert event["reason"] == "Running"
    assert desk.dropped == 1


def test_events_beyond_the_queue_are_dropped_and_counted() -> None:
    desk = Desk()
    flood = [post(Event(reason="Flood", message=str(i))) for i in range(WAITING_MAX + 5)]
    assert len(desk.posted(*flood)) == WAITING_MAX
    assert desk.dropped == 5


def test_a_note_is_cut_to_the_length_that_the_api_accepts() -> None:
    (event,) = Desk().posted(post(Event(reason="Long", message="x" * 5000)))
    assert len(event["note"].encode()) == 1024
    (event,) = Desk().posted(post(Event(reason="Long", message="ü" * 600)))
    assert 1020 < len(event["note"].encode()) <= 1024  # of UTF-8, which is what the API counts
