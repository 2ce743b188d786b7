from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import moe
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.collect import states_of
from holdfast._state.in_place import InPlaceCheck, Watched
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology


def discover(model: nn.Module, *optimizers: Any, **options: Any) -> dict[str, TensorSource]:
    topology = options.pop("topology", Topology(dp=1))
    rank = options.pop("rank", 0)
    live = LiveState(model, optimizers, topology, rank, **options)
    return {source.name: source for source in live.discover()}


def units(found: dict[str, TensorSource]) -> dict[str, str]:
    return {name: str(source.unit) for name, source in found.items()}


def test_experts_are_found_in_lists_and_stacks_and_counted_over_all_ranks(trainer: Any) -> None:
    found = discover(trainer.model, topology=Topology(dp=2, ep=2), rank=1)
    assert units(found) == {
        "embedding.weight": "embedding",
        "head.weight": "head",
        "head.bias": "head",
    } | {
        f"layers.{i}.{name}": f"layer{i}/{unit}"
        for i in range(2)
        for name, unit in {
            "norm.weight": "dense",
            "norm.bias": "dense",
            "norm.running_mean(buffer)": "dense",
            "norm.running_var(buffer)": "dense",
            "norm.num_batches_tracked(buffer)": "dense",
            "gate.weight": "gate",
            "gate.bias": "gate",
            "listed.experts.2.weight": "expert2",
            "listed.experts.2.bias": "expert2",
            "listed.experts.3.weight": "expert3",
            "listed.experts.3.bias": "expert3",
            "experts.w[3]": "expert3",
            "experts.w[4]": "expert4",
            "experts.w[5]": "expert5",
        }.items()
    }


