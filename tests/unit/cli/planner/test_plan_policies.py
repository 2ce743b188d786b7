"""`holdfast plan` where the model is known: the table, the picture, what it refuses."""

from __future__ import annotations

import builtins
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.image import imread
from plan_command import JOB, SIZES, made_run, printed, refused

from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import Assumptions, Comparison
from holdfast_cli.planner.plan_inputs import measured_copy_bytes_s, sizes_of_run
from holdfast_cli.planner.plan_plot import BEST, REFUSED, draw
from holdfast_cli.planner.planning import PlannedModel, compare_and_recommend
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.snapshots import PartialExperts, Repeats, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind

TABLE = """\
                 per rank per step copy hidden protect every   memory redone time lost  tokens
policy                GiB      GiB    s              s steps GiB/node  steps   30 days    lost
Full                 8.42     67.4 1.81    yes    7.23     4     61.7   3.81    20.3 s      0%
Sparse 5             2.02     16.1 0.43    yes    1.73     1     73.7   11.8  1.05 min      0%
Sparse 5 grads       2.02     16.1 0.43    yes    1.73     1     73.7   6.82    36.4 s      0%
PartialExperts 1     1.56     11.2 0.33    yes    1.34     1     61.7   0.83    4.45 s 0.0015%
PartialExperts 2     1.87     14.9 0.40    yes    1.60     1     61.7   0.90    4.81 s <0.001%
PartialExperts 4     2.80     22.4 0.60    yes    2.41     2     61.7   1.60    8.54 s <0.001%
PartialExperts 8     4.68     37.4 1.00    yes    4.02     3     61.7   2.50    13.4 s <0.001%
Selective 35         3.74     18.4 0.70    yes    2.81     2     61.7   1.70    9.08 s <0.001%"""
"""By hand: 192 experts and 8 GB are 67.4 GiB, an eighth of which is 8.42. 12 experts on 8 ranks are
2 on the most loaded one, with an eighth of 8 GB: 1.56 GiB. A node has three slots and two parity
blocks, a third as long, for each of two ranks: 61.7 GiB. In 2 s the network takes 18.6 GiB from
four nodes, to which 5 slots of a window come nearest: 16.1 GiB."""

