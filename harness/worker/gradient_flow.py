"""Which modules of a model with frozen weights no gradient flows through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.spec import Job
from harness.worker.adapter import add_adapters
from harness.worker.model_classes import from_config

TOKENS = 2
"""Of the one sample that is passed through."""


def modules_without_gradient(job: Job, config: Any) -> list[str] | None:
    """Names of the modules whose outputs need no gradient, from a forward pass on the meta device.

    Empty where all weights are trained. None where the model cannot run there.
    """
    if not job.adapter.is_present:
        return []
    if config is None:
        return None  # a model of the user's own

    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                model = from_config(job, config, attn_implementation=job.model.attention_kernel)
            add_adapters(job, model)
            tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
            decoder = {"decoder_input_ids": tokens} if job.task == "seq2seq" else {}
            return outputs_without_gradient(model, input_ids=tokens, **decoder)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        return None  # an operator without an implementation on the meta device, or a loop over values


def outputs_without_gradient(model: nn.Module, **inputs: Tensor) -> list[str]:
    """The same of a model on the meta device."""
    without: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not needs_gradient(output):
                without.append(name)

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with AnswersForMeta():
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(set(without))


class AnswersForMeta(TorchDispatchMode):
    """Where code asks for a value of a tensor that has none, such as whether all of a mask is set: yes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool or 1
        return func(*args, **(kwargs or {}))


def needs_gradient(output: Any) -> bool:
    """Whether any tensor in what a module takes or returns needs one."""
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        return any(map(needs_gradient, output.values()))
    return isinstance(output, tuple | list) and any(map(needs_gradient, output))
