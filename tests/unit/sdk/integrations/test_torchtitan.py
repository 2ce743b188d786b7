"""torchtitan's Trainer goes on after a restart as if nothing had happened.

`make test-torchtitan` runs this in an environment that has torchtitan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from waiting import wait_for, wait_saved

import holdfast
from holdfast import moe, topology_from_device_mesh
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.job.snapshots import (
    ExpertChoice,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

STEPS, KILLED_AFTER, CHECKPOINT_AT = 6, 3, 2
WAIT_S = 60.0
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Killed(Exception):
    """Ends training where a process would be killed."""


@pytest.fixture
def titan() -> Any:
    """The integration, with torchtitan on CPU."""
    pytest.importorskip("torchtitan")
    import torchtitan_on_cpu  # noqa: F401

    import holdfast.integrations.torchtitan

    return holdfast.integrations.torchtitan


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    from torchtitan_assets import make_assets

    return make_assets(tmp_path / "assets")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variables of a launcher's only rank."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Run:
    """Trainings of one job, whose folder they share."""

    def __init__(self, titan: Any, assets: Path, folder: Path) -> None:
        self._titan, self._assets, self._folder = titan, assets, folder
        self.policy: Policy | None = None
        self.recomputes = ""
        """Class of torchtitan's that checkpoints activations; empty for its default."""
        self.report: LossReport | None = None
        """What the newest save has stated about tokens."""
        self.chosen: list[Counter[tuple[int, int]]] = []
        """After each step of the newest training, (layer, expert) → tokens, counted one by one."""

    def train(self, daemon: FakeDaemon | None, kill_after: int = 0, checkpoints: int = 0) -> int:
        """Train to the end, or until the process dies after a step; return the step before the
        first one.

        Args:
            checkpoints: steps between two checkpoints of torchtitan's own; 0 for none.
        """
        trainer = self.configured(daemon, checkpoints).build()
        save = trainer.checkpointer.save
        started: list[int] = []
        chosen = note_choices(trainer)
        self.chosen = [Counter()]

        def save_and_die(step: int, last_step: bool = False) -> bool:
            started.append(step - 1)
            saved: bool = save(step, last_step=last_step)
            # A sparse window is committed at its end.
            if daemon is not None and step <= kill_after and self.policy is None:
                generation = Generation(daemon.epoch, step)
                wait_for("the snapshot", lambda: generation in committed(daemon), WAIT_S)
            self.chosen.append(Counter(chosen))
            if self.policy is not None:
                session = trainer.checkpointer.session
                wait_saved(session, WAIT_S)
                self.report = session.counters.loss.report
                assert session.counters.failed == session.counters.skipped == 0, session.counters
            if step == kill_after:
                raise Killed
            return saved

        trainer.checkpointer.save = save_and_die
        try:
            trainer.train()
        except Killed:
            assert kill_after
        finally:
            trainer.close()
            dist.destroy_process_group()
        return started[0]

    def configured(self, daemon: FakeDaemon | None, checkpoints: int) -> Any:
        """Configuration of a trainer, which a daemon protects."""
        import torchtitan_trainer

        config = torchtitan_trainer.tiny_moe()
        config.training.steps = STEPS
        config.hf_assets_path = str(self._assets / "tokenizer")
        config.dataloader.dataset_path = str(self._assets / "data")
        config.dump_folder = str(self._folder)
        config.checkpoint.enable = checkpoints > 0
        config.checkpoint.interval = checkpoints or 1
        config.checkpoint.last_save_model_only = False
        if self.recomputes:
            from torchtitan.distributed import activation_checkpoint

            config.activation_checkpoint = getattr(activation_checkpoint, self.recomputes).Config()
        if daemon is not None:
            settings = holdfast.Settings(policy=self.policy, start_wait_s=WAIT_S)
            config.checkpoint = self._titan.protect(
                config.checkpoint, daemon=daemon, settings=settings
            )
        return config

    def outcome(self) -> tuple[dict[int, float], dict[str, str]]:
        """Loss of each step, and digests of the state at the end."""
        lines = map(json.loads, (self._folder / "log-0").read_text().splitlines())
        state = json.loads((self._folder / "state-0").read_text())
        return {line["step"]: line["loss"] for line in lines}, state