SELDOM = JOB + "  snapshot: {interval: {steps: 2}}\n"
"""A job that cannot have sparse windows."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


# --- the table ------------------------------------------------------------------------------------


def test_policies_are_compared_in_a_table_of_100_columns(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, job, *SIZES)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    start = next(i for i, line in enumerate(lines) if line.startswith("policy"))
    assert "\n".join(line.rstrip() for line in lines[start - 1 : start + 9]) == TABLE
    sentence = " ".join(lines[start + 9 : start + 12])
    assert "recommended: Full: its copy of 1.8 s hides behind a step of 2 s" in sentence
    assert "12 MoE layers of 16 experts" in text
    assert "nodes lost in the training" in text  # the odds are still there
    assert "snapshot interval" not in text  # the table has one for each policy


@pytest.mark.parametrize("step_s", ["0.5", "2"])
@pytest.mark.parametrize("redundancy", ["RAIM5", "None"])
def test_sizes_of_ranks_and_of_the_model_lead_to_one_interval(
    job: Path, capsys: pytest.CaptureFixture[str], step_s: str, redundancy: str
) -> None:
    """A copy that does not hide, at the best interval; one that does, as protection follows."""
    job.write_text(JOB + f"  redundancy: {{type: {redundancy}}}\n")
    by_model = printed(capsys, job, *SIZES[:4], "--step-seconds", step_s)
    rank_bytes = str((192 * 335_000_000 + 8_000_000_000) // 8)
    by_rank = printed(capsys, job, "--bytes-per-rank", rank_bytes, "--step-seconds", step_s)
    full, _ = (line for line in by_model.splitlines() if line.startswith("Full"))
    (row,) = (line for line in by_rank.splitlines() if line.startswith("snapshot interval"))
    every = re.sub(r"\+(\S+) s", r"\1", full).split()[6]
    assert row.split()[3] == every, (row, full)


def test_flags_may_describe_another_model_than_the_job(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, job, *SIZES, "--moe-layers", "6", "--experts-per-layer", "32")
    assert "6 MoE layers of 32 experts" in text
    assert "PartialExperts 16" in text


def test_the_job_sets_the_first_k_and_what_may_be_lost(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = "{type: PartialExperts, partialExperts: {expertsPerLayer: 3, lossLimit: 0.000001}}"
    job.write_text(JOB + f"  snapshot: {{policy: {policy}}}\n")
    text = printed(capsys, job, *SIZES)
    assert "PartialExperts 3 *" in text
    assert "PartialExperts 6 *" in text
    assert "so that it would grow" in text
    assert "PartialExperts 5 *" in printed(capsys, job, *SIZES, "--partial-experts", "5")


def test_bandwidths_decide_what_hides(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--copy-bandwidth", "5G", "--network-bandwidth", "100G"]
    assert "recommended: Sparse 2 grads: its copy" in printed(capsys, job, *SIZES, *fast)
    job.write_text(SELDOM)
    text = printed(capsys, job, *SIZES, *fast)
    full = next(line for line in text.splitlines() if line.startswith("Full"))
    assert "+1.62 s" in full
    assert "a node copies 5 GB/s and sends 100 GB/s, a step takes 2 s" in text
    assert "recommended: PartialExperts 4" in text  # the largest K that hides
    rare = ["--copy-bandwidth", "5G", "--node-mtbf-days", "5000", "--process-mtbf-days", "5000"]
    assert "recommended: Full" in printed(capsys, job, *SIZES, *rare)


def test_what_is_recommended_can_be_written_into_the_job(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ["--copy-bandwidth", "5G", "--network-bandwidth", "10G"]
    _, _, after = printed(capsys, job, *SIZES, *fast).partition("recommended: Sparse")
    written = after[after.index("  snapshot:") : after.index("model:")]
    assert parsed(JOB + written).spec.snapshot.policy.chosen == SparseWindows(
        window=2, repeats=Repeats.OPTIMIZER
    )
    job.write_text(SELDOM)
    text = printed(capsys, job, *SIZES, *fast)
    _, _, after = text.partition("recommended: PartialExperts 4")
    written = after[after.index("  snapshot:") : after.index("model:")]
    assert parsed(JOB + written).spec.snapshot.policy.chosen == PartialExperts(experts_per_layer=4)
    assert parsed(JOB + written).spec.snapshot.interval.steps == 2


def test_windows_that_adapt_stay_so_and_need_room_for_the_longest(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ["--copy-bandwidth", "5G", "--network-bandwidth", "10G"]
    rows = {}
    for longest in (2, 12):
        policy = f"{{type: Sparse, sparse: {{window: auto, maxWindow: {longest}}}}}"
        job.write_text(JOB + f"  snapshot: {{policy: {policy}}}\n")
        text = printed(capsys, job, *SIZES, *fast)
        rows[longest] = next(row for row in text.splitlines() if row.startswith("Sparse 2 "))
        _, _, after = text.partition("recommended: Sparse")
        written = after[after.index("  snapshot:") : after.index("model:")]
        assert parsed(JOB + written).spec.snapshot.policy.chosen == SparseWindows(
            window="auto", max_window=longest, repeats=Repeats.OPTIMIZER
        )
    differing = [a != b for a, b in zip(rows[2].split(), rows[12].split(), strict=True)]
    assert sum(differing) == 1, "only the memory differs"


def test_the_plan_of_an_automatic_interval_shows_what_to_expect(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rare = "nodeMtbfDays: 5000, processMtbfDays: 5000"
    job.write_text(JOB + f"  snapshot: {{interval: {{steps: auto, {rare}}}}}\n")
    text = printed(capsys, job, *SIZES, "--copy-bandwidth", "5G")
    assert "recommended: Full" in text and "interval: {steps: auto}" in text
    assert "by the same formula, from what is measured while the job runs" in text
    flags = ("--node-mtbf-days", "180", "--process-mtbf-days", "60")
    assert "recommended: Part" in printed(capsys, job, *SIZES, "--copy-bandwidth", "5G", *flags)


def test_the_copy_can_be_measured(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_cli.planner.plan_inputs._MEASURED_BYTES", 1 << 20)
    assert 1e7 < measured_copy_bytes_s() < 1e12
    assert "a node copies" in printed(capsys, job, *SIZES, "--measure-copy")


def test_without_redundancy_the_plan_shows_what_is_not_counted(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  redundancy: {type: None}\n")
    assert "a lost node loses all snapshots" in printed(capsys, job, *SIZES)


@pytest.mark.parametrize(
    ("redundancy", "parity"),
    [
        ("{type: RAIM5}", " 16.00 GiB"),
        ("{type: RAIM6}", " 48.00 GiB"),
        ("{type: RAIM6, raim6: {groupSize: 3}}", " 48.00 GiB"),
        ("{type: Replication, replication: {replicas: 3}}", " 144.00 GiB"),
    ],
)
def test_the_memory_of_each_redundancy_is_shown(
    job: Path, capsys: pytest.CaptureFixture[str], redundancy: str, parity: str
) -> None:
    job.write_text(JOB + f"  redundancy: {redundancy}\n")
    assert parity in printed(capsys, job, "--bytes-per-rank", "12Gi")


def test_a_limit_that_is_too_small_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB + "  snapshot: {memoryPerNode: 40Gi}\n")
    assert "snapshots of one node need 53.60 GiB" in refused(capsys, job, *SIZES)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--partial-experts", "17"], "--partial-experts 17: a layer has 16 experts; give 1 to 16"),
        (["--partial-experts", "0"], "--partial-experts: '0' is not a whole number of at least 1"),
        (["--copy-bandwidth", "0"], "--copy-bandwidth: '0' leaves nothing to plan with"),
        (["--network-bandwidth", "0"], "--network-bandwidth: '0' leaves nothing to plan with"),
        (["--expert-bytes", "0"], "--expert-bytes: '0' leaves nothing to plan with"),
        (["--experts-per-layer", "12"], "--experts-per-layer 12 cannot be divided by the job's ep"),
        (["--routing-skew", "-1"], "--routing-skew: '-1' is not a number of at least 0"),
        (["--bytes-per-rank", "1Gi"], "--bytes-per-rank follows from the model's sizes"),
        (["--snapshot-seconds", "1"], "--snapshot-seconds follows from the model's sizes"),
        (["--measure-copy", "--copy-bandwidth", "1G"], "--copy-bandwidth and --measure-copy"),
        (
            ["--like-run", "/nowhere"],
            "--like-run gives the sizes of the model; leave --expert-bytes out",
        ),
        (["--plot", "plan.txt"], "--plot plan.txt: the suffix sets the format"),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_flag(
    job: Path, arguments: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal in refused(capsys, job, *SIZES, *arguments)


@pytest.mark.parametrize("missing", ["--expert-bytes", "--other-bytes"])
def test_a_missing_size_is_named(
    job: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = SIZES.index(missing)
    rest = SIZES[:at] + SIZES[at + 2 :]
    assert f"{missing} is missing" in refused(capsys, job, *rest)


@pytest.mark.parametrize(
    ("flag", "field"), [("--moe-layers", "numMoELayers"), ("--experts-per-layer", "numExperts")]
)
def test_a_job_without_a_model_needs_flags(
    job: Path, flag: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB.replace("  model: {numExperts: 16, numMoELayers: 12}\n", ""))
    given = {"--moe-layers": "12", "--experts-per-layer": "16"}
    given.pop(flag)
    arguments = [text for pair in given.items() for text in pair]
    refusal = refused(capsys, job, *SIZES, *arguments)
    assert f"{flag} is missing (or spec.model.{field} in the job)" in refusal


@pytest.mark.parametrize(
    "arguments",
    [["--plot", "plan.png"], ["--partial-experts", "2"], ["--measure-copy"]],
)
def test_flags_that_need_a_model_say_so(
    job: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = refused(capsys, job, *arguments)
    assert f"{arguments[0]} compares policies, which requires the model's sizes" in refusal


# --- a run that is going on -----------------------------------------------------------------------


def parsed(text: str = JOB) -> MoETrainingJob:
    return parse_job(yaml.safe_load(text))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path)


def test_a_run_in_progress_gives_the_sizes_of_its_model(run: Path) -> None:
    assert sizes_of_run(run, parsed()) == ModelSizes(
        experts={UnitKey(1, UnitKind.EXPERT, 0): 100, UnitKey(1, UnitKind.EXPERT, 1): 100},
        other_bytes=500,
    )


def test_a_plan_from_a_run(job: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 MoE layers of 2 experts" in printed(capsys, job, "--like-run", run)


def test_a_run_that_has_not_saved_yet_is_refused(
    job: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (arena,) = (tmp_path / "memory" / "n1").glob("jobs/*/arenas/*")
    (arena / "layout.json").unlink()
    assert "1 of 2 ranks have saved" in refused(capsys, job, "--like-run", run)
    assert "no run is in progress there" in refused(capsys, job, "--like-run", tmp_path)


# --- the picture ----------------------------------------------------------------------------------


@pytest.fixture
def found() -> tuple[Comparison, Assumptions]:
    assumed = Assumptions(
        copy_bytes_s=5e9,
        network_bytes_s=100e9,
        step_s=2.0,
        node_losses_per_s=1e-7,
        process_failures_per_s=1e-6,
    )
    sizes = ModelSizes.even(
        layers=12, experts=16, expert_bytes=335_000_000, other_bytes=8_000_000_000
    )
    advice = compare_and_recommend(parsed(), PlannedModel(sizes=sizes, assumed=assumed))
    return advice.comparison, assumed


def test_the_picture_shows_the_table(found: tuple[Comparison, Assumptions]) -> None:
    comparison, assumed = found
    figure = draw(comparison, assumed, title="default.gpt")
    copy, time, tokens = figure.axes
    for axes, values in (
        (copy, [cost.copy_s for cost in comparison.costs]),
        (time, [100 * cost.overhead for cost in comparison.costs]),
        (tokens, [100 * cost.lost_tokens for cost in comparison.costs]),
    ):
        widths = [bar.get_width() for bar in axes.containers[0]]
        assert widths == pytest.approx(values)
    stalls = [bar.get_width() for bar in time.containers[1]]
    assert stalls == pytest.approx([100 * cost.stalled for cost in comparison.costs])
    labels = [label.get_text().splitlines()[0] for label in copy.get_yticklabels()]
    assert labels[0] == "Full"
    assert labels[1:3] == ["Sparse 2", "Sparse 2 grads"]
    assert labels[3:] == [f"PartialExperts {k}" for k in (1, 2, 4, 8)] + [
        f"Selective {comparison.costs[-1].experts}"
    ]
    assert [line.get_xdata()[0] for line in copy.lines] == [2.0]  # type: ignore[index]


def test_colours_show_what_is_recommended_and_what_may_not_be_used(
    found: tuple[Comparison, Assumptions],
) -> None:
    comparison, assumed = found
    refused = replace(comparison.costs[-1], objection="S would grow")
    comparison = replace(comparison, costs=(*comparison.costs[:-1], refused))
    figure = draw(comparison, assumed, title="default.gpt")
    colours = [to_hex(bar.get_facecolor()) for bar in figure.axes[0].containers[0]]
    assert [cost is comparison.best for cost in comparison.costs] == [
        colour == BEST for colour in colours
    ]
    assert colours[-1] == REFUSED


def test_a_picture_is_a_picture(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png, svg = tmp_path / "new" / "plan.png", tmp_path / "plan.svg"
    assert f"wrote {png}" in printed(capsys, job, *SIZES, "--plot", png)
    height, width, _ = imread(png).shape
    assert width > height > 300
    assert imread(png).std() > 0.05  # something is drawn on it
    printed(capsys, job, *SIZES, "--plot", svg)
    assert ET.parse(svg).getroot().tag.endswith("svg")


def test_a_picture_that_cannot_be_written_is_an_error(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(
        capsys, job, *SIZES, "--plot", tmp_path / "file" / "plan.png"
    )


def test_without_matplotlib_the_error_names_what_to_install(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return known(name, *rest)

    monkeypatch.delitem(sys.modules, "holdfast_cli.planner.plan_plot", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    refusal = refused(capsys, job, *SIZES, "--plot", "plan.png")
    assert "pip install 'holdfast[cli]'" in refusal
