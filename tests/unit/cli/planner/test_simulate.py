"""`holdfast simulate`: its tables, pictures and JSON, where inputs come from, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.image import imread
from plan_command import JOB, made_run

from holdfast_cli.main import main

QUICK = ("--runs", "4")
RECOVERY = {
    "stay_node_noticed": 2.1,
    "stay_node_after_noticed": 0.75,
    "restart_node_noticed": 2.2,
    "restart_node_after_noticed": 1.25,
    "stay_fewer_after_noticed": 0.5,
    "targets": {},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["simulate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    try:
        code = main(["simulate", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    return capsys.readouterr().err


def decoded(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    return json.loads(printed(capsys, *arguments, "--json"))


def source_of(document: Any, name: str) -> tuple[str, str]:
    (found,) = (each for each in document["inputs"] if each["name"] == name)
    return found["value"], found["from"]


# --- a job ----------------------------------------------------------------------------------------


def test_a_job_of_any_size_is_simulated_with_every_policy(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(
        capsys, job, "--mtbf", "10m", "--gpus", "16384", "--policies", "all", "--runs", "40"
    )
    assert max(map(len, text.splitlines())) <= 100
    assert "16384 on 8192 nodes" in text
    for policy in (
        "full",
        "partial",
        "selective",
        "fewer",
        "fewer-grads",
        "checkfreq *",
        "stages +",
        "elastic +",
        "sparse +",
    ):
        assert re.search(rf"(?m)^{re.escape(policy)} ", text), policy
    assert "not in this version: shown to compare, never recommended" in text
    count = re.search(r"480 runs and ([\d,]+) events in ([\d.]+) s: ([\d,]+) events a second", text)
    assert count is not None
    assert float(count[2]) < 30  # seconds, not minutes, on any machine


def test_rarer_failures_cost_less_and_bands_enclose_the_mean(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = decoded(capsys, job, "--mtbf", "10m,2h", *QUICK)
    assert list(dict.fromkeys(row["mtbf_s"] for row in document["results"])) == [7200, 600]
    by_policy: dict[str, list[float]] = {}
    for row in document["results"]:
        assert row["low"] <= row["ettr"] <= row["high"]
        assert sum(row["portions"].values()) == pytest.approx(1)
        assert row["portions"]["training"] == pytest.approx(row["ettr"])
        by_policy.setdefault(row["policy"], []).append(row["ettr"])
    assert len(by_policy) == 12
    assert all(rare > frequent for rare, frequent in by_policy.values())


def test_only_what_the_job_can_ask_for_is_recommended(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, job, "--mtbf", "10m", "--spares", "50", *QUICK)
    found = re.search(r"recommended: (\w+):", text)
    assert found is not None
    assert found[1] in {"full", "partial", "selective"}
    assert "fewer and fewer-grads are not recommended" in text
    none = printed(capsys, job, "--policies", "sparse,elastic", *QUICK)
    assert "this job can ask for none of these" in none
    shrinking = JOB.replace("nodes: 4", "nodes: 4\n  minNodes: 2").replace(
        "{dp: 8, ep: 8}", "{dp: 8}"
    )
    job.write_text(shrinking)
    assert "recommended: fewer:" in printed(capsys, job, "--mtbf", "10m", *QUICK)
    job.write_text(JOB.replace("{dp: 8, ep: 8}", "{dp: 8}\n  elastic: {seatsPerRank: 4}"))
    repeats = printed(capsys, job, "--policies", "sparse-global", *QUICK)
    assert "this job can ask for none of these" in repeats
    catches_up = printed(capsys, job, "--policies", "sparse-grads", *QUICK)
    assert "recommended: sparse-grads" in catches_up


def test_a_job_with_experts_in_seats_continues_from_their_copies(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four experts on four nodes, each on two: of the six pairs of nodes, two hold all copies of
    some expert."""
    seats = "{dp: 8}\n  elastic: {seatsPerRank: 1, placement: Recovery}"
    job.write_text(JOB.replace("{dp: 8, ep: 8}", seats).replace("numExperts: 16", "numExperts: 4"))
    # A node is lost every 100 s, and back after 10 s. The job waits for it without minNodes, and
    # goes on after 11 s; it repeats half a step first, and then nine tenths each time.
    trace = job.parent / "trace.csv"
    trace.write_text("".join(f"{at},-1\n{at + 10},1\n" for at in range(105, 900, 100)))
    arguments: list[str | Path] = [
        "--trace",
        trace,
        "--length",
        "1000s",
        "--step-seconds",
        "10",
        "--spares",
        "0",
    ]
    arguments += ["--detect-seconds", "2", "--restart-seconds", "8", "--reform-seconds", "1"]
    arguments += ["--slower-percent", "0", "--expert-bytes", "1M", "--other-bytes", "1M"]
    found = decoded(capsys, job, *arguments, "--policies", "full,elastic", *QUICK)
    assert source_of(found, "experts in seats outlive 1, 2, 3 lost nodes") == (
        "100%, 67%, 0%",
        "the job",
    )
    assert found["as_it_is"]["policy"] == "elastic"
    assert found["as_it_is"]["ettr"] == pytest.approx(0.844)
    assert "minNodes: 3" in {lever["change"] for lever in found["levers"]}
    text = printed(capsys, job, "--spares", "50", "--policies", "full,elastic", *QUICK)
    assert "recommended: elastic:" in text and "a script written for it" not in text


