"""Models and optimizers of Megatron-Core, whose ranks are killed and come back.

`make test-megatron` runs this in an environment that has Megatron-Core.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kept_experts import steps_of_experts
from log_messages import messages_of
from megatron_runs import (
    KILLED,
    STEPS,
    WAIT_S,
    comes_back,
    full_state,
    in_world,
    is_killed,
    open_session,
    same,
    train,
)
from ranks import run_ranks
from stored import JOB, persist
from waiting import wait_for, wait_saved

from holdfast import moe
from holdfast.dcp import HoldfastReader
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

if TYPE_CHECKING:
    from megatron_model import Trained

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs make test-megatron"
    ),
]

CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (4, {"ep": 2, "experts": 4}),
    (2, {"tp": 2}),
    (2, {"distributed": False, "ep": 2, "experts": 4}),
    (2, {"pp": 2}),
    (2, {"dtype": "fp16"}),
    (2, {"dtype": "fp32", "experts": 2}),
    (2, {"dtype": "fp32", "distributed": False}),
    (4, {"tp": 2, "pp": 2}),
    (2, {"tp": 2, "sequence": True}),
    (4, {"tp": 2, "sequence": True, "ep": 2, "experts": 4}),
    (2, {"pp": 2, "vpp": 2}),
    (4, {"distributed": False, "pp": 2, "vpp": 2}),
    (4, {"distributed": False, "dtype": "fp16", "pp": 2}),
)
"""Ranks, and settings of `megatron_model.Case`."""
IN_CI = 5
COMPUTE_S = 0.2
"""Seconds that the first stage computes for a microbatch."""


def name_of(row: tuple[int, dict[str, Any]]) -> str:
    return " ".join([f"{row[0]} ranks", *(f"{key} {value}" for key, value in row[1].items())])


def comes_back_among_others(
    rank: int, world: int, directory: str, case: dict[str, Any], old: int
) -> None:
    from megatron_model import Case, Trained

    trained = Trained(2, Case(**case))
    session = open_session(trained, directory, rank, world, epoch=2, old=old)
    assert session.restore() == KILLED
    same(full_state(trained), torch.load(f"{directory}-full{min(rank, 1)}"))
    train(trained, KILLED + 1, KILLED + 1, session)
    session.close()


def run(work: Callable[..., None], world: int, directory: Path, *more: Any) -> None:
    store = str(directory / f"{work.__name__}-{world}")
    arguments = (world, work, store, str(directory / "memory"), *more)
    run_ranks(in_world, arguments, world, "megatron_model")


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        *(pytest.param(*row, id=name_of(row)) for row in CASES[:IN_CI]),
        *(
            pytest.param(*row, id=name_of(row), marks=pytest.mark.exhaustive)
            for row in CASES[IN_CI:]
        ),
    ],
)
def test_a_killed_run_ends_with_the_losses_and_bytes_of_an_undisturbed_one(
    tmp_path: Path, ranks: int, case: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed, ranks, tmp_path, case)
    run(comes_back, ranks, tmp_path, case)


def test_other_worlds_find_masters_and_moments_by_parameter(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed, 2, tmp_path, {})
    for world in (1, 3):
        run(comes_back_among_others, world, tmp_path, {}, 2)


def tell_of_bubbles(session: Any, file: Path) -> None:
    """Make a file when a wait that is marked begins."""
    bubbles = session._saver.bubbles
    bubble = bubbles.bubble

    @contextmanager
    def told() -> Iterator[None]:
        with bubble():
            file.touch()
            yield

    bubbles.bubble = told


def waits_are_marked(rank: int, world: int, directory: str, *cases: dict[str, Any]) -> None:
    """The second stage waits while the first one computes, and its waits are marked."""
    from megatron.core import parallel_state
    from megatron_model import Case, Trained, use_groups

    for number, case in enumerate(cases):
        parallel_state.destroy_model_parallel()
        use_groups(Case(**case))
        trained, waits = Trained(1, Case(**case)), Path(f"{directory}-waits-{number}")
        session = open_session(trained, f"{directory}-{number}", rank, world, epoch=1)
        session.restore()
        train(trained, 1, 1, session)  # The first save begins to mark waits.

        def compute(*_: Any, waits: Path = waits) -> None:
            wait_for("the second stage to wait", waits.exists, WAIT_S)
            time.sleep(COMPUTE_S)

        for chunk in trained.chunks if rank == 0 else ():
            chunk.register_forward_pre_hook(compute)
        if rank == 1:
            tell_of_bubbles(session, waits)
        before = session.counters.bubble_s
        train(trained, 2, 2, session)
        if rank == 1:
            assert session.counters.bubble_s - before >= COMPUTE_S * 0.9, case
        session.close()


def test_waits_for_other_stages_are_marked(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"vpp": 2}, {"varying": True}]
    run(waits_are_marked, 2, tmp_path, *({"pp": 2} | case for case in cases))


def loads_into_fsdp2(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from megatron.core.utils import unwrap_model
    from megatron_model import Case, Trained
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = unwrap_model(Trained(3, Case(**case, distributed=False, dtype="fp32")).model)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"optim": get_optimizer_state_dict(model, optimizer)}
    moments = state["optim"]["state"]
    # The masters are what a model in float32 trains.
    masters = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in masters.items():
        moments[name]["master"] = p
    reader = HoldfastReader(f"{directory}-tier", job=JOB)
    state_dict_loader.load(state, storage_reader=reader)
    expected = torch.load(f"{directory}-full0")
    for name, states in moments.items():
        for key in ("master", "exp_avg", "exp_avg_sq"):
            found = states[key].full_tensor()
            assert torch.equal(found, expected[f"{name}.{key}"]), (name, key)


def test_a_persisted_set_loads_into_fsdp2_by_parameter(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        run(is_killed, 2, tmp_path, {})
    persist(tmp_path / "memory", tmp_path / "memory-tier", 2, Generation(1, KILLED))
    run(loads_into_fsdp2, 2, tmp_path, {})


def checkpoints_beside(rank: int, world: int, directory: str) -> None:
    """Megatron's own checkpoints, taken between saves, hold what a snapshot holds."""
    from megatron.core import dist_checkpointing
    from megatron_model import Case, Trained

    def described(trained: Trained) -> dict[str, Any]:
        found: dict[str, Any] = trained.model.module.module.sharded_state_dict()
        return found

    trained = Trained(1, Case())
    session = open_session(trained, directory, rank, world, epoch=1)
    session.restore()
    train(trained, 1, 2, session)
    where = Path(f"{directory}-megatron")
    if rank == 0:
        where.mkdir()
    dist.barrier()
    dist_checkpointing.save(described(trained), str(where))
    trained.optimizer.save_parameter_state(f"{directory}-optimizer")
    settings, state = trained.optimizer.state_dict(), full_state(trained)
    train(trained, 3, KILLED, session)
    session.close()
    loaded = Trained(2, Case())
    model = dist_checkpointing.load(described(loaded), str(where))
    loaded.model.module.module.load_state_dict(model)
    loaded.optimizer.load_state_dict(settings)
    loaded.optimizer.load_parameter_state(f"{directory}-optimizer")
    same(full_state(loaded), state)
    # The snapshot is a later one.
    restored = Trained(2, Case())
    session = open_session(restored, directory, rank, world, epoch=2)
    assert session.restore() == KILLED
    session.close()
    same(full_state(restored), full_state(trained))