def note_choices(trainer: Any) -> Counter[tuple[int, int]]:
    """Count, from now on and one by one, what torchtitan's routers choose in training."""
    from torchtitan.models.common.moe import TokenChoiceTopKRouter

    chosen: Counter[tuple[int, int]] = Counter()

    def note(layer: int, router: Any, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            for expert in output[1].reshape(-1).tolist():
                chosen[layer, expert] += 1

    for part in trainer.model_parts:
        for path, module in part.named_modules():
            if isinstance(module, TokenChoiceTopKRouter):
                layer = next(int(one) for one in path.split(".") if one.isdigit())
                module.register_forward_hook(partial(note, layer))
    return chosen


def committed(daemon: FakeDaemon) -> list[Generation]:
    return [manifest.generation for manifest in daemon.manifests]


@pytest.fixture
def run(titan: Any, assets: Path, process: None, tmp_path: Path) -> Run:
    return Run(titan, assets, tmp_path / "run")


@pytest.fixture
def undisturbed(titan: Any, assets: Path, process: None, tmp_path: Path) -> Any:
    whole = Run(titan, assets, tmp_path / "whole")
    assert whole.train(None) == 0
    return whole.outcome()


pytestmark = [
    pytest.mark.timeout(300),
    # What torchtitan and what it imports warn of on CPU.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("checkpoints", [0, CHECKPOINT_AT])
def test_training_that_dies_after_a_step_ends_with_the_same_losses_and_bytes(
    run: Run, undisturbed: Any, tmp_path: Path, checkpoints: int
) -> None:
    memory = tmp_path / "memory"
    assert run.train(FakeDaemon(memory), KILLED_AFTER, checkpoints) == 0
    # What torchtitan itself has saved is older.
    assert run.train(FakeDaemon(memory, epoch=2), 0, checkpoints) == KILLED_AFTER
    assert run.outcome() == undisturbed


@pytest.mark.parametrize(
    "recomputes",
    [
        pytest.param("", marks=pytest.mark.exhaustive),
        pytest.param("FullAC", marks=pytest.mark.exhaustive),
        "SelectiveAC",
    ],
)
def test_hooks_count_what_routers_choose(run: Run, tmp_path: Path, recomputes: str) -> None:
    import torchtitan_on_cpu

    run.policy, run.recomputes = PartialExperts(selection=ExpertChoice.LOAD_AWARE), recomputes
    run.train(FakeDaemon(tmp_path / "memory"), kill_after=2)
    layers = range(torchtitan_on_cpu.LAYERS)
    routed = [sum(n for (at, _), n in run.chosen[2].items() if at == layer) for layer in layers]
    assert run.report is not None
    assert list(run.report.routed) == routed
    # The first snapshot has all experts, and the second has one of each layer.
    in_second = run.chosen[2] - run.chosen[1]
    for layer, at_risk in zip(layers, run.report.at_risk, strict=True):
        of_layer = [n for (at, _), n in in_second.items() if at == layer]
        assert sum(of_layer) - at_risk in [*of_layer, 0]


POLICIES = {
    "Sparse": SparseWindows(window=2),
    "Sparse, Optimizer": SparseWindows(window=2, repeats=Repeats.OPTIMIZER),
    "PartialExperts": PartialExperts(loss_limit=1.0),
    "LoadAware": PartialExperts(selection=ExpertChoice.LOAD_AWARE, loss_limit=1.0),
    "Selective": Selective(experts=3, loss_limit=1.0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.usefixtures("deterministic")
def test_a_policy_keeps_what_it_promises(
    run: Run, undisturbed: Any, tmp_path: Path, kind: str
) -> None:
    run.policy, memory = POLICIES[kind], tmp_path / "memory"
    run.train(FakeDaemon(memory), KILLED_AFTER)
    begun = run.train(FakeDaemon(memory, epoch=2))
    if not run.policy.leaves_experts_out:
        assert run.outcome() == undisturbed
        return
    assert begun == KILLED_AFTER
    assert run.report is not None
    assert sum(run.report.lost) > 0
    assert run.outcome()[0].keys() == undisturbed[0].keys()


def test_without_anything_to_restore_a_checkpoint_of_torchtitans_own_is_loaded(
    run: Run, undisturbed: Any, tmp_path: Path
) -> None:
    run.train(FakeDaemon(tmp_path / "lost"), KILLED_AFTER, CHECKPOINT_AT)
    assert run.train(FakeDaemon(tmp_path / "empty"), 0, CHECKPOINT_AT) == CHECKPOINT_AT
    assert run.outcome() == undisturbed


def test_every_layer_has_units_and_experts_of_its_own(run: Run, tmp_path: Path) -> None:
    import torchtitan_on_cpu

    run.train(FakeDaemon(tmp_path / "memory"), kill_after=1)
    (path,) = tmp_path.glob("memory/*/layout.json")
    units = {UnitKey.parse(entry.unit) for entry in decode_layout(path.read_bytes()).entries}
    experts = {(unit.layer, unit.expert) for unit in units if unit.kind is UnitKind.EXPERT}
    numbers = range(torchtitan_on_cpu.LAYERS)
    assert experts == {(at, e) for at in numbers for e in range(torchtitan_on_cpu.EXPERTS)}
    assert {unit.layer for unit in units if unit.kind is UnitKind.DENSE} == set(numbers)


def test_the_manager_inside_keeps_its_configuration_and_the_trainer_sees_it(titan: Any) -> None:
    import torchtitan_on_cpu
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = torchtitan_on_cpu.tiny_moe()
    config.checkpoint.interval = 7
    configured = config.checkpoint
    target = f"{titan.__name__}.protect"
    apply_overrides(OverrideConfig(imports=[target]), config)
    assert isinstance(config.checkpoint, titan.ProtectedCheckpointManager.Config)
    assert config.checkpoint.inner is configured
    assert (config.checkpoint.interval, config.checkpoint.enable) == (7, configured.enable)


@pytest.fixture
def staying(titan: Any, assets: Path, process: None, tmp_path: Path) -> Iterator[Any]:
    """Starts a world of one rank, and builds a trainer for it."""
    worlds = []

    def built(change: Callable[[Any], None]) -> tuple[Any, Any]:
        config = Run(titan, assets, tmp_path / "run").configured(None, checkpoints=0)
        change(config)
        worlds.append(titan.start(config))
        return config.build(), worlds[0]

    yield built
    for world in worlds:
        world.close()


def test_our_train_does_what_that_of_torchtitan_does(
    titan: Any, staying: Any, run: Run, undisturbed: Any
) -> None:
    trainer, world = staying(lambda config: None)
    titan.train(trainer, world)
    trainer.close()
    assert run.outcome() == undisturbed


def leave_out_the_seed(config: Any) -> None:
    config.debug.seed = None


def make_a_seed_checkpoint(config: Any) -> None:
    config.checkpoint.create_seed_checkpoint = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leave_out_the_seed, "give --debug.seed"),
        (make_a_seed_checkpoint, "make it with `-m torchtitan.train`"),
    ],
)
def test_a_trainer_that_a_new_process_could_not_build_alone_is_refused(
    titan: Any, staying: Any, change: Callable[[Any], None], message: str
) -> None:
    trainer, world = staying(change)
    with pytest.raises(InvalidJobError, match=message):
        titan.train(trainer, world)


def test_what_only_a_loop_of_ones_own_can_train_is_refused(titan: Any, staying: Any) -> None:
    trainer, world = staying(lambda config: None)
    arguments = trainer.checkpointer._arguments
    arguments["pipeline"] = object()
    with pytest.raises(InvalidJobError, match="torchtitan cannot repeat the steps of a stage"):
        titan.train(trainer, world)
    del arguments["pipeline"]
    trainer.model_parts[0].add_module("seats", moe.SeatedExperts(4, 8, (0, 1), 2))
    with pytest.raises(InvalidJobError, match="torchtitan reduces gradients as if all ranks had"):
        titan.train(trainer, world)


def test_other_parallelism_than_fsdp2_and_hsdp_is_refused(titan: Any, staying: Any) -> None:
    from torchtitan.distributed import ParallelDims

    trainer, world = staying(lambda config: None)
    trainer.parallel_dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=2, ep=1, world_size=2
    )
    with pytest.raises(InvalidJobError, match="with FSDP2 and HSDP only"):
        titan.train(trainer, world)


