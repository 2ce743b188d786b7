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
from collections.abc import Mapping, Sequence
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
    """More arguments of the example. The one for stages takes only those in `ADAPTED`."""
    nodes_lost: int = 0
    """Nodes that are killed at once; 0: a single rank is."""
    resizes: bool = False
    """Whether the job goes on with fewer nodes, and so on other batches."""
    script: str = ""
    """The script that trains, if it is not the example of the column; it has the arguments of the
    example for stages."""


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

_MIRRORED = {"type": "RAIM5", "mirrorReplicas": True}
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
    "mirrors of replicas": Row(
        spec={"nodes": 3, "redundancy": _MIRRORED, "spares": 1},
        # Nothing is copied into a mirror while training waits, as it does after very short steps.
        arguments=("--dim", "64", "--seq", "128", "--batch", "4"),
        nodes_lost=1,
    ),
    "window auto": Row(spec={"policy": {"type": "Full", "sparse": {"window": "auto"}}}),
    "stages without logs": Row(
        spec={"parallelism": {"dp": 1, "pp": 2}}, script="tests/local/trainers/plain_stages.py"
    ),
}


def _auto(repeats: str) -> Spec:
    sparse = {"window": "auto", "maxWindow": 4, "repeats": repeats}
    return {"type": "Sparse", "sparse": sparse}


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
    ("mirrors of replicas", "stages"): Row(
        spec={"nodes": 4, "redundancy": _MIRRORED, "spares": 1},
        arguments=("--seq", "128"),
        nodes_lost=1,
    ),
    ("window auto", "PartialExperts"): Row(
        spec={"policy": {"type": "PartialExperts", "sparse": {"window": "auto"}}}
    ),
    ("window auto", "Selective"): Row(
        spec={"policy": {"type": "Selective", "sparse": {"window": "auto"}}}
    ),
    ("window auto", "Sparse"): Row(spec={"policy": _auto("Training")}),
    ("window auto", "seats, windows"): Row(spec={"policy": _auto("Optimizer")}),
    ("window auto", "stages"): Row(spec={"policy": _auto("Training")}),
}
"""(row, column) → what the row is for that column."""

_WHOLE = "spec.elastic needs ranks that each hold whole experts"
_HELD = "whose snapshots hold state that no replica has any more"
_OF_SPARSE = "remove it, or set the type to Sparse"
_LEFT_OUT = "use snapshot.policy.type PartialExperts, or remove it"
REFUSED = {
    ("interval auto", "Sparse"): "needs every step",
    ("interval auto", "seats, windows"): "needs every step",
    ("experts on several ranks", "seats"): _WHOLE,
    ("experts on several ranks", "seats, windows"): _WHOLE,
    **{("persisted experts", name): _LEFT_OUT for name in COLUMNS if name != "PartialExperts"},
    ("mirrors of replicas", "PartialExperts"): _HELD,
    ("mirrors of replicas", "Selective"): _HELD,
    ("mirrors of replicas", "Sparse"): _HELD,
    ("mirrors of replicas", "seats, windows"): _HELD,
    ("window auto", "Full"): _OF_SPARSE,
    ("window auto", "PartialExperts"): _OF_SPARSE,
    ("window auto", "Selective"): _OF_SPARSE,
    ("window auto", "seats"): _OF_SPARSE,
    ("stages without logs", "seats"): _WHOLE,
    ("stages without logs", "seats, windows"): _WHOLE,
}
"""(row, column) → words of the refusal."""