class Grouped(nn.Module):
    """A mixture that says how many experts it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 4
        self.w1 = nn.Parameter(torch.randn(4, 2, 3))
        self.b1 = nn.Parameter(torch.randn(4, 3))
        self.correction = nn.Parameter(torch.randn(4))
        self.shared = nn.Linear(4, 4)


def test_a_module_that_counts_its_experts_has_stacked_weights() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"mlp": Grouped()})])})
    found = units(discover(model))
    assert [found[f"blocks.0.mlp.w1[{i}]"] for i in range(4)] == [
        f"layer0/expert{i}" for i in range(4)
    ]
    assert found["blocks.0.mlp.b1[2]"] == "layer0/expert2"
    assert found["blocks.0.mlp.correction"] == "layer0/dense"
    assert found["blocks.0.mlp.shared.weight"] == "layer0/dense"


def test_experts_in_seats_have_their_numbers_and_one_rank_captures_each() -> None:
    experts = moe.SeatedExperts(4, 8, (2, 5), 3)
    experts.captured = frozenset({5})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": experts})])})
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = discover(model, optimizer)
    base = "layers.0.experts.w_in"
    assert {name for name in found if name.startswith(base)} == {
        *(f"{base}[{expert}]{key}" for expert in (2, 5) for key in ("", ":exp_avg", ":exp_avg_sq")),
        f"{base}:step",
    }
    assert found[f"{base}[5]"].tensor.equal(experts.w_in[1])
    for name, source in found.items():
        expert = None if "[" not in name else int(name.partition("[")[2][0])
        kind = UnitKind.DENSE if expert is None else UnitKind.EXPERT
        assert source.unit == UnitKey(0, kind, expert)
        assert source.private == (expert is not None)
        assert source.seats is (experts if source.private else None)
        assert source.captured == (expert != 2)


def test_optimizer_states_follow_their_parameters(trainer: Any) -> None:
    trainer.train()
    found = discover(trainer.model, trainer.optimizer)
    moment = found["layers.0.experts.w[1]:exp_avg"]
    assert (str(moment.unit), moment.role) == ("layer0/expert1", TensorRole.OPTIMIZER)
    weight = trainer.model.layers[0].experts.w
    assert moment.tensor.data_ptr() == trainer.optimizer.state[weight]["exp_avg"][1].data_ptr()
    step = found["layers.0.experts.w:step"]
    assert (str(step.unit), step.tensor.shape, step.private) == ("layer0/dense", (), True)


def test_masters_are_recognised_in_states_and_in_parameter_groups(make_trainer: Any) -> None:
    trainer = make_trainer("float32 masters", dtype=torch.bfloat16)
    trainer.train()
    found = discover(trainer.model, trainer.optimizer)
    assert found["head.weight:master"].role is TensorRole.MASTER
    masters = [p.detach().float().clone().requires_grad_() for p in trainer.model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    sum(m.sum() for m in masters).backward()
    optimizer.step()
    found = discover(trainer.model, optimizer)
    assert found["head.weight/master"].role is TensorRole.MASTER
    assert str(found["layers.1.experts.w/master[2]:momentum_buffer"].unit) == "layer1/expert2"


def test_parameters_that_only_an_optimizer_knows_are_private() -> None:
    model, stranger = nn.Linear(2, 2), nn.Parameter(torch.zeros(5))
    found = discover(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    assert found["optimizer/0/parameter0"].private
    assert not found["weight"].private


def test_tied_weights_appear_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert list(discover(model)) == ["embedding.weight"]


def test_buffers_are_private_and_copied_early_unless_they_are_not_persistent() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    found = discover(model)
    assert "cache(buffer)" not in found
    assert found["running_mean(buffer)"].eager
    assert found["running_mean(buffer)"].private


def test_the_user_decides_units_and_what_is_private(trainer: Any) -> None:
    special = UnitKey(7, UnitKind.EXPERT, 1)
    found = discover(
        trainer.model,
        units=lambda name, tensor: special if name == "head.weight" else None,
        private=frozenset({"head.bias"}),
    )
    assert found["head.weight"].unit == special
    assert found["head.bias"].private
    assert not found["embedding.weight"].private


def test_a_compiled_model_has_the_names_of_the_plain_one(trainer: Any) -> None:
    wrapped = nn.Module()
    wrapped._orig_mod = trainer.model
    assert discover(wrapped).keys() == discover(trainer.model).keys()


def test_changes_of_tensors_are_noticed(trainer: Any) -> None:
    live = LiveState(trainer.model, [trainer.optimizer], Topology(dp=1), 0)

    def becomes_known() -> None:
        live.discover()
        assert not live.has_changed()

    assert live.has_changed()
    becomes_known()
    trainer.train()  # optimizer state appears
    assert live.has_changed()
    becomes_known()
    trainer.train()
    assert not live.has_changed()
    weight = trainer.model.head.weight
    weight.data = torch.zeros(weight.shape)
    assert live.has_changed()
    becomes_known()
    trainer.model.extra = nn.Linear(2, 2)
    assert live.has_changed()
    becomes_known()
    trainer.model.head.register_buffer("first", torch.zeros(2))
    assert live.has_changed()
    becomes_known()
    trainer.model.head.child = nn.Linear(2, 2)
    assert live.has_changed()
    becomes_known()
    trainer.model.layers[0].norm.running_mean = torch.zeros(8)
    assert live.has_changed()
    becomes_known()
    trainer.optimizer.state[weight]["exp_avg"] = torch.zeros(weight.shape)
    assert live.has_changed()


def test_modules_are_listed_again_when_one_appears_vanishes_or_is_renamed(trainer: Any) -> None:
    model = trainer.model
    live = LiveState(model, [], Topology(dp=1), 0)
    assert live.modules() == dict(model.named_modules())

    def change(action: Callable[[], None]) -> None:
        live.discover()
        listed = live.modules()
        assert listed is live.modules()
        action()
        assert live.modules() == dict(model.named_modules())
        assert [*live.modules()] != [*listed] or [*live.modules().values()] != [*listed.values()]

    change(lambda: model.add_module("more", nn.Identity()))
    change(lambda: model.more.add_module("within", nn.Identity()))
    change(lambda: model.add_module("next", nn.Identity()))
    change(lambda: model.next.add_module("within", model.more._modules.pop("within")))
    change(lambda: delattr(model, "next"))
    change(lambda: setattr(model, "more", nn.Identity()))
    change(lambda: model._modules.update(renamed=model._modules.pop("more")))
    change(lambda: delattr(model, "renamed"))
    change(lambda: model.__dict__.update(_modules={**model._modules, "more": nn.Identity()}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_modules_that_torch_has_compiled_to_a_script_are_listed() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), nn.ReLU())
    live = LiveState(model, [], Topology(dp=1), 0)
    live.discover()
    assert [*live.modules()] == [path for path, _ in model.named_modules()]


class Counting(nn.Module):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None: ...


def test_a_module_is_asked_for_its_extra_state_from_the_first_save_after_it_has_appeared(
    trainer: Any,
) -> None:
    live = LiveState(trainer.model, [trainer.optimizer], Topology(dp=1), 0)
    assert not states_of(live, {}).modules
    live.discover()
    assert not states_of(live, {}).modules
    trainer.model.counting = nn.Sequential(nn.Identity(), Counting())
    assert states_of(live, {}).modules == {"counting.1": 3}
    live.discover()
    assert states_of(live, {}).modules == {"counting.1": 3}
    trainer.model.counting[0].__class__ = Counting
    assert states_of(live, {}).modules == {"counting.0": 3, "counting.1": 3}


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="no parameters"):
        discover(nn.Identity())


def test_the_sources_are_looked_for_again_only_when_something_changed(trainer: Any) -> None:
    live = LiveState(trainer.model, [trainer.optimizer], Topology(dp=1), 0)
    first = live.sources()
    assert live.sources() is first
    weight = trainer.model.head.weight
    weight.data = weight.data.clone()
    again = {source.name: source for source in live.sources()}
    assert again["head.weight"].tensor.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("value", [3, [torch.zeros(2)], {"within": torch.zeros(2)}, None])
def test_a_state_that_held_only_tensors_is_looked_at_again_when_it_holds_other_values(
    trainer: Any, value: object
) -> None:
    trainer.train()
    live = LiveState(trainer.model, [trainer.optimizer], Topology(dp=1), 0)
    live.discover()
    assert live.of_tensors == {0}
    state = trainer.optimizer.state[trainer.model.head.weight]
    moment = state["exp_avg"]
    state["exp_avg"] = value
    assert live.unmoved_versions() is None
    state["exp_avg"] = moment.clone()
    assert live.unmoved_versions() is None
    state["exp_avg"] = moment
    assert live.unmoved_versions() is not None
    state["more"] = value
    assert live.unmoved_versions() is None
    live.discover()
    assert not live.of_tensors
    assert live.unmoved_versions() is not None


@pytest.mark.parametrize("change", ["in place", "through a view", "through detach", "of data"])
def test_each_change_of_a_parameter_shows_in_its_version_counter(change: str) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    check = InPlaceCheck(Watched({"weight": parameter}))
    assert check.first_changed() is None
    with torch.no_grad():
        if change == "of data":  # as FSDP does: the counter remains that of the parameter
            parameter.data = torch.zeros(3)
            assert check.first_changed() is None
            parameter.add_(0.0)
        else:
            view = {"through a view": parameter[:2], "through detach": parameter.detach()}
            view.get(change, parameter).add_(0.0)
    assert check.first_changed() == "weight"
