"""Engines of DeepSpeed, whose ranks are killed and come back, in worlds of any size.

`make test-deepspeed` runs this in an environment that has DeepSpeed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import (
    KILLED,
    STEPS,
    WAIT_S,
    comes_back,
    full_state,
    in_world,
    is_killed,
    open_session,
    train,
)
from kept_experts import steps_of_experts
from log_messages import messages_of
from ranks import run_ranks
from stored import JOB, persist
from torch.distributed.checkpoint import state_dict_loader
from waiting import wait_saved

from holdfast import moe
from holdfast.dcp import HoldfastReader
from holdfast.export import export_dcp
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import (
    ExpertChoice,
    Full,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.topology import Topology

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs make test-deepspeed"
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Settings of an engine; see `deepspeed_model.make_engine`."""

    stage: int
    dtype: str = "fp32"
    ep: int = 0
    offload: bool = False

    def __str__(self) -> str:
        more = f" ep{self.ep}" * bool(self.ep) + " offload" * self.offload
        return f"stage{self.stage} {self.dtype}{more}"


CASES = (
    Case(stage=2, dtype="bf16"),
    Case(stage=1, dtype="fp16"),
    Case(stage=1, dtype="bf16", ep=2),
    Case(stage=3, dtype="bf16"),
    Case(stage=1),
    Case(stage=2, offload=True),
    Case(stage=0),
    Case(stage=0, dtype="bf16"),
    Case(stage=2, ep=2),
    Case(stage=3),
    Case(stage=3, dtype="fp16", offload=True),
)
IN_CI = 4


def comes_back_among_others(
    rank: int, world: int, directory: str, case: dict[str, Any], old: int
) -> None:
    from deepspeed_model import make_engine

    engine = make_engine(2, **case)
    session = open_session(engine, directory, rank, world, epoch=2, old=old)
    assert session.restore() == KILLED
    found, expected = full_state(engine), torch.load(f"{directory}-full")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    train(engine, rank, KILLED + 1, session)
    session.close()


def run(work: Callable[..., None], world: int, directory: Path, *more: Any) -> None:
    store = str(directory / f"{work.__name__}-{world}")
    run_ranks(in_world, (world, work, store, str(directory / "memory"), *more), world)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in CASES[:IN_CI]),
        *(pytest.param(case, id=str(case), marks=pytest.mark.exhaustive) for case in CASES[IN_CI:]),
    ],
)
def test_a_killed_run_ends_with_the_losses_and_bytes_of_an_undisturbed_one(
    tmp_path: Path, case: Case
) -> None:
    from deepspeed.accelerator import get_accelerator

    if case.dtype == "fp16" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed trains in float16 only on a processor that computes in it")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed, 2, tmp_path, asdict(case))
    run(comes_back, 2, tmp_path, asdict(case))


def loads_elsewhere(rank: int, world: int, directory: str, dtype: str) -> None:
    """A model without DeepSpeed loads the persisted set by parameter, and its export."""
    from deepspeed_model import Model

    tier, expected = f"{directory}-tier", torch.load(f"{directory}-full")
    export_dcp(HoldfastReader(tier, job=JOB), Path(f"{directory}-export"), model_only=True)
    for source in (
        {"storage_reader": HoldfastReader(tier, job=JOB)},
        {"checkpoint_id": f"{directory}-export"},
    ):
        model = Model().to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
        state = {name: p.detach() for name, p in model.named_parameters()}
        state_dict_loader.load(state, **source)
        assert [name for name, p in state.items() if not torch.equal(p, expected[name])] == []


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(2, "bf16"), (3, "bf16"), pytest.param(3, "fp32", marks=pytest.mark.exhaustive)],
)
def test_other_worlds_and_models_find_weights_masters_and_moments_by_parameter(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    case = asdict(Case(stage=stage, dtype=dtype))
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed, 2, tmp_path, case)
    persist(tmp_path / "memory", tmp_path / "memory-tier", 2, Generation(1, KILLED))
    run(loads_elsewhere, 1, tmp_path, dtype)
    for world in (1, 3):
        run(comes_back_among_others, world, tmp_path, case, 2)


def refusal_of(engine: Any, directory: str) -> str:
    with pytest.raises(InvalidJobError) as refusal:
        open_session(engine, directory, 0, 1, epoch=1)
    return str(refusal.value)