_CAPTURE = "tests/unit/sdk/capture/test_spread_processes.py::"
_LEFT_OUT_TOGETHER = (
    f"{_CAPTURE}test_parts_of_experts_are_left_out_together_and_restored_of_one_step"
)
_CUT = f"{_CAPTURE}test_windows_whose_experts_lie_partly_on_each_rank_are_repeated_bit_for_bit"
_INTEGRATIONS = "tests/unit/sdk/integrations/"
_BYTES = (
    f"{_INTEGRATIONS}test_policies.py::"
    "test_a_killed_training_ends_with_the_bytes_of_an_undisturbed_one"
)
_TOKENS = (
    f"{_INTEGRATIONS}test_policies.py::"
    "test_a_killed_training_goes_on_with_experts_of_earlier_steps_and_knows_their_tokens"
)
_GRADIENTS = (
    f"{_INTEGRATIONS}test_policies.py::"
    "test_windows_whose_gradients_are_computed_within_a_step_are_refused"
)
_PROMISES = "test_a_killed_run_comes_back_as_its_policy_promises"
_DEEPSPEED = f"{_INTEGRATIONS}test_deepspeed.py::{_PROMISES}"
_MEGATRON = f"{_INTEGRATIONS}test_megatron.py::{_PROMISES}"
_TORCHTITAN = f"{_INTEGRATIONS}test_torchtitan.py::test_a_policy_keeps_what_it_promises"
_EXAMPLES = (
    "tests/local/frameworks/test_frameworks.py::"
    "test_an_example_that_is_killed_ends_like_one_that_was_not"
)
_LAUNCHER = (
    "tests/local/frameworks/test_other_launchers.py::"
    "test_training_resumes_with_its_bytes_whatever_happens_to_its_pods"
)
_REFUSED_WRAPPERS = (
    "tests/unit/sdk/moe/test_snapshots.py::"
    "test_wrappers_that_average_or_divide_parameters_are_refused"
)
_PLAIN_DDP = (
    "tests/unit/sdk/elastic/test_pipeline.py::"
    "test_a_stage_that_is_averaged_with_other_stages_is_refused"
)
_FOLLOWS_NOBODY = (
    "tests/unit/daemon/engine/test_entering_worlds.py::"
    "test_no_worker_stays_where_nobody_would_form_its_next_world"
)
_WRAPPED_STAGES = (
    "tests/local/snapshots/test_stages.py::test_a_lost_stage_that_torch_wraps_repeats_steps_alone"
)
_HOOKS = (
    "tests/local/staying/test_staying_routed.py::"
    "test_hooks_count_the_tokens_of_all_ranks_and_a_recovery_says_which_were_lost"
)
_DTENSORS = (
    "tests/local/staying/test_staying_dtensors.py::"
    "test_only_the_lost_rank_starts_again_and_all_have_the_bits_of_an_undisturbed_run"
)
_LOST_STAGE = (
    "tests/local/snapshots/test_stages.py::"
    "test_a_lost_stage_repeats_steps_while_the_others_keep_their_state"
)
_UNREAD_LOG = (
    "tests/unit/sdk/elastic/test_pipeline.py::test_stages_whose_log_could_never_be_read_are_refused"
)
_APPLIED_WITH_SEATS = (
    "tests/combinations/test_pairs.py::"
    "test_what_experts_in_seats_cannot_have_is_refused_when_it_is_applied"
)


def _own_loop(framework: str) -> str:
    """The test that sees refused what this framework's loop cannot train."""
    name = "test_what_only_a_loop_of_ones_own_can_train_is_refused"
    return f"{_INTEGRATIONS}test_{framework}.py::{name}"


