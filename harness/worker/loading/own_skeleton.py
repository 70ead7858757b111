"""Whether a model of the user's own can be built without its weights, and its buffers from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.backends.model_source import Loading
from harness.errors import JobError
from harness.spec import Job
from harness.worker.loading.streaming import parameter_numbers
from harness.worker.own_model import build_own_model

BUFFERS_NAME = "buffers.safetensors"


def why_whole(job: Job, asked: Loading) -> str | None:
    """Why every rank builds the whole model although `asked` is not 'full'; None: no rank needs to.

    The functions of modules run with parameters on the meta device. What they write to these is lost, and
    comes from a file that one process writes; what they read from these cannot be had.
    """
    if asked == "full":
        return None
    if job.adapter.is_quantised:
        return "bitsandbytes packs 4-bit weights from whole ones"
    if job.model.factory is None:
        return None
    if asked == "broadcast":
        return "buffers of a model of one's own reach ranks by a file; runtime.loading=slices has one"
    try:
        skeleton, _ = parameter_numbers(lambda: build_own_model(job, weights=False))
    except JobError as error:
        return f"it cannot be built without memory for its parameters: {error}"
    return next(_values_of_weights(skeleton), None)


def _values_of_weights(skeleton: nn.Module) -> Iterator[str]:
    for name, module in skeleton.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                where = f"{name}.{attribute}" if name else attribute
                yield f"'{where}' is made of its weights and no buffer"


def write_buffers(model: nn.Module, folder: Path) -> None:
    """Write every buffer of a whole model."""
    from safetensors.torch import save_file

    # Each in memory of its own: safetensors refuses tensors that share some.
    save_file({name: buffer.clone() for name, buffer in model.named_buffers()}, folder / BUFFERS_NAME)


def fill_buffers(skeleton: nn.Module, folder: Path) -> None:
    """Give a skeleton the buffers of the whole model: it drew none of the numbers that weights take."""
    from safetensors.torch import load_file

    values = load_file(folder / BUFFERS_NAME)
    with torch.no_grad():
        for prefix, module in skeleton.named_modules():
            for name in module._buffers:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    module._buffers[name] = values[full]
