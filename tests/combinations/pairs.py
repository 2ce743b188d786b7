"""What a job can combine: each way to snapshot with each other feature.

A *column* is what snapshots hold or what survives a loss: a policy, experts with seats, or pipeline
stages whose boundaries are logged. A *row* is a feature of the job beside it. `make_job` has a job
for every pair; `REFUSED` has the words for those that admission refuses, and `ELSEWHERE` the tests
of pairs that need another trainer than the examples. Which of these a script may have is not in a
job, so admission cannot refuse them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 24
"""Steps of a job: enough that it still trains when the fault comes."""

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A way to snapshot, with the example that uses it."""

    example: str
    arguments: tuple[str, ...] = ()
    spec: Mapping[str, Any]
    exact: bool
    """Whether a recovery leads to the bytes of an undisturbed run."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A feature of a job, and the losses that it is for."""

    spec: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    nodes_lost: int = 0
    """Nodes that are killed at once; 0: a single rank is."""
    resizes: bool = False
    """Whether the job goes on with fewer nodes, and so on other batches."""


_TINY = ("--dim", "32", "--layers", "2", "--seq", "16")
_MOE = ("--experts", "4", *_TINY)
_POLICY = {"parallelism": {"dp": 2}, "model": {"numExperts": 4, "numMoELayers": 2}, "nodes": 2}


def _policy(name: str, exact: bool, **settings: Any) -> Column:
    field = name[0].lower() + name[1:]
    policy = {"type": name, **({field: settings} if settings else {})}
    return Column(
        example="train_moe.py", arguments=_MOE, spec={**_POLICY, "policy": policy}, exact=exact
    )


COLUMNS = {
    "Full": _policy("Full", True),
    "PartialExperts": _policy("PartialExperts", False, expertsPerLayer=1, lossLimit=1),
    "Selective": _policy("Selective", False, experts=1, lossLimit=1),
    "Sparse": _policy("Sparse", True, window=3),
    "seats": Column(
        example="train_moe_elastic.py",
        arguments=(*_MOE, "--stay"),
        spec={**_POLICY, "elastic": {"seatsPerRank": 4}},
        exact=False,  # copies may be placed otherwise after a recovery, and sums then differ
    ),
    "seats, windows": Column(
        example="train_moe_elastic.py",
        arguments=(*_MOE, "--stay"),
        spec={
            **_POLICY,
            "elastic": {"seatsPerRank": 4},
            "policy": {"type": "Sparse", "sparse": {"window": 3, "repeats": "Optimizer"}},
        },
        exact=False,
    ),
    "stages": Column(
        example="train_moe_pipeline.py",
        arguments=("--seed", "5"),
        spec={"nodes": 2, "parallelism": {"dp": 1, "pp": 2}},
        exact=True,
    ),
}

ROWS = {
    "a rank is lost": Row(spec={}),
    "RAIM6": Row(spec={"nodes": 4, "redundancy": {"type": "RAIM6"}, "spares": 2}, nodes_lost=2),
    "replicas": Row(
        spec={"redundancy": {"type": "Replication", "replication": {"replicas": 1}}, "spares": 1},
        nodes_lost=1,
    ),
    "processes stay": Row(spec={}, arguments=("--stay",)),
    "fewer nodes": Row(spec={"nodes": 3, "minNodes": 2}, nodes_lost=1, resizes=True),
    "persistence": Row(spec={"persistence": {"interval": {"steps": 4}}}),
    "persisted experts": Row(spec={"persistence": {"interval": {"steps": 4}, "experts": 1}}),
    "interval auto": Row(spec={"interval": {"steps": "auto"}}),
    "experts on several ranks": Row(spec={"ep": 2}),
    "ranks of a node": Row(spec={"nprocPerNode": 2}),
    "two slots": Row(spec={"slots": 2}),
}

ADAPTED: dict[tuple[str, str], Row] = {
    ("fewer nodes", "stages"): Row(
        spec={
            "nodes": 4,
            "minNodes": 2,
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 2}},
        },
        nodes_lost=1,
        resizes=True,
    ),
    ("fewer nodes", "Sparse"): Row(
        spec={
            "nodes": 3,
            "minNodes": 2,
            "policy": {"type": "Sparse", "sparse": {"window": 3, "repeats": "Optimizer"}},
        },
        nodes_lost=1,
        resizes=True,
    ),
    ("experts on several ranks", "stages"): Row(
        spec={"nodes": 4, "ep": 2}, arguments=("--expert-parallel",)
    ),
}
"""(row, column) → what the row is for that column."""

