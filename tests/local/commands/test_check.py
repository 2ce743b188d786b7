"""`holdfast check` of real scripts in real processes: those of its page, and all that can go wrong.

    python tests/local/commands/test_check.py

writes what the scripts of the page print now into the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.processes import marked_processes

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "checking.md"
WAIT_S = 400.0
RUN = re.compile(r"(?ms)^```python\n(.*?)^```$.*?^```\n(captured\n.*?)\n```$")
"""A script of the page, and its report."""

BEGIN = """
import sys, torch, holdfast
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = """
start = session.restore() or 0
for step in range(start + 1, 100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    AFTER_STEP
    session.save(step)
"""
SESSION = "session = holdfast.init(model=model, optimizer=optimizer)"


def check(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Check a script in a folder as a user does."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "holdfast_cli.main", "check", *options, "train.py"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def loop(session: str = SESSION, after_step: str = "pass") -> str:
    return BEGIN + session + LOOP.replace("AFTER_STEP", after_step)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "code"), [(0, 1), (1, 0)], ids=["forgets", "comes-back"])
def test_the_page_shows_what_is_printed(number: int, code: int, tmp_path: Path) -> None:
    runs = RUN.findall(PAGE.read_text(encoding="utf-8"))
    assert len(runs) == 2
    script, report = runs[number]
    checked = check(tmp_path, script)
    assert checked.returncode == code, checked.stderr
    assert checked.stdout.strip() == report.strip(), "run python tests/local/commands/test_check.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_whose_objects_are_forgotten_are_told_which(tmp_path: Path) -> None:
    """The second process of each rank differs by what no session knows, and by nothing else."""
    script = """
import torch, torch.distributed as dist, holdfast

class Noise:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    critic, teacher, noise = torch.nn.Linear(8, 1), torch.nn.Linear(8, 8), Noise()
    optimizer = torch.optim.SGD(model.parameters())
    second = torch.optim.Adam(critic.parameters())
    session = holdfast.init(
        model=model, optimizer=optimizer, topology=holdfast.Topology(dp=dist.get_world_size())
    )
    for step in session.steps(100):
        with step:
            optimizer.zero_grad()
            second.zero_grad()
            scale = torch.rand(1, generator=noise.generator)
            (critic(model(torch.full((4, 8), float(step)))) * scale).sum().backward()
            teacher(torch.ones(4, 8))
            optimizer.step()
            second.step()

main()
"""
    checked = check(tmp_path, script, "--processes", "2", "--json")
    assert checked.returncode == 1, checked.stderr
    report = json.loads(checked.stdout)
    assert (report["comesBack"], report["step"], report["processes"]) == (False, 1, 2)
    assert report["notCaptured"]["changed"] == [
        "module critic of main() (Linear)",
        "optimizer second of main() (Adam)",
        "generator noise.generator of main() (Generator)",
    ]
    assert report["notCaptured"]["same"] == ["module teacher of main() (Linear)"]
    assert report["sameData"] is True


REFUSED = {
    "never-initialised": (
        BEGIN + "while True:\n    model(torch.ones(1, 8)).sum().backward()\n    optimizer.step()\n",
        "holdfast.init was not called: call it before the training loop",
    ),
    "never-saved": (
        BEGIN + SESSION + "\nmodel(torch.ones(1, 8)).sum().backward()\noptimizer.step()\n",
        "train.py ended before its save number 1 was protected: there is a session, but "
        "session.save was not called",
    ),
    "raises": (
        BEGIN + SESSION + '\nraise ValueError("no data")\n',
        "the script raised ValueError: no data; train.py has to train on this machine",
    ),
    "ends-after-the-save": (
        loop().replace("100)", "2)"),
        "train.py ended after the save of step 1, before it had made one more step",
    ),
    "refused": (
        loop(
            "session = holdfast.init(model=model, optimizer=optimizer, "
            'stateful={"mine": type("T", (), {"state_dict": lambda self: object(), '
            '"load_state_dict": print})()})'
        ),
        "save(1) failed: ",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", REFUSED)
def test_a_script_that_cannot_be_checked_is_told_what_to_do(case: str, tmp_path: Path) -> None:
    script, message = REFUSED[case]
    checked = check(tmp_path, script)
    assert checked.returncode == 2, checked.stderr
    assert f"holdfast: {message}" in checked.stderr
    assert not checked.stdout
    if case == "raises":
        assert 'train.py", line' in checked.stderr


DIFFERS = {
    "no-restore": (
        loop().replace("session.restore() or 0", "0"),
        "called save(1) without having restored",
    ),
    "raises-after-the-restart": (
        loop(after_step="assert step == start + 1 == 1 or start == 0, 'no way back'"),
        "after the restart the script raised AssertionError: no way back",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", DIFFERS)
def test_a_second_process_that_does_not_go_on_has_not_come_back(case: str, tmp_path: Path) -> None:
    script, message = DIFFERS[case]
    checked = check(tmp_path, script)
    assert checked.returncode == 1, checked.stderr
    assert message in checked.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = BEGIN + SESSION + "\nimport time\ntime.sleep(1000)\n"
    checked = check(tmp_path, script, "--timeout", "20")
    assert checked.returncode == 2
    assert "within --timeout 20 s" in checked.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_check_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEGIN + SESSION + "\nimport time\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "holdfast_cli.main", "check", "train.py"]
    checking = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True
    )
    try:
        runs = wait_for("a run", lambda: [*tmp_path.glob("holdfast-check-*/run")], WAIT_S)
        directory = RunDirectory(runs[0], "default.check")
        wait_for(
            "the daemon, the launcher and the script",
            lambda: len(marked_processes(directory.mark())) >= 3,
            WAIT_S,
        )
        assert directory.memory.exists()
    finally:
        os.killpg(checking.pid, signal.SIGKILL)
        checking.wait()
    wait_for(
        "the end of all of it",
        lambda: not (runs[0].parent.exists() or directory.memory.exists()),
        WAIT_S,
    )
    assert not marked_processes(directory.mark())


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_script_that_saves_seldom_is_compared_before_its_next_step(tmp_path: Path) -> None:
    script = loop().replace("session.save(step)", "step % 5 or session.save(step)")
    checked = check(tmp_path, script, "--save", "2", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["step"] == 10


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_the_examples_of_frameworks_come_back(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"train_{name}.py"
    command = [sys.executable, "-m", "holdfast_cli.main", "check", "--processes", "2", str(script)]
    checked = subprocess.run(
        [*command, "--steps", "30"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def renewed() -> str:
    """The page with what its scripts print now."""
    import tempfile

    text = PAGE.read_text(encoding="utf-8")
    for script, report in RUN.findall(text):
        with tempfile.TemporaryDirectory() as folder:
            text = text.replace(report, check(Path(folder), script).stdout.strip())
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(), encoding="utf-8")
