"""Puts the job's adapters into a model: peft's layers, with initial values that depend on no strategy."""

from __future__ import annotations

import math
import warnings
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import JobError
from harness.job.job import ADAPTER_NAME, ALL_LINEAR, AdapterSection, Job
from harness.rank.models.optimizer import freeze

_A, _B = f".lora_A.{ADAPTER_NAME}.weight", f".lora_B.{ADAPTER_NAME}.weight"
_BASE = ".base_layer."
BASE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_adapters(job: Job, model: nn.Module) -> None:
    """Replace the targeted layers of a model by peft's and freeze everything else, in place; freeze what the
    optimizer's groups freeze, with or without adapters.

    Of a model on the meta device the adapters are there too; otherwise they get their initial values. The
    model keeps its class, and the names of parameters outside of adapted layers. Raises JobError for targets
    that the model does not have or that peft cannot adapt.
    """
    if job.adapter.is_present:
        _inject(job, model)
    freeze(model, job.optimizer)


def _inject(job: Job, model: nn.Module) -> None:
    from harness.rank.models.peft_preload import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            # peft tells that it sets fan_in_fan_out for GPT-2's Conv1D.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            inject_adapter_in_model(peft_config(job.adapter), model, ADAPTER_NAME, low_cpu_mem_usage=True)
    # ValueError: no module of that name, or a layer without LoRA. The others: dtypes and methods that peft's
    # layers lack (tuners/tuners_utils.py, tuners/lora/layer.py).
    except (ValueError, NotImplementedError, TypeError) as error:
        raise JobError(f"adapter.targets: {str(error).splitlines()[0]}") from error
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_adapter(name):
            raise JobError(f"adapter.targets: peft makes '{name}' there; name linear layers only")
    on_meta = next(p for n, p in model.named_parameters() if not is_adapter(n)).is_meta
    if on_meta:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_values(name, parameter.shape, job.training.seed))


def peft_config(adapter: AdapterSection) -> Any:
    from harness.rank.models.peft_preload import LoraConfig

    targets: Any = adapter.targets
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        bias="none",
    )


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def bare_name(name: str) -> str:
    """The name that a frozen parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def initial_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Initial values of an adapter's parameter, fp32: A as peft draws it, B of zeros.

    Uniform within 1 / sqrt(fan in) (peft 0.21, `LoraLayer.reset_lora_parameters`), from a generator that the
    job's seed and the name set, so that they depend neither on the strategy nor on the order of building.
    """
    if name.endswith(_B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
    values = torch.empty(shape)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def hold_frozen(job: Job, model: nn.Module) -> None:
    """Cast frozen weights to the dtype that the job names, in place; buffers stay."""
    if job.adapter.base_dtype is None or job.adapter.is_quantised:
        return
    dtype = BASE_DTYPES[job.adapter.base_dtype]
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