_WHOLE = "spec.elastic needs ranks that each hold whole experts"
_LEFT_OUT = "use snapshot.policy.type PartialExperts, or remove it"
REFUSED = {
    ("interval auto", "Sparse"): "needs every step",
    ("interval auto", "seats, windows"): "needs every step",
    ("experts on several ranks", "seats"): _WHOLE,
    ("experts on several ranks", "seats, windows"): _WHOLE,
    **{("persisted experts", name): _LEFT_OUT for name in COLUMNS if name != "PartialExperts"},
}
"""(row, column) → words of the refusal."""

_SPREAD = "tests/unit/sdk/capture/test_spread_processes.py"
_LEFT_OUT_TOGETHER = (
    f"{_SPREAD}::test_parts_of_experts_are_left_out_together_and_restored_of_one_step"
)
_CUT = f"{_SPREAD}::test_windows_whose_experts_lie_partly_on_each_rank_are_repeated_bit_for_bit"
_FRAMEWORKS = "tests/unit/sdk/integrations/test_policies.py"
_BYTES = f"{_FRAMEWORKS}::test_a_killed_training_ends_with_the_bytes_of_an_undisturbed_one"
_TOKENS = (
    f"{_FRAMEWORKS}::test_a_killed_training_goes_on_with_experts_of_earlier_steps_and_knows_"
    "their_tokens"
)
_GRADIENTS = f"{_FRAMEWORKS}::test_windows_whose_gradients_are_computed_within_a_step_are_refused"
_EXAMPLES = (
    "tests/local/frameworks/test_frameworks.py::"
    "test_an_example_that_is_killed_ends_like_one_that_was_not"
)
_REFUSED_WRAPPERS = (
    "tests/unit/sdk/moe/test_snapshots.py::"
    "test_wrappers_that_average_or_divide_parameters_are_refused"
)
_OWN_LOOP = "test_what_only_a_loop_of_ones_own_can_train_is_refused"
_HUGGING_FACE = f"tests/unit/sdk/integrations/test_huggingface.py::{_OWN_LOOP}"
_LIGHTNING = f"tests/unit/sdk/integrations/test_lightning.py::{_OWN_LOOP}"
_TP_OF_SEATS = (
    "tests/combinations/test_pairs.py::"
    "test_tensor_parallelism_beside_seats_is_refused_when_it_is_applied"
)
_WRAPPED_STAGES = (
    "tests/local/snapshots/test_stages.py::test_a_lost_stage_that_torch_wraps_repeats_steps_alone"
)
_HOOKS = (
    "tests/local/staying/test_staying_routed.py::"
    "test_hooks_count_the_tokens_of_all_ranks_and_a_recovery_says_which_were_lost"
)
ELSEWHERE = {
    ("FSDP2", "Full"): "tests/local/staying/test_sharded.py::"
    "test_a_lost_rank_alone_restores_the_step_that_the_others_have",
    ("FSDP2", "PartialExperts"): _LEFT_OUT_TOGETHER,
    ("FSDP2", "Selective"): _LEFT_OUT_TOGETHER,
    ("FSDP2", "Sparse"): _CUT,
    ("FSDP2", "seats"): _REFUSED_WRAPPERS,
    ("FSDP2", "seats, windows"): _REFUSED_WRAPPERS,
    ("FSDP2", "stages"): _WRAPPED_STAGES,
    ("TP", "Full"): "tests/local/staying/test_staying_dtensors.py::"
    "test_only_the_lost_rank_starts_again_and_all_have_the_bits_of_an_undisturbed_run",
    ("TP", "PartialExperts"): _LEFT_OUT_TOGETHER,
    ("TP", "Selective"): _LEFT_OUT_TOGETHER,
    ("TP", "Sparse"): _CUT,
    ("TP", "seats"): _TP_OF_SEATS,
    ("TP", "seats, windows"): _TP_OF_SEATS,
    ("TP", "stages"): _WRAPPED_STAGES,
    ("DDP", "Full"): "tests/local/staying/test_staying_ddp.py::"
    "test_a_rank_that_dies_is_the_only_one_that_starts_again",
    ("DDP", "PartialExperts"): _HOOKS,
    ("DDP", "Selective"): _HOOKS,
    ("DDP", "Sparse"): _CUT,
    ("DDP", "seats"): _REFUSED_WRAPPERS,
    ("DDP", "seats, windows"): _REFUSED_WRAPPERS,
    ("DDP", "stages"): _WRAPPED_STAGES,
    ("Hugging Face", "Full"): _EXAMPLES,
    ("Hugging Face", "PartialExperts"): _TOKENS,
    ("Hugging Face", "Selective"): _TOKENS,
    ("Hugging Face", "Sparse"): _BYTES,
    ("Hugging Face", "seats"): _HUGGING_FACE,
    ("Hugging Face", "seats, windows"): _HUGGING_FACE,
    ("Hugging Face", "stages"): _HUGGING_FACE,
    ("Lightning", "Full"): _EXAMPLES,
    ("Lightning", "PartialExperts"): _TOKENS,
    ("Lightning", "Selective"): _TOKENS,
    ("Lightning", "Sparse"): _GRADIENTS,
    ("Lightning", "seats"): _LIGHTNING,
    ("Lightning", "seats, windows"): _LIGHTNING,
    ("Lightning", "stages"): _LIGHTNING,
}
"""(row, column) → the test that trains this pair with real processes, or sees it refused."""

