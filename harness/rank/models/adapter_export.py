"""Writes the adapters of a checkpoint as peft reads them, or the model with its adapters merged.

A process of its own: `python -m harness.rank.models.adapter_export`, the request as JSON on standard input.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.checkpoints.tensor_files import WEIGHTS, TensorFiles
from harness.errors import HarnessError
from harness.job.job import ADAPTER_NAME, Job
from harness.rank.factories import one_at_a_time
from harness.rank.models.adapter import add_adapters, bare_name, is_adapter, peft_config
from harness.rank.models.model import from_config
from harness.run_directory.request import SavedCheckpoint

PEFT_PREFIX = "base_model.model."
CONFIGURATION = "config.json"


def export_adapters(checkpoint: Path, output: Path, *, merged: bool) -> int:
    """Write the files; the number of adapted layers.

    Raises HarnessError for a checkpoint without adapters, in the library's own format, or whose adapters do
    not have the shapes of the job: a state dict of partitioned parameters has tensors without elements.
    """
    saved = SavedCheckpoint.read(checkpoint)
    if not saved.job.adapter.is_present:
        raise HarnessError(f"'{checkpoint}' is of a job without adapters; its model.safetensors is the model")
    if saved.job.adapter.is_quantised and merged:
        raise HarnessError(
            "adapters of 4-bit weights are not merged: the result would be rounded again; export them alone"
        )
    if saved.format == "native":
        raise HarnessError(
            f"'{checkpoint}' is native to {saved.native_format}; save with "
            "measure.checkpoint=consolidated or neutral, which keep parameters by name"
        )
    with TensorFiles(checkpoint, WEIGHTS) as files:
        tensors = {
            name: files.read(name, 0, torch.Size(shape).numel()).view(shape).clone()
            for name, shape in files.shapes().items()
        }
    model = _model(saved.job, checkpoint)
    require_whole(model, tensors)
    output.mkdir(parents=True, exist_ok=True)
    if merged:
        _write_merged(model, tensors, checkpoint, output)
    else:
        _write_adapters(saved.job, tensors, output)
    return sum(is_adapter(name) and ".lora_A." in name for name in tensors)


def require_whole(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise HarnessError unless a checkpoint has every parameter of a model in its shape."""
    for name, parameter in model.named_parameters():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != tuple(parameter.shape):
            raise HarnessError(
                f"'{name}' has shape {found} in the checkpoint, {tuple(parameter.shape)} in the model: a "
                "state dict of partitioned parameters is not whole; gather them before saving"
            )


def _model(job: Job, checkpoint: Path) -> nn.Module:
    """The model with its adapters, without weights."""
    from transformers import AutoConfig

    # A checkpoint has no code; the folder that brings it has the same configuration.
    trust = job.model.trust_remote_code
    source = job.model.name if trust and job.model.name else checkpoint
    with one_at_a_time(job):
        config = AutoConfig.from_pretrained(source, revision=job.model.revision, trust_remote_code=trust)
    with torch.device("meta"):
        model: nn.Module = from_config(job, config)
    add_adapters(job, model)
    return model


def _write_adapters(job: Job, tensors: Mapping[str, Tensor], output: Path) -> None:
    from safetensors.torch import save_file

    named = {
        PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.", "."): tensor
        for name, tensor in tensors.items()
        if is_adapter(name)
    }
    save_file(named, output / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_config(job.adapter)
    config.base_model_name_or_path = job.model.name
    config.task_type = "SEQ_2_SEQ_LM" if job.task == "seq2seq" else "CAUSAL_LM"
    # peft's own choice is not written: it may be another for another version.
    config.target_modules = sorted({name.partition(".lora_A.")[0] for name in tensors if ".lora_A." in name})
    config.inference_mode = True
    config.save_pretrained(output)


def _write_merged(model: nn.Module, tensors: Mapping[str, Tensor], checkpoint: Path, output: Path) -> None:
    from peft.tuners.lora import LoraLayer
    from safetensors.torch import save_file

    model.load_state_dict(tensors, strict=False, assign=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
    merged = {
        bare_name(name): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if name in tensors and not is_adapter(name)  # of tied ones the first
    }
    save_file(merged, output / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(checkpoint / CONFIGURATION, output / CONFIGURATION)


def main() -> int:
    """Answer one request: {checkpoint, output, merged}; prints the layers, or the error in one line."""
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        layers = export_adapters(
            Path(request["checkpoint"]), Path(request["output"]), merged=request["merged"]
        )
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{layers}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