def test_megatrons_own_checkpoints_go_on_working_beside(tmp_path: Path) -> None:
    run(checkpoints_beside, 2, tmp_path)


def are_refused(rank: int, world: int, directory: str) -> None:
    """What a session could not hold is refused in words that name the setting."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron_model import Case, Trained

    def refused(trained: Trained, **more: Any) -> str:
        with pytest.raises(InvalidJobError) as refusal:
            open_session(trained, directory, rank, world, epoch=1, **more)
        return str(refusal.value)

    trained = Trained(1, Case())
    windows = SparseWindows(window=2)
    assert "an optimizer with flat tensors cannot take" in refused(trained, policy=windows)
    trained.model.ddp_config.overlap_param_gather = True
    assert "set it to False in DistributedDataParallelConfig" in refused(trained)
    trained.model.ddp_config.overlap_param_gather = False
    trained.model.ddp_config.num_distributed_optimizer_instances = 2
    assert "set num_distributed_optimizer_instances to 1" in refused(trained)
    trained.model.ddp_config.num_distributed_optimizer_instances = 1
    (one,) = trained.inner()
    one.config.use_precision_aware_optimizer = True
    assert "OptimizerConfig.use_precision_aware_optimizer keeps masters" in refused(trained)
    one.config.use_precision_aware_optimizer = False
    one.optimizer.param_groups[0]["params"][0].data[3] += 1.0
    assert "but other values are there: call protect before" in refused(trained)
    # A generator that is captured in CUDA graphs, at the first save.
    trained = Trained(1, Case())
    session = open_session(trained, directory, rank, world, epoch=1)
    session.restore()
    get_cuda_rng_tracker().states_["of a graph"] = torch.Generator()
    error: Any = None
    try:
        error = session.save(1).committed.exception(WAIT_S)
    except InvalidJobError as raised:
        error = raised
    assert "call initialize_rng_tracker without use_cudagraphable_rng" in str(error)
    session.close()


def test_what_a_session_could_not_hold_is_refused(tmp_path: Path) -> None:
    run(are_refused, 1, tmp_path)


def own_loops_are_needed(rank: int, world: int, directory: str) -> None:
    from megatron_model import Case, Trained

    trained = Trained(1, Case())
    for pipeline, why in (
        (object(), "Megatron-Core cannot repeat the steps of a stage alone"),
        (None, "Megatron-Core reduces gradients as if all ranks had the same experts"),
    ):
        with pytest.raises(InvalidJobError, match=why):
            open_session(trained, directory, rank, world, epoch=1, pipeline=pipeline)
        trained.model.add_module("seats", moe.SeatedExperts(4, 8, (0, 1), 2))


def test_what_only_a_loop_of_ones_own_can_train_is_refused(tmp_path: Path) -> None:
    run(own_loops_are_needed, 1, tmp_path)


def topologies(rank: int, world: int, directory: str) -> None:
    from megatron.core import parallel_state

    from holdfast.integrations.megatron import topology_of_groups

    def made(tp: int, pp: int, **more: Any) -> Topology:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp, **more)
        return topology_of_groups()

    for tp, pp, ep in ((1, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)):
        topology = Topology(dp=4 // tp // pp, tp=tp, pp=pp, ep=ep)
        assert made(tp, pp, expert_model_parallel_size=ep) == topology
    assert made(1, 1, context_parallel_size=2) == Topology(dp=4)
    with pytest.raises(InvalidJobError, match="with the default order"):
        made(1, 2, order="tp-cp-ep-pp-dp")
    with pytest.raises(InvalidJobError, match="leave expert_tensor_parallel_size out"):
        made(2, 1, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    with pytest.raises(InvalidJobError, match="leave expert_tensor_parallel_size out"):
        made(1, 1, expert_tensor_parallel_size=2)


def test_the_topology_is_that_of_megatrons_groups(tmp_path: Path) -> None:
    run(topologies, 4, tmp_path)


def name_layers(rank: int, world: int, directory: str) -> None:
    """Layers have their numbers in the whole model, in each stage and in each of its chunks."""
    from megatron.core import tensor_parallel
    from megatron_model import Case, make_chunk, make_config

    from holdfast.integrations.megatron import whole_model

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = make_config(Case())
    chunks = [make_chunk(config, first=not i, last=bool(i)) for i in range(2)]
    for layer in chunks[1].decoder.layers:
        layer.layer_number += 2
    both = whole_model(chunks)
    names = [name for name, _ in both.named_parameters()]
    assert len(names) == sum(len(list(chunk.parameters())) for chunk in chunks)
    assert {name for name, _ in chunks[0].named_parameters()} < {*names}
    found = {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")}
    assert found == {0, 1, 2, 3}
    assert both.training
    chunks[0].eval()
    assert not both.training
    with pytest.raises(InvalidJobError, match="give the chunks of one pipeline stage"):
        whole_model([chunks[0], chunks[0]])


def test_layers_have_their_numbers_in_the_whole_model(tmp_path: Path) -> None:
    run(name_layers, 1, tmp_path)


def name_grouped_experts(rank: int, world: int, directory: str) -> None:
    """Experts of a grouped layer have the names of listed ones. TransformerEngine, which makes such
    layers, needs a GPU: modules with the names of its tensors take its place."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from torch import nn

    from holdfast.integrations.megatron import whole_model

    class Grouped(TEGroupedMLP):  # type: ignore[misc]  # the package is not type-checked
        def __init__(self) -> None:
            nn.Module.__init__(self)
            for layer in ("linear_fc1", "linear_fc2"):
                self.add_module(layer, nn.Module())
                for i in range(12):
                    weight = nn.Parameter(torch.zeros(2, 2))
                    self.get_submodule(layer).register_parameter(f"weight{i}", weight)

    experts = Grouped()
    model = nn.ModuleDict({"experts": experts})
    found = dict(whole_model([model]).named_parameters())
    assert len(found) == 24
    for i in range(12):
        weight = experts.get_parameter(f"linear_fc2.weight{i}")
        assert found[f"experts.local_experts.{i}.linear_fc2.weight"] is weight
    experts.linear_fc1.register_parameter("weight", nn.Parameter(torch.zeros(12, 2, 2)))
    with pytest.raises(InvalidJobError, match="set moe_grouped_gemm to False"):
        whole_model([model])