REFUSALS = {_GRADIENTS, _REFUSED_WRAPPERS, _HUGGING_FACE, _LIGHTNING, _TP_OF_SEATS}
"""Those that see it refused."""


def row_of(row_name: str, column_name: str) -> Row:
    """What the row is for this column."""
    return ADAPTED.get((row_name, column_name), ROWS[row_name])


def make_job(row_name: str, column_name: str, directory: Path) -> Spec:
    """The document of a job with both; its script writes its final state below `directory`."""
    row, column = row_of(row_name, column_name), COLUMNS[column_name]
    given = copy.deepcopy({**column.spec, **row.spec})
    nproc, nodes = given.pop("nprocPerNode", 1), given.pop("nodes")
    degrees = {**given.pop("parallelism"), **({"ep": given["ep"]} if "ep" in given else {})}
    given.pop("ep", None)
    degrees["dp"] = nodes * nproc // degrees.get("pp", 1)
    snapshot: Spec = {"memoryPerNode": "256Mi", "interval": given.pop("interval", {"steps": 1})}
    for name in ("policy", "slots"):
        if name in given:
            snapshot[name] = given.pop(name)
    if "persistence" in given:
        given["persistence"]["uri"] = str(directory / "sets")
    command = [sys.executable, str(REPOSITORY / "examples" / column.example)]
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "pair"},
        "spec": {
            "nodes": nodes,
            "nprocPerNode": nproc,
            "parallelism": degrees,
            "snapshot": snapshot,
            "redundancy": given.pop("redundancy", {"type": "RAIM5"}),
            "failurePolicy": {
                "spares": given.pop("spares", 0),
                "maxRestarts": 1000,
                "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 8, "hangSeconds": 30},
            },
            "trainer": {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "command": command,
                                "args": arguments(row_name, column_name, directory),
                            }
                        ]
                    }
                }
            },
            **given,
        },
    }


def arguments(row_name: str, column_name: str, directory: Path) -> list[str]:
    """Arguments of the example: it is to write its final state below `directory`."""
    row, column = row_of(row_name, column_name), COLUMNS[column_name]
    found = [*column.arguments, "--steps", str(STEPS)]
    if column.example == "train_moe_pipeline.py":
        ways = [each for each in row.arguments if each == "--expert-parallel"]
        return [*found, *ways, "--directory", str(directory)]
    if column.example == "train_moe.py":
        found += ["--ep", str(row.spec.get("ep", 1)), *row.arguments]
    return [*found, "--hash-file", str(directory / "sha256")]


def table() -> list[str]:
    """The lines of the table in `docs/combinations.md`."""
    rows = dict.fromkeys([*ROWS, *(row for row, _ in ELSEWHERE)])
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = (_cell(row, column) for column in COLUMNS)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def _cell(row: str, column: str) -> str:
    if (row, column) in REFUSED or ELSEWHERE.get((row, column)) in REFUSALS:
        return "refused"
    assert row in ROWS or (row, column) in ELSEWHERE, f"{row} with {column} is allowed and untried"
    return "trained"