def test_a_trace_is_replayed(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = Path("losses.csv")
    trace.write_text("600,-1  # a node\n900,1\n1500,0\n")
    document = decoded(
        capsys, job, "--trace", trace, "--length", "1h", "--policies", "full,fewer", *QUICK
    )
    full, fewer = document["results"]
    assert full["mtbf_s"] is None and full["formula"] is None
    assert full["failures"] == 2
    assert full["portions"]["waiting for a node"] == pytest.approx(298 / 3600)
    assert fewer["portions"]["waiting for a node"] == 0
    text = printed(capsys, job, "--trace", trace, "--length", "1h", *QUICK)
    assert re.search(r"failures and nodes that come +losses.csv +given", text)


def test_where_a_job_has_no_spares_it_waits(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--mtbf", "10m", "--policies", "full", "--node-losses", "1", *QUICK)
    (bare,) = decoded(capsys, job, "--spares", "0", *arguments)["results"]
    (spare,) = decoded(capsys, job, "--spares", "9", *arguments)["results"]
    assert bare["portions"]["waiting for a node"] > 0.3
    assert spare["portions"]["waiting for a node"] < 0.01
    text = printed(capsys, job, "--spares", "0", *arguments)
    assert re.search(r"(?m)^full .*\.\.\.\.\. \d+%$", text)  # its bar


def test_seeds_are_printed_and_repeat_what_they_gave(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (job, "--mtbf", "10m", "--policies", "full", "--runs", "3")
    assert "seeds 0 to 2" in printed(capsys, *arguments)
    later = printed(capsys, *arguments, "--seed", "7")
    assert "seeds 7 to 9" in later
    document = decoded(capsys, *arguments, "--seed", "7")
    assert document["seeds"] == [7, 9]
    assert document == decoded(capsys, *arguments, "--seed", "7")
    assert document["results"] != decoded(capsys, *arguments)["results"]


def test_what_a_recovery_replays_is_shown_where_only_some_stages_do(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repairs last as long as the failures are apart, so that many hit a recovery in progress."""
    arguments = ("--mtbf", "5m", "--stages", "4", "--detect-seconds", "60", "--spares", "99")
    text = printed(capsys, job, *arguments, "--policies", "full,sparse", *QUICK)
    found = re.search(
        r"(?m)^sparse \+: a recovery replays ([\d.]+) of 4 stages, at most ([234]); "
        r"([\d.]+) failures of a run enlarged one$",
        text,
    )
    assert found is not None
    assert 1 < float(found[1]) < 4
    full, sparse = decoded(capsys, job, *arguments, "--policies", "full,sparse", *QUICK)["results"]
    assert (full["replayed_stages"], full["widest_scope"], full["enlarged_scopes"]) == (0, 0, 0)
    assert sparse["widest_scope"] == int(found[2])
    assert "a recovery replays" not in printed(capsys, job, "--policies", "sparse", *QUICK)


# --- inputs ---------------------------------------------------------------------------------------


def test_costs_come_from_reports_and_say_so(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recovery, snapshot = tmp_path / "recovery.json", tmp_path / "snapshot.json"
    recovery.write_text(json.dumps(RECOVERY))
    snapshot.write_text(json.dumps({"overhead": 1.5}))
    costs = ("--costs", recovery, "--costs", snapshot, "--policies", "full", *QUICK)
    document = decoded(capsys, job, *costs)
    assert source_of(document, "detection of a lost node") == ("2.1 s", str(recovery))
    assert source_of(document, "restart after it, processes stay") == ("0.75 s", str(recovery))
    assert source_of(document, "to go on with other nodes, in place") == ("0.5 s", str(recovery))
    longer = source_of(document, "a step with a snapshot is longer by")
    assert longer == ("1.5 %", str(snapshot))
    again = decoded(capsys, job, *costs, "--processes", "restart")
    assert source_of(again, "restart after it, all processes start again")[0] == "1.25 s"
    flag = decoded(capsys, job, *costs, "--detect-seconds", "9")
    assert source_of(flag, "detection of a lost node") == ("9 s", "given")


def test_what_nobody_gives_is_assumed_and_marked(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = decoded(capsys, job, "--policies", "full", *QUICK)
    assert source_of(document, "step") == ("5 s", "assumed")
    assert source_of(document, "GPUs") == ("8 on 4 nodes", "the job")
    assert source_of(document, "training state")[1].endswith("assumed")
    given = decoded(capsys, job, "--parameters", "1G", "--policies", "full", "--gpus", "64", *QUICK)
    assert source_of(given, "training state") == (
        "14 GB, 97% in experts",
        "14 B for each of 1 G parameters",
    )
    assert source_of(given, "spares") == ("1", "1 %: assumed")
    bytes_given = decoded(
        capsys, job, "--expert-bytes", "1G", "--other-bytes", "8G", "--policies", "full", *QUICK
    )
    assert source_of(bytes_given, "training state") == ("200 GB, 96% in experts", "given")


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ("", ("every 30 min", "assumed")),
        (", interval: {minutes: 5}", ("every 5 min", "the job")),
        (", interval: {steps: 60}", ("every 2 min", "the job")),
    ],
)
def test_copies_in_storage_are_those_of_the_job(
    job: Path, interval: str, shown: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    none = decoded(capsys, job, "--policies", "full", *QUICK)
    assert source_of(none, "copies in storage")[0].startswith("none")
    job.write_text(JOB.replace("  model:", f"  persistence: {{uri: /copies{interval}}}\n  model:"))
    document = decoded(capsys, job, "--step-seconds", "2", "--policies", "full", *QUICK)
    assert source_of(document, "copies in storage") == shown


def test_sizes_come_from_a_run_in_progress(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two experts of 100 bytes in one layer, and 500 bytes beside them."""
    run = made_run(tmp_path)
    document = decoded(capsys, job, "--like-run", run, "--policies", "full", *QUICK)
    assert source_of(document, "training state") == ("700 B, 29% in experts", str(run))
    assert source_of(document, "experts") == ("2 in each of 1 layers", str(run))


def test_a_step_follows_from_its_pipeline(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ("--micro-batch-seconds", "0.1", "--stages", "12", "--micro-batches", "4")
    rest = ("--sync-seconds", "0.3", "--update-seconds", "0.2", "--policies", "full", *QUICK)
    document = decoded(capsys, job, *pipeline, *rest)
    assert source_of(document, "step")[0] == "2 s"
    assert source_of(document, "stages, micro-batches")[0] == "12, 4"


# --- pictures -------------------------------------------------------------------------------------


def test_pictures_are_drawn(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (job, "--mtbf", "1h,10m", "--policies", "full,fewer,gemini", *QUICK)
    for name in ("one.svg", "two.svg"):
        printed(capsys, *arguments, "--plot", tmp_path / name)
    svg = (tmp_path / "one.svg").read_text()
    assert svg == (tmp_path / "two.svg").read_text()
    texts = {node.text for node in ET.fromstring(svg).iter() if node.text}
    assert {"gemini (not built)", "fewer", "10 min", "effective training time ratio"} <= texts
    printed(capsys, *arguments, "--plot", tmp_path / "deep" / "ettr.png")
    assert imread(tmp_path / "deep" / "ettr.png").shape[2] == 4


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(
    job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "holdfast_cli.planner.simulation.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = ("--plot", tmp_path / "a.svg", "--policies", "full", *QUICK)
    assert "pip install 'holdfast[cli]'" in refused(capsys, job, *plot)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--mtbf", "10"], ""),
        (["--mtbf", "soon"], "'soon' is not a time; write 90s, 10m, 2h or 1.5d"),
        (["--mtbf", "0m"], "'0m' is not a time"),
        (["--length", "1y"], "'1y' is not a time"),
        (["--gpus", "15"], "--gpus 15 cannot be divided by the job's nprocPerNode = 2"),
        (["--policies", "full,best"], "--policies best: there is no such policy; give all, or"),
        (["--plot", "plan.txt"], "--plot plan.txt: the suffix sets the format"),
        (["--costs", "/nowhere/r.json"], "--costs /nowhere/r.json cannot be read"),
        (["--trace", "/nowhere/t.csv"], "--trace /nowhere/t.csv: No such file"),
        (["--expert-bytes", "1G"], "--expert-bytes and --other-bytes: give both"),
        (["--like-run", "/n", "--parameters", "1G"], "--like-run gives the sizes of the model"),
        (["--like-run", "/nowhere"], "--like-run /nowhere: no run is in progress there"),
        (["--step-seconds", "1", "--micro-batch-seconds", "1"], "give one of them"),
        (["--node-losses", "2"], "'2' is not a number from 0 to 1"),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_flag(
    job: Path, arguments: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if refusal:
        assert refusal in refused(capsys, job, *arguments)
    else:
        printed(capsys, job, *arguments, "--policies", "full", *QUICK)  # seconds need no unit


def test_no_fewer_nodes_are_proposed_than_have_seats_for_all_experts(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace("{dp: 8, ep: 8}", "{dp: 8}\n  elastic: {seatsPerRank: 2}"))
    found = decoded(capsys, job, "--mtbf", "10m", "--spares", "0", *QUICK)
    assert not any("minNodes" in lever["change"] for lever in found["levers"])
