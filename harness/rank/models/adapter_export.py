"""Writes the adapters of a checkpoint as peft reads them.

A process of its own: `python -m harness.rank.models.adapter_export`, the request as JSON on standard input.
"""

from __future__ import annotations

import json
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
from harness.rank.models.model import add_adapters, from_config, is_adapter, peft_config
from harness.run_directory.request import SavedCheckpoint

PEFT_PREFIX = "base_model.model."


def export_adapters(checkpoint: Path, output: Path) -> int:
    """Write the files; the number of adapted layers.

    Raises HarnessError for a checkpoint without adapters, in the library's own format, or whose adapters do
    not have the shapes of the job: a state dict of partitioned parameters has tensors without elements.
    """
    saved = SavedCheckpoint.read(checkpoint)
    if not saved.job.adapter.is_present:
        raise HarnessError(f"'{checkpoint}' is of a job without adapters; its model.safetensors is the model")
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
    require_whole(_model(saved.job, checkpoint), tensors)
    output.mkdir(parents=True, exist_ok=True)
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


def main() -> int:
    """Answer one request: {checkpoint, output}; prints the layers, or the error in one line."""
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        layers = export_adapters(Path(request["checkpoint"]), Path(request["output"]))
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{layers}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