STAGE_3: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "states on NVMe": (
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
        {"swap_optimizer": True},
        "keeps states or weights on NVMe, which a session does not follow: set the device of "
        "zero_optimization.offload_optimizer and offload_param to cpu",
    ),
    "weights on NVMe": (
        {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
        {"params_in_nvme_and_cpu": True},
        "keeps states or weights on NVMe",
    ),
    "a part of the states offloaded": (
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"offload_optimizer": True, "partial_offload": 0.5},
        "steps a part of the states in an optimizer of its own, which a session does not follow: "
        "set zero_optimization.offload_optimizer.ratio to 1",
    ),
    "hpZ": (
        {"zero_hpz_partition_size": 2},
        {},
        "keeps a second partition of the weights, which a session does not follow: set "
        "zero_optimization.zero_hpz_partition_size to 1",
    ),
    "quantized weights": (
        {"zero_quantized_weights": True},
        {},
        "gathers weights that it has rounded to codes, which a session does not follow: set "
        "zero_optimization.zero_quantized_weights to false",
    ),
    "Muon": (
        {},
        {"use_muon": True},
        "computes one update from the whole of a matrix, of which a rank holds a part, which a "
        "session does not follow: set zero_optimization.stage to 2",
    ),
}
"""Settings of ZeRO stage 3, what its optimizer makes of them, and the refusal. No CPU can build
these engines: they need NVMe, compiled operators or several devices."""


def stage_3_is_refused(rank: int, world: int, directory: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed_model import make_engine

    engine = make_engine(1, stage=3)
    config, zero = engine._config.zero_config, engine.optimizer
    for case, (settings, made, words) in STAGE_3.items():
        before = {name: getattr(zero, name) for name in made}
        engine._config.zero_config = DeepSpeedZeroConfig(stage=3, **settings)
        vars(zero).update(made)
        assert f"ZeRO stage 3 {words}" in refusal_of(engine, directory), case
        vars(zero).update(before)
        engine._config.zero_config = config
    # Gradients in codes are not state.
    engine._config.zero_config = DeepSpeedZeroConfig(stage=3, zero_quantized_gradients=True)
    open_session(engine, directory, rank, world, epoch=1).close()


def test_what_a_session_could_not_hold_of_stage_3_is_refused(tmp_path: Path) -> None:
    run(stage_3_is_refused, 1, tmp_path)


def other_engines_are_refused(rank: int, world: int, directory: str) -> None:
    from deepspeed.runtime.zenflow.engine import configure_zenflow
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed_model import make_engine, make_pipeline

    assert "use ZeRO stage 1 or 2 without a PipelineModule" in refusal_of(
        make_pipeline(), directory
    )
    engine = make_engine(1, stage=1)
    routing = {"enabled": True, "random_ltd": {"enabled": True}}
    engine._config.data_efficiency_config["data_routing"] = routing
    assert "remove random_ltd from data_efficiency" in refusal_of(engine, directory)
    # ZenFlow compiles operators for the CPU, so its settings are put into a finished engine.
    for stage in (2, 3):
        engine = make_engine(1, stage=stage)
        engine._config.zero_config.zenflow = ZenFlowConfig(steps_per_epoch=10)
        configure_zenflow(engine)
        assert "remove zenflow from zero_optimization" in refusal_of(engine, directory)
    engine.zenflow = False
    engine.optimizer.__class__ = type("Changed", (type(engine.optimizer),), {})
    assert "the optimizer of ZeRO stage 3 is a Changed" in refusal_of(engine, directory)


def test_other_engines_are_refused(tmp_path: Path) -> None:
    run(other_engines_are_refused, 1, tmp_path)


def is_refused(rank: int, world: int, directory: str) -> None:
    """What a session could not hold is refused in words that name the setting."""
    from deepspeed_model import make_engine, train_step

    engine = make_engine(1, stage=3, frozen=True)
    assert "embed.weight is not trained" in refusal_of(engine, directory)
    engine = make_engine(1, stage=1)
    with torch.no_grad():
        engine.optimizer.single_partition_of_fp32_groups[0][3] += 1.0
    assert "set zero_optimization.round_robin_gradients to false" in refusal_of(engine, directory)
    # A save in the middle of an accumulation.
    engine = make_engine(1, stage=1)
    session = open_session(engine, directory, rank, world, epoch=1)
    session.restore()
    train_step(engine, rank)
    words = torch.zeros(2, 4, dtype=torch.long)
    engine.backward(engine(words))
    engine.step()
    error: Any = None
    try:
        error = session.save(engine.global_steps).committed.exception(WAIT_S)
    except InvalidJobError as raised:
        error = raised
    assert "a save after 1 of 2 micro-batches would lose their gradients" in str(error)
    session.close()


def test_what_a_session_could_not_hold_is_refused(tmp_path: Path) -> None:
    run(is_refused, 1, tmp_path)


def own_loops_are_needed(rank: int, world: int, directory: str) -> None:
    from deepspeed_model import make_engine

    from holdfast.integrations.deepspeed import protect

    engine = make_engine(1, stage=0)
    pipeline: Any = object()
    with pytest.raises(InvalidJobError, match="DeepSpeed cannot repeat the steps of a stage alone"):
        protect(engine, pipeline=pipeline)
    engine.module.add_module("seats", moe.SeatedExperts(4, 8, (0, 1), 2))
    assert "DeepSpeed reduces gradients as if all ranks had the" in refusal_of(engine, directory)


def test_what_only_a_loop_of_ones_own_can_train_is_refused(tmp_path: Path) -> None:
    run(own_loops_are_needed, 1, tmp_path)


def topologies(rank: int, world: int, directory: str) -> None:
    from deepspeed.utils import groups

    from holdfast.integrations.deepspeed import topology_of

    for ep in (1, 2, 4):
        groups._create_expert_and_data_parallel(ep)
        name = f"ep_size_{ep}"
        engine = SimpleNamespace(
            seq_data_parallel_group=dist.group.WORLD,
            expert_data_parallel_group={name: groups._get_expert_data_parallel_group(name)},
        )
        assert topology_of(engine) == Topology(dp=4, ep=ep)
    engine.expert_data_parallel_group["ep_size_2"] = groups._get_expert_data_parallel_group(
        "ep_size_2"
    )
    with pytest.raises(InvalidJobError, match="use one ep_size for all layers"):
        topology_of(engine)


def test_the_topology_is_that_of_deepspeeds_groups(tmp_path: Path) -> None:
    run(topologies, 4, tmp_path)


# --- policies -------------------------------------------------------------------------------------

SPREAD: dict[str, Any] = {"stage": 1, "dtype": "bf16", "ep": 2, "capacity": 1.0}
UNFLAT = SPREAD | {"stage": 0, "dtype": "fp32"}
POLICIES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "Full": (Full(), SPREAD),
    "PartialExperts": (PartialExperts(loss_limit=1.0), SPREAD),
    "LoadAware": (PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0), SPREAD),
    "Selective": (Selective(experts=3, loss_limit=1.0), SPREAD),
    "Selective, stage 2": (Selective(experts=3, loss_limit=1.0), SPREAD | {"stage": 2}),
    "Sparse, stage 0": (SparseWindows(window=2), UNFLAT),
    "Sparse, Optimizer, stage 0": (SparseWindows(window=2, repeats=Repeats.OPTIMIZER), UNFLAT),
    "LoadAware, stage 0": (
        PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0),
        UNFLAT,
    ),
}
Chosen = dict[tuple[int, int], int]
"""(Layer, expert) → tokens that were not dropped."""


