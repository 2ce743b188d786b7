"""Persisted sets written as safetensors and as torch's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from moe_example import make_model, train_moe
from safetensors import safe_open
from stored import JOB, persist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

import holdfast
from holdfast.export import main
from holdfast.testing import FakeDaemon
from holdfast_cli import main as cli
from holdfast_cli.commands.export import export_safetensors
from holdfast_cli.commands.export_names import HUGGING_FACE, decode_rules, tensors_to_export
from holdfast_core.durable.set_tensors import Reading
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.whole_sets import WholeSet, open_set

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def example() -> nn.Module:
    """The example model, with four experts in each of two layers."""
    return make_model(train_moe(), seed=3)


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory, example: nn.Module) -> Path:
    directory = tmp_path_factory.mktemp("tier")
    optimizer = torch.optim.SGD(example.parameters(), lr=0.0, momentum=0.9)
    for p in example.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    daemon = FakeDaemon(directory / "daemon")
    with holdfast.init(model=example, optimizer=optimizer, daemon=daemon) as session:
        session.save(1).protected.result(20)
    persist(directory / "daemon", directory, 1, Generation(1, 1))
    return directory


@pytest.fixture
def source(tier: Path) -> WholeSet:
    return open_set(str(tier), JOB, reading=Reading(by_expert=True))


def opened(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict


def test_the_example_model_has_the_names_of_hugging_face(
    tier: Path, tmp_path: Path, example: nn.Module
) -> None:
    command = ["export", f"{tier}/{JOB}", "--to", str(tmp_path / "hf"), "--names", "hf"]
    assert cli.main(command) == 0
    found = opened(tmp_path / "hf" / "model.safetensors")
    here = dict(example.state_dict())
    assert torch.equal(found["lm_head.weight"], here["head.weight"])
    q, k, v = here["layers.1.qkv.weight"].chunk(3)
    for part, tensor in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(found[f"model.layers.1.self_attn.{part}_proj.weight"], tensor)
    for expert in range(4):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}"
        assert torch.equal(found[f"{name}.w1.weight"], here["layers.0.moe.experts.w_in"][expert].T)
        assert torch.equal(found[f"{name}.w2.weight"], here["layers.0.moe.experts.w_out"][expert].T)
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in here.values())


def test_without_a_table_names_and_shapes_are_the_models(
    tier: Path, tmp_path: Path, example: nn.Module
) -> None:
    command = ["export", str(tier), "--job", JOB, "--to", str(tmp_path), "--optimizer"]
    assert cli.main(command) == 0
    found = opened(tmp_path / "model.safetensors")
    for name, tensor in example.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["optim.state.norm.weight.momentum_buffer"], torch.ones(32).bfloat16())


def test_large_models_are_several_files_with_an_index(
    source: WholeSet, tmp_path: Path, example: nn.Module
) -> None:
    wanted = tensors_to_export(source.tensors.values(), HUGGING_FACE)
    files = export_safetensors(source, wanted, tmp_path, shard_bytes=20_000)
    assert files[-1].name == "model.safetensors.index.json"
    index = msgspec.json.decode(files[-1].read_bytes())
    names = [file.name for file in files[:-1]]
    assert names == [
        f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))
    ]
    assert len(names) > 2
    for name, file in index["weight_map"].items():
        assert name in opened(tmp_path / file)
    total = sum(2 * p.numel() for p in example.parameters())
    assert index["metadata"]["total_size"] == total


def test_a_tensor_that_no_rule_names_is_an_error(source: WholeSet) -> None:
    rules = decode_rules(rb'{"rules": [{"match": "layers\\..*"}]}')
    with pytest.raises(InvalidJobError, match=r"4 tensors match no rule, such as embedd"):
        tensors_to_export(source.tensors.values(), rules)
    rules = decode_rules(rb'{"rules": [{"match": ".*", "names": ["x"]}]}')
    with pytest.raises(InvalidJobError, match="two tensors would be called 'x'"):
        tensors_to_export(source.tensors.values(), rules)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"rules": [{"names": ["x"]}]}',
        b'{"rules": [{"match": "("}]}',
        b'{"rules": [{"match": "x", "name": "y"}]}',
    ],
)
def test_a_table_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidJobError, match="the table of names cannot be read"):
        decode_rules(data)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rb'{"match": "(norm).weight", "names": ["\\2"]}', "invalid group reference"),
        (rb'{"match": "norm.weight", "names": ["a", "b", "c"]}', "cut into 3 equal parts"),
        (rb'{"match": "norm.weight", "names": ["a"], "transpose": true}', "cannot be transposed"),
    ],
)
def test_a_rule_that_does_not_fit_its_tensor_is_refused(
    source: WholeSet, rule: bytes, message: str
) -> None:
    rules = decode_rules(b'{"rules": [' + rule + b"]}")
    with pytest.raises(InvalidJobError, match=message):
        tensors_to_export([source.tensors["norm.weight"]], rules)


def test_torch_loads_the_export_without_holdfast(
    tier: Path, tmp_path: Path, example: nn.Module
) -> None:
    assert main([str(tier), "--job", JOB, "--to", str(tmp_path / "dcp")]) == 0
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in example.state_dict().items()}
    state["optim"] = {"state": {"norm.weight": {"momentum_buffer": torch.zeros(32).bfloat16()}}}
    state["optim"]["param_groups"] = [{"momentum": 0.0, "params": []}]
    state_dict_loader.load(state, checkpoint_id=tmp_path / "dcp")
    for name, tensor in example.state_dict().items():
        assert torch.equal(state[name], tensor), name
    (group,) = state["optim"]["param_groups"]
    assert group["momentum"] == 0.9
    assert set(group["params"]) == {name for name, _ in example.named_parameters()}
    assert bool(state["optim"]["state"]["norm.weight"]["momentum_buffer"].eq(1).all())


def test_numbers_are_exported_as_they_are(tmp_path: Path) -> None:
    """An optimizer's counters of steps have no dimension."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    counts = {"weight": 7.0, "bias": 3.0}
    for name, p in model.named_parameters():
        optimizer.state[p]["step"].fill_(counts[name])
    with holdfast.init(
        model=model, optimizer=optimizer, daemon=FakeDaemon(tmp_path / "daemon")
    ) as session:
        session.save(1).protected.result(20)
    persist(tmp_path / "daemon", tmp_path, 1, Generation(1, 1))
    assert main([str(tmp_path), "--job", JOB, "--to", str(tmp_path / "dcp")]) == 0
    found = {f"optim.state.{name}.step": torch.zeros(()) for name in counts}
    state_dict_loader.load(found, checkpoint_id=tmp_path / "dcp")
    assert found == {f"optim.state.{name}.step": count for name, count in counts.items()}


def test_the_command_names_what_is_there_instead(tier: Path, tmp_path: Path, capsys: Any) -> None:
    command = [str(tier), "--job", JOB, "--to", str(tmp_path), "--generation", "9.9"]
    assert main(command) == 2
    assert "it has: 1.1" in capsys.readouterr().err
    assert cli.main(["export", *command]) == 2
    assert "it has: 1.1" in capsys.readouterr().err
