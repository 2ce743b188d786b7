"""Megatron-Core without a GPU. It names the device `cuda` everywhere: here that is the CPU.

Import this before anything of Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda")


class OnCpu(TorchFunctionMode):
    """Lets functions of torch take `cuda` for the CPU, and tensors say that they are on CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type:  # Megatron compares its text
            if len(args) == 1 and not named:
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        return func(*args, **named)


def _of_cpu(*_: object, **__: object) -> Any:
    return torch.get_rng_state()


def _nothing(*_: object, **__: object) -> None:
    pass


def _itself(one: Any, *_: object, **__: object) -> Any:
    return one


def _fetched(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy else tensor


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, *_: object) -> _Stream:
        return _Stream()


def enter() -> None:
    """Have this process take the CPU for CUDA."""
    OnCpu().__enter__()  # type: ignore[no-untyped-call]  # torch's
    torch.Tensor.cuda = _itself  # type: ignore[assignment,method-assign]
    nn.Module.cuda = _itself  # type: ignore[assignment,method-assign]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = _nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = _of_cpu
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    for name in ("FloatTensor", "IntTensor", "LongTensor", "ByteTensor"):
        setattr(cuda, name, getattr(torch, name))
    cuda.current_stream = _Stream
    cuda.stream = lambda *_: nullcontext()
    cuda.Stream = cuda.Event = _Stream
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    generators: Any = random
    generators._get_cuda_rng_state = _of_cpu
    generators._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # What 0.16.1 lacks without TransformerEngine: a name, and that torch's Adam has a step for each
    # parameter, which its loader of checkpoints looks for in the checkpoint.
    moe: Any = moe_utils
    moe.te_general_gemm = None
    # Numbers that all-to-all needs are fetched from tensors on CUDA only.
    dispatching: Any = token_dispatcher
    dispatching.maybe_move_tensor_to_cpu = _fetched
    # Its norm of torch refuses to be told of sequence parallelism. That of Apex marks its weights,
    # so that their gradients are summed over the ranks that divide the sequence.
    norm: Any = torch_norm.WrappedTorchNorm
    make_norm = norm.__new__

    def marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        alone = copy(config)
        alone.sequence_parallel = False
        made: nn.Module = make_norm(cls, alone, *args, **kwargs)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    norm.__new__ = marked
    sharded: Any = DistributedOptimizer
    set_states = sharded._set_main_param_and_optimizer_states

    def with_step(self: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, number = self.model_param_group_index_map[parameter]
        states = self.optimizer.state[self.optimizer.param_groups[group]["params"][number]]
        set_states(self, parameter, {"step": states["step"], **tensors})

    sharded._set_main_param_and_optimizer_states = with_step
