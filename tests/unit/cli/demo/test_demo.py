"""The demo's job: the example's, with its files where the demo reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_cli.demo.demo import EXAMPLES, SCRIPT, WITHOUT_SPARE, demo_job
from holdfast_cli.main import build_parser
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import Repeats, SparseWindows


def test_the_demo_runs_the_example_with_a_spare_and_parity(tmp_path: Path) -> None:
    job = demo_job(tmp_path, 70)
    assert job.command[:4] == ("python", str(EXAMPLES / "train_moe.py"), "--steps", "70")
    assert str(tmp_path / "log.jsonl") in job.command
    assert job.spec.failure_policy.spares == 1
    assert job.group_size == 4
    assert job.spec.parallelism.dp == job.spec.nodes * job.spec.nproc_per_node


def test_the_demo_keeps_processes_that_are_not_lost_unless_it_is_to_restart_them(
    tmp_path: Path,
) -> None:
    assert "--stay" in demo_job(tmp_path, 70, stay=True).command
    assert "--stay" not in demo_job(tmp_path, 70, stay=False).command
    assert build_parser().parse_args(["demo", "--restart"]).restart
    assert not build_parser().parse_args(["demo"]).restart


@pytest.mark.parametrize("policy", ["Full", "PartialExperts", "Selective", "Sparse"])
def test_the_demo_runs_under_each_policy(policy: str, tmp_path: Path) -> None:
    assert build_parser().parse_args(["demo", "--policy", policy]).policy == policy
    job = demo_job(tmp_path, 10, policy)
    assert job.spec.snapshot.policy.type == policy
    if policy == "Sparse":
        chosen = demo_job(tmp_path, 10, policy, Repeats.OPTIMIZER).spec.snapshot.policy.chosen
        assert isinstance(chosen, SparseWindows) and chosen.repeats is Repeats.OPTIMIZER
        return
    with pytest.raises(InvalidJobError, match="sparse"):
        demo_job(tmp_path, 10, policy, Repeats.OPTIMIZER)


def test_the_script_of_faults_is_the_promised_one() -> None:
    script = (*SCRIPT, WITHOUT_SPARE)
    assert [fault.kind for fault in script] == [
        "kill-rank",
        "kill-rank-mid-copy",
        "kill-daemon",
        "kill-node",
        "kill-node-without-spare",
    ]
    assert [fault.at for fault in script] == sorted(fault.at for fault in script)
    assert [fault.returns for fault in script] == [False] * 4 + [True]


def test_the_demo_goes_on_with_fewer_nodes_where_its_policy_lets_it(tmp_path: Path) -> None:
    full, partial = demo_job(tmp_path, 10).spec, demo_job(tmp_path, 10, "PartialExperts").spec
    assert (full.nodes, full.least_nodes) == (4, 3)
    assert partial.least_nodes == partial.nodes == 4
