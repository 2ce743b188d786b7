"""A transformers model in processes that stay, two on each node, under policies that leave experts
out: hooks count its tokens, a rank or a node's ranks die, and what that costs is known."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import staying_routed_trainer
from staying_routed_trainer import LAYERS
from test_staying_together import SELECTIVE, Line, Run, started
from trained_policies import EXPERTS

LOAD_AWARE = {
    "type": "PartialExperts",
    "partialExperts": {"expertsPerLayer": 1, "selection": "LoadAware", "lossLimit": 1.0},
}
RAIM5 = {"type": "RAIM5", "raim5": {"groupSize": 2}}

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]


def lost_tokens(run: Run) -> dict[int, list[int]]:
    """Epoch → tokens that all ranks had sent to the experts of each layer since the versions to
    which these went back, up to the line; of all recoveries until then."""
    found = dict[int, list[int]]()
    for rank in range(run.ranks):
        done, lost = dict[int, Line](), [0] * LAYERS
        for line in run.lines(rank):
            base = line.step - 1
            if line.found:
                done = {step: one for step, one in done.items() if step <= base}
                for expert, version in enumerate(line.found["versions"]):
                    for step in range(version + 1, base + 1):
                        lost[expert // EXPERTS] += done[step].tokens[expert]
                        done[step].tokens[expert] = 0  # not lost again
                before = found.get(line.epoch, [0] * LAYERS)
                found[line.epoch] = [a + b for a, b in zip(before, lost, strict=True)]
            done[line.step] = line
    return found


@pytest.mark.parametrize("policy", [LOAD_AWARE, SELECTIVE], ids=["LoadAware", "Selective"])
@pytest.mark.parametrize("killed", [(1,), (2, 3)], ids=["a rank", "all ranks of a node"])
def test_hooks_count_the_tokens_of_all_ranks_and_a_recovery_says_which_were_lost(
    policy: dict[str, Any], killed: tuple[int, ...]
) -> None:
    with started(
        script=staying_routed_trainer.__file__,
        nodes=2,
        nproc=2,
        preloaded="transformers.models.qwen3_moe.modeling_qwen3_moe",
        redundancy=RAIM5,
        snapshot={"policy": policy},
    ) as (run, runner):
        for point in ("forward", "before-optimizer", "after-save"):
            runner.run(run.wait_partial())
            faults = [(rank, point, "SIGKILL") for rank in killed]
            assert runner.run(run.recover(point, *faults)) == [*killed]
        assert run.check() > 0
        expected = lost_tokens(run)
        assert len(expected) >= 3 and min(map(min, expected.values())) > 0
        for rank in range(run.ranks):
            for line in run.lines(rank):
                if line.found:
                    assert line.lost == expected[line.epoch], (rank, line)