# Row → the test of each column, in the order of `COLUMNS`; both columns of seats have the same one.
_TESTS = {
    "stages with logs": (
        *(_LOST_STAGE, _UNREAD_LOG, _UNREAD_LOG, _LOST_STAGE),
        *(_APPLIED_WITH_SEATS, ""),
    ),
    "FSDP2": (
        "tests/local/staying/test_sharded.py::"
        "test_a_lost_rank_alone_restores_the_step_that_the_others_have",
        *(_LEFT_OUT_TOGETHER, _LEFT_OUT_TOGETHER, _CUT),
        *(_REFUSED_WRAPPERS, _WRAPPED_STAGES),
    ),
    "HSDP": (
        *(_DTENSORS, _LEFT_OUT_TOGETHER, _LEFT_OUT_TOGETHER, _CUT),
        *(_REFUSED_WRAPPERS, _WRAPPED_STAGES),
    ),
    "TP": (
        *(_DTENSORS, _LEFT_OUT_TOGETHER, _LEFT_OUT_TOGETHER, _CUT),
        *(_APPLIED_WITH_SEATS, _WRAPPED_STAGES),
    ),
    "DDP": (
        "tests/local/staying/test_staying_ddp.py::"
        "test_a_rank_that_dies_is_the_only_one_that_starts_again",
        *(_HOOKS, _HOOKS, _CUT),
        *(_REFUSED_WRAPPERS, _WRAPPED_STAGES),
    ),
    "accelerate": (
        *(_BYTES, _TOKENS, _TOKENS, _BYTES),
        *(_REFUSED_WRAPPERS, _PLAIN_DDP),
    ),
    "Hugging Face": (
        *(_EXAMPLES, _TOKENS, _TOKENS, _BYTES),
        *(_own_loop("huggingface"), _own_loop("huggingface")),
    ),
    "Lightning": (
        *(_EXAMPLES, _TOKENS, _TOKENS, _GRADIENTS),
        *(_own_loop("lightning"), _own_loop("lightning")),
    ),
    "torchtitan": (
        "tests/local/frameworks/test_torchtitan.py::"
        "test_a_run_that_loses_a_rank_ends_like_one_of_torchtitan_alone",
        *(_TORCHTITAN, _TORCHTITAN, _TORCHTITAN),
        *(_own_loop("torchtitan"), _own_loop("torchtitan")),
    ),
    "DeepSpeed": (
        *(_DEEPSPEED, _DEEPSPEED, _DEEPSPEED, _DEEPSPEED),
        *(_own_loop("deepspeed"), _own_loop("deepspeed")),
    ),
    "Megatron-Core": (
        *(_MEGATRON, _MEGATRON, _MEGATRON, _MEGATRON),
        *(_own_loop("megatron"), _own_loop("megatron")),
    ),
    "other launchers": (
        *(_LAUNCHER, _LAUNCHER, _LAUNCHER, _LAUNCHER),
        *(_APPLIED_WITH_SEATS, _FOLLOWS_NOBODY),
    ),
}


def _of_columns(of_row: Sequence[str]) -> dict[str, str]:
    *policies, seats, stages = of_row
    return dict(zip(COLUMNS, (*policies, seats, seats, stages), strict=True))


ELSEWHERE = {
    (row, column): test
    for row, of_row in _TESTS.items()
    for column, test in _of_columns(of_row).items()
    if test
}
"""(row, column) → the test that trains this pair with real processes, or sees it refused."""

REFUSALS = {
    _GRADIENTS,
    _REFUSED_WRAPPERS,
    _PLAIN_DDP,
    _FOLLOWS_NOBODY,
    _APPLIED_WITH_SEATS,
    _UNREAD_LOG,
    *map(_own_loop, ("huggingface", "lightning", "torchtitan", "deepspeed", "megatron")),
}
"""Those that see it refused."""

ITSELF = {(row, "stages") for row in ("stages with logs", "stages without logs")}
"""Rows that the column has, or excludes, by itself."""


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
    command = [sys.executable, str(script_of(row_name, column_name))]
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


def script_of(row_name: str, column_name: str) -> Path:
    """The script that trains the pair."""
    own = row_of(row_name, column_name).script
    return REPOSITORY / (own or f"examples/{COLUMNS[column_name].example}")


def arguments(row_name: str, column_name: str, directory: Path) -> list[str]:
    """Arguments of the script: it is to write its final state below `directory`."""
    row, column = row_of(row_name, column_name), COLUMNS[column_name]
    found = [*column.arguments, "--steps", str(STEPS)]
    if row.script:
        return ["--steps", str(STEPS), "--seed", "5", "--directory", str(directory)]
    if column.example == "train_moe_pipeline.py":
        own = row.arguments if (row_name, column_name) in ADAPTED else ()
        return [*found, *own, "--directory", str(directory)]
    if column.example == "train_moe.py":
        found += ["--ep", str(row.spec.get("ep", 1))]
    return [*found, *row.arguments, "--hash-file", str(directory / "sha256")]


def table() -> list[str]:
    """The lines of the table in `docs/combinations.md`."""
    rows = dict.fromkeys([*ROWS, *(row for row, _ in ELSEWHERE)])
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = (_cell(row, column) for column in COLUMNS)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def _cell(row: str, column: str) -> str:
    if (row, column) in ITSELF:
        return "–"
    if (row, column) in REFUSED or ELSEWHERE.get((row, column)) in REFUSALS:
        return "refused"
    assert row in ROWS or (row, column) in ELSEWHERE, f"{row} with {column} is allowed and untried"
    return "trained"