def test_grouped_experts_are_called_as_listed_ones(tmp_path: Path) -> None:
    run(name_grouped_experts, 1, tmp_path)


# --- policies -------------------------------------------------------------------------------------

SPREAD: dict[str, Any] = {"dtype": "fp32", "distributed": False, "ep": 2, "experts": 4}
FLAT = SPREAD | {"distributed": True}
POLICIES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "Full": (Full(), SPREAD),
    "Sparse": (SparseWindows(window=2), SPREAD),
    "Sparse, Optimizer": (SparseWindows(window=2, repeats=Repeats.OPTIMIZER), SPREAD),
    "PartialExperts": (PartialExperts(loss_limit=1.0), SPREAD),
    "LoadAware": (PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0), SPREAD),
    "Selective": (Selective(experts=3, loss_limit=1.0), SPREAD),
    "Selective, capacity": (Selective(experts=3, loss_limit=1.0), SPREAD | {"capacity": 0.5}),
    "PartialExperts, flat": (PartialExperts(loss_limit=1.0), FLAT),
    "LoadAware, flat": (PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0), FLAT),
    "Selective, flat": (Selective(experts=3, loss_limit=1.0), FLAT),
}


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    """All parameters of this rank, and what the optimizers keep for them."""
    found = {}
    for place, (name, p) in enumerate(trained.model.named_parameters()):
        found[f"{name}:"] = p.detach().clone()
        for one in trained.inner():
            held, ranges = p, getattr(one, "model_param_group_index_map", {})
            if p in ranges:  # this rank's range of it, in the distributed optimizer
                group, number = ranges[p]
                held = one.optimizer.param_groups[group]["params"][number]
                found[f"{name}:master"] = held.detach().clone()
            for key, value in one.optimizer.state.get(held, {}).items():
                if isinstance(value, torch.Tensor):
                    # All parameters of that one have made as many steps, which is no expert's.
                    common = held is not p and key == "step"
                    found[f"steps of {place}" if common else f"{name}:{key}"] = (
                        value.detach().clone()
                    )
    return found


