"""Log lines: JSON for machines, text for people, one line per cause."""

import datetime
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.logs import BoundLogger, OncePerCause, bind, configure

LOGGER = logging.getLogger("holdfast_daemon.test_logs")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "daemon.log"
    root = logging.getLogger()
    level = root.level
    handler = configure("info", path)
    yield path
    root.removeHandler(handler)
    handler.close()
    root.setLevel(level)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_carries_time_level_event_and_the_fields(file: Path) -> None:
    log = bind(bind(LOGGER, job="moe", epoch=2), rank=3)
    log.warning("save_skipped", cause="no_free_slot", generation=Generation(2, 7))

    (line,) = lines(file)
    moment = datetime.datetime.fromisoformat(str(line.pop("time")))
    assert moment.utcoffset() == datetime.timedelta(0)
    assert line == {
        "level": "warning",
        "event": "save_skipped",
        "logger": LOGGER.name,
        "job": "moe",
        "epoch": 2,
        "rank": 3,
        "cause": "no_free_slot",
        "generation": "2.7",
    }


def test_a_field_cannot_hide_the_event_or_the_time(file: Path) -> None:
    bind(LOGGER, event="other", time=0).info("started")
    (line,) = lines(file)
    assert (line["event"], line["event_"], line["time_"]) == ("started", "other", 0)


def test_an_exception_becomes_part_of_its_line(file: Path) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        bind(LOGGER, job="moe").error("failed", exc_info=True)
    (line,) = lines(file)
    assert "ValueError: two\nlines" in str(line["error"])


def test_lines_of_other_libraries_are_formatted_too(file: Path) -> None:
    logging.getLogger("redis").warning("lost %d connections", 2)
    assert lines(file)[0]["event"] == "lost 2 connections"


def test_lines_below_the_level_are_left_out_and_configuring_again_replaces(file: Path) -> None:
    bind(LOGGER).debug("hidden")
    other = file.with_suffix(".text")
    handler = configure("debug", other, format="text")
    try:
        bind(LOGGER, rank=1).debug("seen")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert file.read_text() == ""
    assert other.read_text().split()[1:] == ["debug", "seen", "rank=1"]


def test_an_unknown_level_or_format_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        configure("loud")
    with pytest.raises(ValueError, match="'xml'"):
        configure("info", format="xml")  # type: ignore[arg-type]


def test_a_repeated_cause_is_logged_at_powers_of_ten(file: Path) -> None:
    once = OncePerCause(BoundLogger(LOGGER, {}))
    for _ in range(123):
        once.warning("save_failed", cause="storage", rank=0)
    assert once.warning("save_failed", cause="corrupt", rank=0) == 1
    assert [(line["cause"], line["count"]) for line in lines(file)] == [
        ("storage", 1),
        ("storage", 10),
        ("storage", 100),
        ("corrupt", 1),
    ]
    once.forget("save_failed")
    assert once.warning("save_failed", cause="storage", rank=0) == 1
