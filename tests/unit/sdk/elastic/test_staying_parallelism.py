"""The groups of torch's pipelines and of Megatron-Core stay when a rank is replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from two_worlds import RANKS, Process, run_worlds, total_of

from holdfast._elastic.connections import why_not

STAGES, MICRO, WIDTH = 2, 2, 8

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(why_not("gloo")), reason="this torch cannot do it"),
]


def keep_pipelines(process: int, socket: str, port: str) -> None:
    """Cut off a step of two pipelines, and repeat it in the next world with the same stages."""
    one = Process(process, socket, port)
    mesh = init_device_mesh("cpu", (RANKS // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    pipeline, index = divmod(one.rank, STAGES)
    torch.manual_seed(1)
    module = [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)][index]
    generator = torch.Generator().manual_seed(pipeline)
    inputs, target = torch.randn(2, MICRO * 2, WIDTH, generator=generator)

    def make_schedule() -> Schedule1F1B:
        # The first step of a schedule has a collective: all ranks make it anew in each world.
        group, device = mesh.get_group("pp"), torch.device("cpu")
        stage = PipelineStage(module, index, STAGES, device, group=group)
        return Schedule1F1B(stage, MICRO, loss_fn=nn.functional.mse_loss)

    def gradients(schedule: Schedule1F1B) -> list[torch.Tensor]:
        module.zero_grad()
        if index == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target, losses=[])
        found = [torch.as_tensor(p.grad).clone() for p in module.parameters()]
        for each in found:
            dist.all_reduce(each, group=mesh.get_group("dp"))
        return found

    schedule = make_schedule()
    before = gradients(schedule)
    if one.first == 1:
        if one.is_cut_off():
            return
        with pytest.raises(RuntimeError):
            gradients(schedule)
        one.leave_world()
        one.world.join()
        after = gradients(make_schedule())
        assert all(map(torch.equal, before, after))
    one.end()


def test_a_pipeline_repeats_a_step_that_was_cut_off_with_a_new_schedule(tmp_path: Path) -> None:
    run_worlds(keep_pipelines, tmp_path)


def keep_groups_of_megatron(process: int, socket: str, port: str) -> None:
    one = Process(process, socket, port)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 1, expert_model_parallel_size=2)
    getters = (
        parallel_state.get_data_parallel_group,
        parallel_state.get_tensor_model_parallel_group,
        parallel_state.get_model_parallel_group,
        parallel_state.get_expert_model_parallel_group,
        parallel_state.get_expert_data_parallel_group,
        parallel_state.get_tensor_and_data_parallel_group,
    )
    groups: list[Any] = [get() for get in getters]

    def check() -> None:
        for group in groups:
            assert total_of(group) == sum(2**rank for rank in dist.get_process_group_ranks(group))

    check()
    if one.first == 1:
        if not one.change_world():
            return
        assert all(get() is group for get, group in zip(getters, groups, strict=True))
        check()
    one.end()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs make test-megatron")
def test_the_groups_of_megatron_get_the_new_ranks(tmp_path: Path) -> None:
    run_worlds(keep_groups_of_megatron, tmp_path)
