"""The two stores of nodes' failures, a ConfigMap and a file, keep the same promises."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from fake_api import FakeApi

from holdfast_cli.local import node_record as of_files
from holdfast_core.node_failures import CLEAN, FailureKind, NodeFailure, Rating
from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import CONFIG_MAPS, Resource
from holdfast_operator.kube.cluster.node_record import HALF_LIFE_ANNOTATION, NodeRecord

NAMESPACE, NAME = "hf", "holdfast-nodes"


class Store(ABC):
    """A store, and writers that share it."""

    @abstractmethod
    def writer(self) -> object:
        """A writer that knows nothing yet."""

    @abstractmethod
    def note(self, writer: object, node: str, failure: NodeFailure) -> None: ...

    @abstractmethod
    def synchronise(self, writer: object) -> None: ...

    @abstractmethod
    def rating(self, writer: object, node: str) -> Rating: ...

    @abstractmethod
    def write_raw(self, document: object) -> None:
        """Write as somebody else."""

    @abstractmethod
    def raw(self) -> dict[str, object]: ...

    @abstractmethod
    def breaks(self) -> None:
        """Refuse the next synchronisation."""


class ConfigMapStore(Store):
    def __init__(self, path: Path) -> None:
        self.api = FakeApi()
        self.api.put(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": NAMESPACE}})

    def writer(self) -> NodeRecord:
        return NodeRecord(self.api, namespace=NAMESPACE, name=NAME, wall=time.time)

    def note(self, writer: object, node: str, failure: NodeFailure) -> None:
        assert isinstance(writer, NodeRecord)
        writer.note([(node, failure)])

    def synchronise(self, writer: object) -> None:
        assert isinstance(writer, NodeRecord)
        asyncio.run(writer.synchronise())

    def rating(self, writer: object, node: str) -> Rating:
        assert isinstance(writer, NodeRecord)
        return writer.rating(node)

    def write_raw(self, document: object) -> None:
        body = self.api.objects[CONFIG_MAPS.plural, NAMESPACE, NAME]
        data = document if isinstance(document, dict) else {"all": document}
        texts = {node: json.dumps(value) for node, value in data.items()}
        self.api.put(CONFIG_MAPS, {**body, "data": texts})

    def raw(self) -> dict[str, object]:
        data = self.api.objects[CONFIG_MAPS.plural, NAMESPACE, NAME].get("data") or {}
        return {node: json.loads(text) for node, text in data.items()}

    def breaks(self) -> None:
        self.api.refuse = ApiError("overloaded", status=503)


class FileStore(Store):
    def __init__(self, path: Path) -> None:
        self.path = path / "run" / "node-failures.json"
        self.path.parent.mkdir()

    def writer(self) -> of_files.NodeRecord:
        return of_files.NodeRecord(self.path)

    def note(self, writer: object, node: str, failure: NodeFailure) -> None:
        assert isinstance(writer, of_files.NodeRecord)
        writer.note([(node, failure)])

    def synchronise(self, writer: object) -> None:
        assert isinstance(writer, of_files.NodeRecord)
        if not self.path.parent.exists():
            assert "No such file" in writer.synchronise()
            self.path.parent.with_suffix(".away").rename(self.path.parent)
        else:
            writer.synchronise()

    def rating(self, writer: object, node: str) -> Rating:
        assert isinstance(writer, of_files.NodeRecord)
        return writer.rating(node)

    def write_raw(self, document: object) -> None:
        self.path.unlink(missing_ok=True)
        self.path.write_text(json.dumps(document), encoding="utf-8")

    def raw(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.path.read_text(encoding="utf-8"))
        return found

    def breaks(self) -> None:
        self.path.parent.rename(self.path.parent.with_suffix(".away"))


@pytest.fixture(params=[ConfigMapStore, FileStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made: Store = request.param(tmp_path)
    return made


def failure(epoch: int = 1, *, kind: FailureKind = FailureKind.LOST_RANK) -> NodeFailure:
    return NodeFailure(kind=kind, job="team.moe", epoch=epoch, at=time.time())


def test_the_next_process_knows_what_this_one_noted(store: Store) -> None:
    first = store.writer()
    store.note(first, "n3", failure())
    assert store.rating(first, "n3").score == pytest.approx(1.0), "at once"
    store.synchronise(first)
    second = store.writer()
    assert store.rating(second, "n3") == CLEAN
    store.synchronise(second)
    assert store.rating(second, "n3").text == "1 failure in 1 minute"


def test_what_two_writers_noted_is_merged(store: Store) -> None:
    first, second = store.writer(), store.writer()
    store.synchronise(first)
    store.synchronise(second)
    store.note(first, "n1", failure())
    store.note(second, "n1", failure(2))
    store.note(second, "n2", failure())
    for writer in (first, second, first):
        store.synchronise(writer)
    for writer in (first, second):
        assert store.rating(writer, "n1").text == "2 failures in 1 minute"
        assert store.rating(writer, "n2").text == "1 failure in 1 minute"


def test_what_somebody_removed_does_not_come_back(store: Store) -> None:
    writer = store.writer()
    store.note(writer, "n1", failure())
    store.note(writer, "n2", failure())
    store.synchronise(writer)
    store.write_raw({node: found for node, found in store.raw().items() if node != "n1"})
    store.synchronise(writer)
    assert store.rating(writer, "n1") == CLEAN
    store.note(writer, "n2", failure(2))
    store.synchronise(writer)
    assert set(store.raw()) == {"n2"}


@pytest.mark.parametrize("garbage", [["n1"], 7, {"n1": "bad", "n2": [{"kind": "Sabotage"}]}])
def test_garbage_is_ignored_and_replaced_by_the_next_failure(store: Store, garbage: object) -> None:
    writer = store.writer()
    store.write_raw(garbage)
    store.synchronise(writer)
    assert store.rating(writer, "n1") == store.rating(writer, "n2") == CLEAN
    store.note(writer, "n2", failure())
    store.synchronise(writer)
    assert list(store.raw()) == ["n2"]


def test_a_write_that_fails_is_made_up_for_later(store: Store) -> None:
    writer = store.writer()
    store.synchronise(writer)
    store.note(writer, "n3", failure())
    store.breaks()
    store.synchronise(writer)
    assert store.rating(writer, "n3").score == pytest.approx(1.0)
    store.synchronise(writer)
    assert set(store.raw()) == {"n3"}


def test_nothing_is_written_when_nothing_is_new(store: Store) -> None:
    writer = store.writer()
    store.write_raw({"n3": "garbage"})
    store.synchronise(writer)
    store.synchronise(writer)
    assert store.raw() == {"n3": "garbage"}


def test_a_config_map_that_changes_between_reading_and_writing_keeps_both_failures() -> None:
    class Contended(FakeApi):
        """Somebody else writes right before each of the first two writes."""

        contended = 2

        async def replace(self, resource, namespace, body, subresource=""):  # type: ignore[no-untyped-def]
            if self.contended:
                self.contended -= 1
                other = NodeRecord(self, namespace=NAMESPACE, name=NAME, wall=time.time)
                other.note([(f"other-{self.contended}", failure())])
                contended, self.contended = self.contended, 0
                await other.synchronise()
                self.contended = contended
            return await super().replace(resource, namespace, body, subresource)

    api = Contended()
    annotations = {HALF_LIFE_ANNOTATION: "12", "theirs": "kept"}
    metadata = {"name": NAME, "namespace": NAMESPACE, "annotations": annotations}
    api.put(CONFIG_MAPS, {"metadata": metadata})
    record = NodeRecord(api, namespace=NAMESPACE, name=NAME, wall=time.time)
    record.note([("mine", failure())])
    asyncio.run(record.synchronise())
    body = api.objects[CONFIG_MAPS.plural, NAMESPACE, NAME]
    assert set(body["data"]) == {"mine", "other-0", "other-1"}
    assert body["metadata"]["annotations"] == annotations


@pytest.mark.parametrize(
    ("text", "hours"), [("12", 12.0), ("", 48.0), ("nan", 48.0), ("-1", 48.0), ("often", 48.0)]
)
def test_the_half_life_is_what_the_config_map_says(text: str, hours: float) -> None:
    api = FakeApi()
    metadata = {"name": NAME, "namespace": NAMESPACE, "annotations": {HALF_LIFE_ANNOTATION: text}}
    api.put(CONFIG_MAPS, {"metadata": metadata})
    now = [1.7e9]
    record = NodeRecord(api, namespace=NAMESPACE, name=NAME, wall=lambda: now[0])
    found = NodeFailure(kind=FailureKind.LOST_NODE, job="team.moe", epoch=1, at=now[0])
    record.note([("n3", found)])
    asyncio.run(record.synchronise())
    now[0] += hours * 3600.0
    assert record.rating("n3").score == pytest.approx(1.0)


def test_what_is_wrong_with_the_config_map_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi()
    record = NodeRecord(api, namespace=NAMESPACE, name=NAME, wall=time.time)
    for _ in range(3):
        asyncio.run(record.synchronise())
    api.put(
        CONFIG_MAPS,
        {"metadata": {"name": NAME, "namespace": NAMESPACE}, "data": {"n1": "{", "n2": "7"}},
    )
    for _ in range(3):
        asyncio.run(record.synchronise())
    assert [each.getMessage() for each in caplog.records] == [
        "the record of nodes' failures, ConfigMap holdfast-nodes: not there; nothing depends on it",
        "the record of nodes' failures, ConfigMap holdfast-nodes: ignoring what is no record: "
        "n1: no list of failures (and 1 more); nothing depends on it",
    ]


def test_an_answer_that_is_no_config_map_does_not_end_the_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Proxied(FakeApi):
        async def get(self, resource: Resource, namespace: str, name: str) -> Object:
            return {}

    async def run() -> None:
        record = NodeRecord(Proxied(), namespace=NAMESPACE, name=NAME, wall=time.time)
        task = asyncio.create_task(record.run())
        while not caplog.records:
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(run())
    assert "is left as it is" in caplog.text


@pytest.mark.parametrize("data", [b"\xff", b"{", b"[" * 200_000, b" " * ((1 << 20) + 1)])
def test_a_file_that_is_no_record_is_ignored_and_reported_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "node-failures.json"
    path.write_bytes(data)
    record = of_files.NodeRecord(path)
    assert record.synchronise() != ""
    assert record.synchronise() == ""
    assert record.rating("n1") == CLEAN
    record.note([("n1", failure())])
    record.synchronise()
    assert set(json.loads(path.read_text(encoding="utf-8"))) == {"n1"}