def test_a_trainer_that_was_built_without_start_is_refused(
    titan: Any, staying: Any, run: Run
) -> None:
    trainer, world = staying(lambda config: None)
    trainer.checkpointer = run.configured(None, checkpoints=0).checkpoint.build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={},
        sd_adapter=None, base_folder="",
    )  # fmt: skip
    with pytest.raises(InvalidJobError, match="which protects nothing"):
        titan.train(trainer, world)


DEGREES = [
    {"dp_shard": 8},
    {"dp_shard": 4, "tp": 2},
    {"dp_shard": 2, "tp": 2, "pp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"dp_shard": 8, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 4, "ep": 2},
    {"dp_shard": 4, "pp": 2, "ep": 4},
]


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_topology_numbers_the_ranks_as_the_meshes_of_torchtitan_do(
    titan: Any, degrees: dict[str, int]
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import ParallelDims

    ones = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            dims = ParallelDims(**ones | degrees, world_size=8, spmd_backend="partial_dtensor")
            meshes = {name: dims.get_optional_mesh(name) for name in ("pp", "tp", "ep")}
            at = {name: mesh.get_local_rank() if mesh else 0 for name, mesh in meshes.items()}
            found = topology_from_device_mesh(dims).coordinates(rank)
        finally:
            dist.destroy_process_group()
        assert {name: getattr(found, name) for name in at} == at


def test_experts_across_tensor_parallel_ranks_count_as_held_by_all(titan: Any) -> None:
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1, ep=4, world_size=4)
    assert topology_from_device_mesh(dims) == Topology(dp=2, tp=2)


def test_a_trainer_that_is_not_torchtitans_is_refused(titan: Any) -> None:
    import torchtitan_on_cpu

    config = titan.protect(torchtitan_on_cpu.tiny_moe().checkpoint)
    with pytest.raises(InvalidJobError, match="made by a object, not by"):
        config.build(states={"train_state": object()})


def test_ranks_that_are_simulated_are_refused(
    titan: Any, assets: Path, process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = Run(titan, assets, tmp_path).configured(None, checkpoints=0)
    config.checkpoint = titan.protect(config.checkpoint)
    config.comm.mode = "fake_backend"
    monkeypatch.setenv("NGPU", "1")
    try:
        with pytest.raises(InvalidJobError, match="'fake_backend' simulates ranks"):
            config.build()
    finally:
        dist.destroy_process_group()


VERSION = """
Metadata-Version: 2.1
Name: torchtitan
Version: {version}
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Any]:
    """Imports the integration in a process that has another version of torchtitan."""

    # Holdfast may be on the path only, and torchtitan may be as well.
    others = [each for each in sys.path if each and not Path(each, "torchtitan").exists()]

    def imported(version: str) -> str:
        distribution = tmp_path / f"torchtitan-{version}.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(VERSION.lstrip().format(version=version))
        done = subprocess.run(
            [sys.executable, "-c", "import holdfast.integrations.torchtitan"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *others])},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr.splitlines()[-1] if done.returncode else ""

    yield imported


@pytest.mark.parametrize("version", ["0.2.1", "0.30.0", "1.0.3"])
def test_another_version_is_refused_in_words(other: Any, version: str) -> None:
    assert f"needs torchtitan 0.3, but {version} is installed" in other(version)


def test_without_the_package_the_error_names_what_to_install(other: Any) -> None:
    assert 'pip install "holdfast[torchtitan]"' in other("0.3.7")
