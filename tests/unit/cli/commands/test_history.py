"""What `holdfast history` shows."""

from __future__ import annotations

from io import StringIO

import numpy as np
from matplotlib.patches import Rectangle
from rich.console import Console

from holdfast_cli.commands.history import as_json, history_view, stacks_in
from holdfast_cli.commands.history_plot import draw_history
from holdfast_cli.commands.recorded_recoveries import history_of
from holdfast_core.catalogue.records import EventView

EVENTS: tuple[tuple[str, int, float, dict[str, object]], ...] = (
    ("epoch_began", 1, 100.0, {}),
    ("session_opened", 1, 102.0, {"rank": 0}),
    ("rank_lost", 1, 200.0, {"rank": 0}),
    ("epoch_began", 2, 200.5, {}),
    ("line", 2, 201.0, {"generation": "1.4"}),
    ("session_opened", 2, 203.0, {"rank": 0}),
    ("rank_lost", 2, 300.0, {"rank": 0}),
    ("epoch_began", 3, 300.5, {}),
    ("went_live", 3, 300.5, {"rank": 1}),
    ("session_opened", 3, 301.0, {"rank": 1, "stayed": True}),
)
HISTORY = history_of(
    EventView(id=str(at), event={"event": name, "epoch": epoch, "time": at, **others})
    for name, epoch, at, others in EVENTS
)


def test_each_recovery_has_a_line_with_the_seconds_of_its_stages() -> None:
    out = StringIO()
    Console(file=out, width=200).print(history_view("team.moe", HISTORY))
    head, _, *recoveries = out.getvalue().splitlines()
    start, restarted, live, *_ = [each.split()[2:] for each in recoveries]
    assert head.split() == ["team.moe", "2", "recoveries"]
    assert start == ["1", "(start)", "-", "0.0", "-", "-", "2.0", "-", "-", "-"]
    assert restarted == ["2", "rank", "0", "-", "0.5", "1.0", "-", "3.0", "-", "1.4", "-"]
    assert live == ["3", "rank", "0", "1", "0.5", "-", "-", "1.0", "-", "live", "-"]
    marks = [(each["live"], each["stayed"]) for each in as_json("team.moe", HISTORY)["recoveries"]]
    assert marks == [(False, []), (False, []), (True, [1])]


def test_the_picture_has_a_bar_for_each_stage_that_took_time() -> None:
    stages, over_time = draw_history(HISTORY, title="team.moe").axes
    widths = [
        round(bar.get_width(), 3)
        for bar in stages.patches
        if isinstance(bar, Rectangle) and bar.get_width() > 0
    ]
    assert widths == [2.0, 0.5, 0.5, 2.0, 0.5, 0.5]
    assert np.asarray(over_time.lines[0].get_ydata()).tolist() == [0, 1, 2]


def test_the_stacks_of_an_inspection_have_a_line_for_each_rank() -> None:
    inspected = {"event": "inspected", "epoch": 2, "time": 1500.0, "rank": 3}
    seen = [
        EventView(id="1", event={"event": "epoch_began", "epoch": 2, "time": 1.0}),
        EventView(id="2", event={**inspected, "detail": "state S; load (data.py:3)"}),
        EventView(id="3", event={"event": "inspected"}),
    ]
    first, second = stacks_in(seen)
    assert first.endswith("  epoch 2  rank 3  state S; load (data.py:3)")
    assert second.startswith("at a time unknown")