def note_choices(engine: Any) -> tuple[Chosen, Chosen]:
    """Count, from now on and one by one, the tokens that DeepSpeed's gates send: those that reach
    an expert, and all of a layer, under the expert -1."""
    reaching, sent = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def note(layer: int, output: Any) -> None:
        if len(output) == 4:
            return
        _, _, _, experts, _, gates, _ = output
        for expert, gate in zip(experts.flatten().tolist(), gates.flatten().tolist(), strict=True):
            sent[layer, -1] += 1
            if gate:
                reaching[layer, expert] += 1

    for layer, block in enumerate(engine.module.layers):
        block.moe.deepspeed_moe.gate.register_forward_hook(
            lambda gate, inputs, output, layer=layer: note(layer, output)
        )
    return reaching, sent


def counts_tokens(rank: int, world: int, directory: str, choices: int, capacity: float) -> None:
    from deepspeed_model import EXPERTS, WIDTH, make_engine, train_step

    engine = make_engine(1, stage=1, dtype="bf16", ep=2, choices=choices, capacity=capacity)
    policy = PartialExperts(selection=ExpertChoice.LOAD_AWARE)
    session: Any = open_session(engine, directory, rank, world, epoch=1, policy=policy)
    session.restore()
    reaching, sent = note_choices(engine)
    train_step(engine, rank)
    counts, assigned = session._tokens.read()
    found = {(unit.layer, unit.expert): n for unit, n in counts.items() if n}
    assert found == {each: n for each, n in reaching.items() if n}
    assert assigned == {layer: n for (layer, _), n in sent.items()}
    assert (sum(found.values()) < sum(assigned.values())) == (capacity < 1.0)
    # Called by other code than DeepSpeed's layer, a gate may return masks.
    session._tokens = session._tokens.empty_copy()
    gate = engine.module.layers[0].moe.deepspeed_moe.gate
    generator = torch.Generator().manual_seed(rank)
    words = torch.randn(3, WIDTH, generator=generator, dtype=torch.bfloat16)
    *_, mask, _ = gate(words)
    counts, assigned = session._tokens.read()
    assert [counts[unit] for unit in sorted(counts)] == mask.any(-1).sum(0).tolist()
    assert len(counts) == EXPERTS and assigned == {0: 3 * choices}
    session.close()
    assert len(gate._forward_hooks) == 1, "only the test's own is left"


