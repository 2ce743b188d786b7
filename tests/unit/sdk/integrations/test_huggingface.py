"""Hugging Face's Trainer goes on after a restart as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import ElasticSampler, moe
from holdfast._elastic.world import World
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation

transformers = pytest.importorskip("transformers")
import train_huggingface  # noqa: E402
from train_huggingface import CONFIG  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402
from waiting import wait_for  # noqa: E402

from holdfast.integrations.huggingface import HoldfastTrainerCallback  # noqa: E402

STEPS = 7
PASSAGES = 36  # nine batches: an epoch is four steps of two batches, and one of a single batch
WAIT_S = 60.0


class Killed(Exception):
    """Ends training where a process would be killed."""


class KillAfter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Has every step committed up to one, and ends training after it."""

    def __init__(self, step: int, daemon: FakeDaemon) -> None:
        self._step, self._daemon = step, daemon

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not 0 < state.global_step <= self._step:
            return
        saved = Generation(self._daemon.epoch, state.global_step)
        wait_for("the snapshot", lambda: saved in self._committed(), WAIT_S)
        if state.global_step == self._step:
            raise Killed

    def _committed(self) -> list[Generation]:
        return [manifest.generation for manifest in self._daemon.manifests]


class Wrapped(torch.nn.Module):
    """A model of transformers within a module that is none."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("seen", torch.rand(2))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.base(input_ids=input_ids, labels=labels)


def with_adapters(base: torch.nn.Module) -> torch.nn.Module:
    """A model with adapters, as far as one can see without peft."""
    wrapped = Wrapped(base)
    wrapped.peft_config = {"default": None}  # type: ignore[assignment]  # as peft has it
    return wrapped


def with_tied_weights(base: Any) -> torch.nn.Module:
    base.lm_head.weight = base.model.embed_tokens.weight
    wrapped: torch.nn.Module = base
    return wrapped


def with_lora(base: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    adapted: torch.nn.Module = peft.get_peft_model(base, config)
    return adapted


def train(
    tmp_path: Path,
    daemon: FakeDaemon,
    kill_after: int = 0,
    adapted: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> str:
    """Train to the end, or to the step at which the process dies; return the state's hash."""
    protection = HoldfastTrainerCallback(daemon=daemon)
    arguments = ["--steps", str(STEPS), "--passages", str(PASSAGES)]
    args = train_huggingface.parse_args([*arguments, "--log-file", str(tmp_path / "log")])
    trainer = train_huggingface.make_trainer(args, protection)
    if adapted is not None:
        torch.manual_seed(1)
        trainer.model = trainer.model_wrapped = adapted(trainer.model)
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2  # draws random numbers
    trainer.eval_dataset = train_huggingface.Passages(4)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 6  # checkpoints of its own
    trainer.args.output_dir = str(tmp_path / "checkpoints")
    trainer.add_callback(KillAfter(kill_after, daemon))
    try:
        trainer.train(resume_from_checkpoint=protection.restore(trainer))
    except Killed:
        protection.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the arena
        raise
    return train_huggingface.state_sha256(trainer)


def losses(tmp_path: Path) -> dict[int, dict[str, float]]:
    """What was logged for each step."""
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(folder, FakeDaemon(folder / "memory")), losses(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [4, 5], ids=["in an epoch", "at its end"])
def test_training_that_dies_after_a_step_ends_with_the_same_losses_and_bytes(
    tmp_path: Path, undisturbed: tuple[str, dict[int, Any]], step: int
) -> None:
    memory = tmp_path / "memory"
    with pytest.raises(Killed):
        train(tmp_path, FakeDaemon(memory), kill_after=step)
    state = train(tmp_path, FakeDaemon(memory, epoch=2))
    assert losses(tmp_path) == undisturbed[1]
    assert state == undisturbed[0]


def test_a_restart_after_the_last_step_ends_with_the_same_losses_and_bytes(
    tmp_path: Path, undisturbed: tuple[str, dict[int, Any]]
) -> None:
    memory = tmp_path / "memory"
    for epoch in (1, 2):
        assert train(tmp_path, FakeDaemon(memory, epoch=epoch)) == undisturbed[0]
        assert losses(tmp_path) == undisturbed[1]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by peft