def note_choices(trained: Trained) -> dict[tuple[int, int], int]:
    """Count, from now on and one by one, the tokens that Megatron's routers send."""
    from megatron.core.transformer.moe.router import TopKRouter

    chosen: dict[tuple[int, int], int] = Counter()

    def note(router: Any, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            for row in output[1].tolist():
                for expert, sent in enumerate(row):
                    chosen[router.layer_number - 1, expert] += sent

    for module in trained.model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(note)
    return chosen


def counts_tokens(rank: int, world: int, directory: str, case: dict[str, Any]) -> None:
    from megatron_model import Case, Trained

    for recomputed in (False, True):
        trained = Trained(1, Case(**case))
        if recomputed:
            trained.config.recompute_granularity = "full"
            trained.config.recompute_method = "uniform"
            trained.config.recompute_num_layers = 1
        policy = PartialExperts(selection=ExpertChoice.LOAD_AWARE)
        where = f"{directory}-{recomputed}"
        session: Any = open_session(trained, where, rank, world, epoch=1, policy=policy)
        session.restore()
        chosen = note_choices(trained)
        train(trained, 1, 2)
        counts, assigned = session._tokens.read()
        assert {(unit.layer, unit.expert): n for unit, n in counts.items()} == chosen
        reached, sent = sum(chosen.values()), sum(assigned.values())
        assert 0 < reached <= sent and (reached < sent) == ("capacity" in case)
        session.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SPREAD, id="", marks=pytest.mark.exhaustive),
        pytest.param(FLAT, id="distributed optimizer"),
        pytest.param(SPREAD | {"capacity": 0.5}, id="capacity", marks=pytest.mark.exhaustive),
    ],
)
def test_hooks_count_what_routers_send_to_the_experts_of_all_ranks(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    run(counts_tokens, 2, tmp_path, case)


def is_killed_under(
    rank: int, world: int, directory: str, case: dict[str, Any], policy: Policy
) -> None:
    from megatron_model import Case, Trained

    torch.use_deterministic_algorithms(True)
    if not policy.leaves_experts_out:
        trained = Trained(1, Case(**case))
        train(trained, 1, STEPS)
        torch.save(trained.digests(), f"{directory}-{rank}")
    trained = Trained(1, Case(**case))
    session: Any = open_session(trained, directory, rank, world, epoch=1, policy=policy)
    session.restore()
    noted = []
    for iteration in range(1, KILLED + 1):
        trained.step(iteration)
        session.save(iteration)
        wait_saved(session, WAIT_S)
        assert session.counters.failed == session.counters.skipped == 0, session.counters
        noted.append(tensors(trained))
    torch.save(noted, f"{directory}-noted{rank}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def comes_back_under(
    rank: int, world: int, directory: str, case: dict[str, Any], policy: Policy
) -> None:
    from megatron_model import Case, Trained

    torch.use_deterministic_algorithms(True)
    trained = Trained(2, Case(**case))
    session: Any = open_session(trained, directory, rank, world, epoch=2, policy=policy)
    with messages_of("holdfast") as told:
        done = session.restore()
    if policy.leaves_experts_out:
        assert done == KILLED
        # A capacity factor is one number, which all ranks must share.
        (warning,) = [one for one in told if "no capacity" in one]
        assert "the routers of layers [0, 1] have no capacity that could differ" in warning
        steps_of_experts(tensors(trained), torch.load(f"{directory}-noted{rank}"), expert_of)
    for iteration in range(done + 1, STEPS + 1):
        trained.step(iteration)
        session.save(iteration)
        wait_saved(session, WAIT_S)
    session.close()
    if not policy.leaves_experts_out:
        found, expected = trained.digests(), torch.load(f"{directory}-{rank}")
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def expert_of(name: str) -> str:
    """Name of the expert that a tensor belongs to, if it does."""
    return name.partition(".linear_fc")[0] if ".experts." in name else ""


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