@pytest.mark.parametrize(
    ("choices", "capacity"),
    [
        (1, 0.5),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [(2, 0.5), (3, 0.5), (1, 4.0), (2, 4.0)]
        ),
    ],
)
def test_hooks_count_the_tokens_that_gates_send_and_those_that_reach_an_expert(
    tmp_path: Path, choices: int, capacity: float
) -> None:
    run(counts_tokens, 2, tmp_path, choices, capacity)


def held_state(engine: Any) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter: the weight, its master and its moments."""
    zero, found = engine.optimizer, {}
    if engine.zero_optimization_stage():
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        found[f"{name}:"] = p.detach().clone()
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None:
            found[f"{name}:master"] = mapping.hp_fragment.detach().clone()
            states = mapping.optim_fragment
        else:
            states = zero.state.get(p, {})
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}:{key}"] = value.detach().clone()
    return found


def expert_of(name: str) -> str:
    """Name of the expert that a tensor belongs to, if it does."""
    found = re.match(r".*deepspeed_experts\.\d+(?=\.)", name)
    return found[0] if found else ""


def is_killed_under(
    rank: int, world: int, directory: str, case: dict[str, Any], policy: Policy
) -> None:
    from deepspeed_model import digests_of, make_engine, train_step

    torch.use_deterministic_algorithms(True)
    if not policy.leaves_experts_out:
        engine = make_engine(1, **case)
        train(engine, rank, STEPS)
        torch.save(digests_of(engine), f"{directory}-{rank}")
    engine = make_engine(1, **case)
    session: Any = open_session(engine, directory, rank, world, epoch=1, policy=policy)
    session.restore()
    (reaching, _), noted = note_choices(engine), []
    while engine.global_steps < KILLED:
        train_step(engine, rank)
        session.save(engine.global_steps)
        wait_saved(session, WAIT_S)
        assert session.counters.failed == session.counters.skipped == 0, session.counters
        noted.append((held_state(engine), Counter(reaching)))
    torch.save(noted, f"{directory}-noted{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back_under(
    rank: int, world: int, directory: str, case: dict[str, Any], policy: Policy
) -> None:
    from deepspeed_model import digests_of, make_engine, train_step

    torch.use_deterministic_algorithms(True)
    engine = make_engine(2, **case)
    session: Any = open_session(engine, directory, rank, world, epoch=2, policy=policy)
    with messages_of("holdfast") as told:
        done = session.restore()
    assert done == engine.global_steps
    lost = []
    if policy.leaves_experts_out:
        assert done == KILLED
        lost = tokens_lost(engine, rank, world, directory)
        # The capacity of a gate is one number, which all ranks must share.
        (warning,) = [one for one in told if "no capacity" in one]
        assert "the routers of layers [0, 1] have no capacity that could differ" in warning
    while engine.global_steps < STEPS:
        train_step(engine, rank)
        session.save(engine.global_steps)
        wait_saved(session, WAIT_S)
    if policy.leaves_experts_out:
        assert list(session.counters.loss.report.lost) == lost
    session.close()
    if not policy.leaves_experts_out:
        found, expected = digests_of(engine), torch.load(f"{directory}-{rank}")
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def tokens_lost(engine: Any, rank: int, world: int, directory: str) -> list[int]:
    """Check what this rank has restored; return for each layer the tokens of all ranks that were
    sent to its experts since the steps to which these have gone back. Collective."""
    noted = [torch.load(f"{directory}-noted{one}", weights_only=False) for one in range(world)]
    own = steps_of_experts(held_state(engine), [state for state, _ in noted[rank]], expert_of)
    lost = torch.zeros(len(engine.module.layers), dtype=torch.int64)
    for name, step in own.items():
        layer, expert = int(name.split(".")[1]), int(name.rpartition(".")[2])
        each = layer, rank * len(own) // len(lost) + expert
        lost[layer] += sum(one[-1][1][each] - one[step][1][each] for one in noted)
    dist.all_reduce(lost)
    found: list[int] = lost.tolist()
    return found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "LoadAware" else pytest.mark.exhaustive)
        for kind in POLICIES
    ],
)
def test_a_killed_run_comes_back_as_its_policy_promises(tmp_path: Path, kind: str) -> None:
    policy, case = POLICIES[kind]
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed_under, 2, tmp_path, case, policy)
    run(comes_back_under, 2, tmp_path, case, policy)


def windows_are_refused(rank: int, world: int, directory: str) -> None:
    from deepspeed_model import make_engine

    for stage in (1, 2, 3):
        with pytest.raises(InvalidJobError, match="an optimizer with flat tensors cannot take"):
            open_session(
                make_engine(1, stage=stage),
                directory,
                rank,
                world,
                epoch=1,
                policy=SparseWindows(window=2),
            )


def test_sparse_windows_with_zero_are_refused(tmp_path: Path) -> None:
    run(windows_are_refused, 1, tmp_path)
