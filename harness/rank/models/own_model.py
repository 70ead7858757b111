"""A model that a function of the user's own builds, and the blocks of any model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from harness.backends.model.blocks import transformer_blocks
from harness.errors import JobError
from harness.job.job import Job, ModelSection
from harness.rank.factories import call_factory


def build_own_model(job: Job, *, weights: bool = True) -> nn.Module:
    """Call `model.factory` with torch's generator at the job's seed: the model in fp32 on the CPU.

    weights: False where the parameters that modules register have no memory (`loading.skeleton`). Raises
    JobError for what is no module with parameters.
    """
    assert job.model.factory is not None
    torch.manual_seed(job.training.seed)
    model = call_factory("model.factory", job.model.factory, job.model.arguments)
    shown = f"model.factory '{job.model.factory}'"
    if not isinstance(model, nn.Module):
        raise JobError(f"{shown} returned a {type(model).__name__}; it must return a torch.nn.Module")
    if next(model.parameters(), None) is None:
        raise JobError(f"{shown} returned a {type(model).__name__} without parameters; nothing can train")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise JobError(
            f"{shown}: parameter '{lazy[0]}' takes its shape from the first batch, and strategies cut "
            "weights before that; give its layer all sizes, or pass a batch through it in the factory"
        )
    if weights and not _on_meta():
        if any(parameter.is_meta for parameter in model.parameters()):
            raise JobError(f"{shown} returned parameters on the meta device; give them values on the CPU")
        model.to(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # complex ones would lose their imaginary part
            tensor.data = tensor.data.to(torch.float32)
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # no library cuts or flattens others
            parameter.data = parameter.data.contiguous()
    if job.model.dropout is not None:
        _set_dropout(model, job.model.dropout)
    return model


def declare_blocks(model: nn.Module, section: ModelSection) -> None:
    """Name the classes of a model's blocks in `_no_split_modules`, where Accelerate and Trainer look, too.

    Those that `model.block_class` gives; else what the model declares and has; else the class that its
    largest list of equal modules repeats, or none. Raises JobError for a class that the model has not.
    """
    if section.block_classes:
        have = dict.fromkeys(type(module).__name__ for module in model.modules())
        missing = [name for name in section.block_classes if name not in have]
        if missing:
            raise JobError(
                f"model.block_class: {type(model).__name__} has no module of class {missing[0]}; it has "
                f"{', '.join(have)}"
            )
        model._no_split_modules = list(section.block_classes)  # type: ignore[assignment]
    elif not transformer_blocks(model):
        repeated = _repeated_class(model)
        model._no_split_modules = [repeated] if repeated else []  # type: ignore[assignment]


def _repeated_class(model: nn.Module) -> str | None:
    """Class of the members of the list that holds most parameters among lists of two or more alike."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        kinds = {type(member) for member in module.children()}
        lists = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len(kinds) == 1
        # A list of lists is no list of blocks: nothing calls its members.
        if lists and not issubclass(next(iter(kinds)), nn.ModuleList | nn.ModuleDict):
            sizes[kinds.pop().__name__] += sum(parameter.numel() for parameter in module.parameters())
    return sizes.most_common(1)[0][0] if sizes else None


def _set_dropout(model: nn.Module, probability: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = probability
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = probability


def _on_meta() -> bool:
    """Whether modules are being built without memory."""
    return torch.empty(0).is_meta