def test_a_model_with_lora_ends_with_the_same_bytes_after_a_restart(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    whole = train(tmp_path, FakeDaemon(tmp_path / "whole"), adapted=with_lora)
    with pytest.raises(Killed):
        train(tmp_path, FakeDaemon(memory), kill_after=4, adapted=with_lora)
    assert train(tmp_path, FakeDaemon(memory, epoch=2), adapted=with_lora) == whole


MODELS = [lambda base: base, with_tied_weights, Wrapped, with_adapters, with_lora]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by peft
@pytest.mark.parametrize("kind", MODELS, ids=["plain", "tied", "wrapped", "adapters", "lora"])
def test_the_trainer_resumes_any_model_from_the_folder_and_loads_nothing_over_it(
    tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = []
    for epoch in (1, 2):
        protection = HoldfastTrainerCallback(daemon=FakeDaemon(tmp_path, epoch=epoch))
        args = train_huggingface.parse_args(["--steps", "3"])
        trainer = train_huggingface.make_trainer(args, protection)
        torch.manual_seed(epoch)
        trainer.model = trainer.model_wrapped = kind(transformers.MixtralForCausalLM(CONFIG))
        trainers.append(trainer)
        folder = protection.restore(trainer)
        if folder is not None:
            trainer._load_from_checkpoint(folder)  # as `train` does
        scheduler = trainer.create_scheduler(3)
        given = {"lr_scheduler": scheduler, "optimizer": trainer.optimizer}
        events = trainer.args, trainer.state, trainer.control
        protection.on_train_begin(*events, **given)
        if folder is None:
            trainer.state.global_step = 1
            protection.on_step_end(*events)
            protection.on_step_begin(*events)
        protection.on_train_end(*events)
    assert folder is not None
    old, new = (trainer.model.state_dict() for trainer in trainers)
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert "missing keys" not in caplog.text


class Counts(transformers.TrainerCallback, ExportableState):  # type: ignore[misc, name-defined]
    """Counts evaluations."""

    def __init__(self, evaluations: int = 0) -> None:
        self.evaluations = evaluations

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluations += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluations": self.evaluations}}


def counted(
    tmp_path: Path, daemon: FakeDaemon, kill_after: int = 0, world: World | None = None
) -> Any:
    """Train with a line in the log for every third step; return what was counted at the end."""
    given: dict[str, Any] = {"daemon": daemon} if world is None else {"world": world}
    protection, counts = HoldfastTrainerCallback(**given), Counts()
    args = train_huggingface.parse_args(["--steps", str(STEPS), "--passages", str(PASSAGES)])
    trainer = train_huggingface.make_trainer(args, protection)
    trainer.args.logging_steps = 3
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
    trainer.eval_dataset = train_huggingface.Passages(4)
    for each in (counts, KillAfter(kill_after, daemon)):
        trainer.add_callback(each)
    try:
        output = protection.train(trainer)
    except Killed:
        protection.on_train_end(trainer.args, trainer.state, trainer.control)  # frees the arena
        raise
    logged = [
        line["loss"]
        for line in trainer.state.log_history
        if line.get("step") == 6 and "loss" in line
    ]
    state = train_huggingface.state_sha256(trainer)
    return output.training_loss, counts.evaluations, logged, state


@pytest.mark.slow
def test_counters_and_callbacks_continue_after_a_restart(tmp_path: Path) -> None:
    whole, memory = counted(tmp_path, FakeDaemon(tmp_path / "whole")), tmp_path / "memory"
    with pytest.raises(Killed):
        counted(tmp_path, FakeDaemon(memory), kill_after=4)
    assert counted(tmp_path, FakeDaemon(memory, epoch=2)) == whole


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(
        "gloo", None, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
    )
    world.join()
    yield world
    world.close()


def test_training_in_a_world_is_the_same_training(tmp_path: Path, alone: World) -> None:
    daemon = FakeDaemon(tmp_path / "memory")
    assert counted(tmp_path, daemon, world=alone) == counted(tmp_path, daemon)


def test_what_cannot_be_entered_again_is_refused_with_a_world(alone: World) -> None:
    protection = HoldfastTrainerCallback(world=alone)
    args = train_huggingface.parse_args(["--steps", "1"])
    trainer = train_huggingface.make_trainer(args, protection)
    with pytest.raises(InvalidJobError, match=r"call protection\.train\(trainer\)"):
        protection.restore(trainer)
    trainer.args.ddp_static_graph = True
    with pytest.raises(InvalidJobError, match="ddp_static_graph"):
        protection.train(trainer)


def test_sharding_that_cannot_be_restored_is_refused(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    protection = HoldfastTrainerCallback(world=alone)
    args = train_huggingface.parse_args(["--steps", "1"])
    trainer = train_huggingface.make_trainer(args, protection)
    trainer.args.fsdp = True
    with pytest.raises(InvalidJobError, match=r"on cpu it trains with DDP; leave it out"):
        protection.train(trainer)
    plugin = pytest.importorskip("accelerate").FullyShardedDataParallelPlugin
    state, trainer.is_fsdp_enabled = trainer.accelerator.state, True
    for version, why in ((1, "set version to 2"), (2, "cpu_ram_efficient_loading broadcasts")):
        made = plugin(fsdp_version=version, cpu_ram_efficient_loading=version == 2)
        monkeypatch.setattr(state, "fsdp_plugin", made, raising=False)
        with pytest.raises(InvalidJobError, match=why):
            protection.train(trainer)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(InvalidJobError, match="before DeepSpeed shards the model"):
        protection.train(trainer)


def test_training_without_a_restore_is_refused(tmp_path: Path) -> None:
    args = train_huggingface.parse_args(["--steps", "1"])
    trainer = train_huggingface.make_trainer(args, HoldfastTrainerCallback())
    with pytest.raises(InvalidJobError, match="has not restored"):
        trainer.train()


def test_a_trainer_that_makes_its_model_later_is_refused() -> None:
    protection = HoldfastTrainerCallback()
    trainer = train_huggingface.make_trainer(
        train_huggingface.parse_args(["--steps", "1"]), protection
    )
    trainer.model_init = lambda: trainer.model
    with pytest.raises(InvalidJobError, match="creates another model in `train`"):
        protection.restore(trainer)


def test_an_order_that_cannot_be_repeated_is_refused() -> None:
    protection = HoldfastTrainerCallback()
    trainer = train_huggingface.make_trainer(
        train_huggingface.parse_args(["--steps", "1"]), protection
    )
    trainer.args.accelerator_config.use_seedable_sampler = False
    with pytest.raises(InvalidJobError, match="use_seedable_sampler=False"):
        protection.restore(trainer)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2 beside sampler"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({}, "sampler=… is for 8 samples, but train_dataset has 9"),
    ],
)
def test_what_a_global_batch_could_not_stay_the_same_with_is_refused(
    alone: World, settings: dict[str, Any], why: str
) -> None:
    samples = 8 if not settings else 9
    sampler = ElasticSampler(range(samples), 4, alone)
    protection = HoldfastTrainerCallback(world=alone, sampler=sampler)
    args = train_huggingface.parse_args(["--steps", "1", "--passages", "9"])
    trainer = train_huggingface.make_trainer(args, protection)
    for name, value in ({"gradient_accumulation_steps": 1} | settings).items():
        setattr(trainer.args, name, value)
    with pytest.raises(InvalidJobError, match=why):
        protection.train(trainer)


def test_a_world_of_any_size_is_refused() -> None:
    world = World(
        "gloo",
        None,
        any_size=True,
        store_address="",
        local_rank=0,
        nproc=1,
        timeout_s=30.0,
        reform_s=30.0,
    )
    protection = HoldfastTrainerCallback(world=world)
    args = train_huggingface.parse_args(["--steps", "1"])
    with pytest.raises(InvalidJobError, match="leave any_size out"):
        protection.train(train_huggingface.make_trainer(args, protection))


@pytest.mark.parametrize(
    ("seats", "arguments", "why"),
    [
        (True, {}, "the Trainer reduces gradients as if all ranks had the same experts"),
        (False, {"pipeline": object()}, "the Trainer cannot repeat the steps of a stage alone"),
    ],
)
def test_what_only_a_loop_of_ones_own_can_train_is_refused(
    seats: bool, arguments: dict[str, Any], why: str
) -> None:
    protection = HoldfastTrainerCallback(**arguments)
    args = train_huggingface.parse_args(["--steps", "1"])
    trainer = train_huggingface.make_trainer(args, protection)
    if seats:
        trainer.model.add_module("seats", moe.SeatedExperts(4, 8, (0, 1), 2))
    with pytest.raises(InvalidJobError, match=why):
        protection.train(trainer)
