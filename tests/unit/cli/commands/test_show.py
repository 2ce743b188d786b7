"""What `holdfast status` prints of a local run."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from holdfast_cli.commands.show import event_line, status_view
from holdfast_cli.local.status import LocalMemberStatus, NodeStatus, Status, TimedEvent
from holdfast_core.job.status import Phase, RecoveryMode
from holdfast_operator.reconciler.observe.last_failure import TrainerFailure
from holdfast_operator.reconciler.observe.views import Condition, ConditionType


def test_each_node_shows_its_slots_and_what_it_fetches_for_parity() -> None:
    member = LocalMemberStatus(
        index=0,
        node="n0",
        agent="running",
        exit_code=None,
        epoch=1,
        ranks=(),
        complete="",
        arena_bytes=0,
        parity_bytes=0,
        protection_bytes_s=42.4e6,
        slots=2,
        skipped=0,
        failed=0,
        rebuilding=False,
        problem="",
    )
    nodes = tuple(
        NodeStatus(
            name=name,
            role=role,
            connected=True,
            host="h",
            root="",
            socket="",
            daemon_pid=1,
            incarnation=1,
            memory_used_bytes=0,
            memory_budget_bytes=0,
        )
        for name, role in (("n0", "member 0"), ("n1", "spare"))
    )
    status = Status(
        job="default.job", time=0.0, pid=1, directory="", phase=Phase.RUNNING, reason="", epoch=1,
        revision=0, world_size=1, step=5, line="", line_reason="", complete="", protected="",
        restarts=0, recovery_mode=RecoveryMode.IN_PLACE, members=(member,), nodes=nodes,
    )  # fmt: skip
    out = StringIO()
    Console(file=out, width=200).print(status_view(status))
    assert "restarts 0  recovery InPlace" in out.getvalue()
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("node", "n0", "n1"))]
    assert [line.split()[-6:] for line in lines] == [
        ["slots", "arenas", "parity", "fetched", "for", "parity"],
        ["0.000", "GiB", "0.000", "GiB", "42", "MB/s"],
        ["GiB", "0.000", "GiB", "-", "-", "-", "-"][-6:],
    ]
    assert lines[1].split()[-7] == "2"


def test_a_failed_run_shows_the_last_lines_as_they_are() -> None:
    lines = "Traceback:\n[/red] ValueError"  # no markup, whatever it looks like
    failed = Condition(type=ConditionType.FAILED, status=True, reason="X", message=lines)
    status = Status(
        job="default.job", time=0.0, pid=1, directory="", phase=Phase.FAILED, reason=lines, epoch=3,
        revision=0, world_size=1, step=0, line="", line_reason="", complete="", protected="",
        restarts=2, conditions=(failed,),
        failure=TrainerFailure(epoch=3, member=0, text="rank 0 failed", last_lines=lines),
    )  # fmt: skip
    out = StringIO()
    Console(file=out, width=200).print(status_view(status))
    assert (
        "last failure: rank 0 failed, and wrote last:\n    Traceback:\n    [/red] ValueError"
        in (out.getvalue())
    )


def test_lines_of_an_event_are_indented() -> None:
    event = TimedEvent(time=0.0, reason="LastLines", message="why:\nfirst\nsecond")
    assert event_line(event).endswith("why:\n    first\n    second")


def test_a_member_of_which_nothing_is_known_any_more_has_ended_with_its_job() -> None:
    member = LocalMemberStatus(
        index=0, node="n0", agent="absent", exit_code=None, epoch=0, ranks=(), complete="",
        arena_bytes=0, parity_bytes=0, skipped=0, failed=0, rebuilding=False, problem="",
    )  # fmt: skip
    for phase, words in ((Phase.COMPLETE, "ended"), (Phase.RUNNING, "no report from its daemon")):
        status = Status(
            job="default.job", time=0.0, pid=1, directory="", phase=phase, reason="", epoch=1,
            revision=0, world_size=1, step=5, line="", line_reason="", complete="", protected="",
            restarts=0, members=(member,),
        )  # fmt: skip
        out = StringIO()
        Console(file=out, width=200).print(status_view(status))
        assert words in out.getvalue()
