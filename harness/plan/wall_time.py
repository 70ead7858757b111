"""How long a run may take, assumed from the FLOPs of its model before anything is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.errors import HarnessError
from harness.forms.flops import ModelGeometry, model_flops_per_token
from harness.job.job import DEFAULT_STEPS, DEFAULT_TASK, Job
from harness.launch.cells import Cell
from harness.plan.devices.device import Device
from harness.plan.devices.limits import limits_here
from harness.plan.job import job_model

CORE_FLOPS = 25e9
"""FLOP/s that training reaches on a core of a server's CPU, fp32: about what `reports/` have."""
PEAK_SHARE = 0.3
"""Of a GPU's dense peak for the compute dtype, as decoders of a few billion parameters reach it."""
MICRO_STEP_SECONDS = {"cpu": 0.05, "cuda": 0.02}
"""Kernels to start and collectives to wait for, whatever the model's size."""
START_SECONDS = {"cpu": 5.0, "cuda": 30.0}
"""Processes, libraries and first steps; on CUDA every rank imports anew."""
ASSUMED = (
    f"~: estimated from the model's FLOPs at an assumed {CORE_FLOPS / 1e9:.0f} GFLOP/s per core or "
    f"{PEAK_SHARE:.0%} of a GPU's peak, accurate to about a factor of 3"
)
PEAK_NAMES = {"fp32": "float32", "fp16-mixed": "float16"}
"""The others compute in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of one run."""

    start: float
    steps: float

    @property
    def total(self) -> float:
        return self.start + self.steps


def assumed_time(cell: Cell, device: str) -> RunTime | None:
    """Of a run on this machine; None where the model, the number of steps or the GPU is not known."""
    try:
        flops = _flops_per_step(cell.job)
        rate = _rate(cell, device)
    except HarnessError:
        return None
    steps = _steps(cell.job)
    if steps is None or rate is None:
        return None
    each = flops / rate + cell.layout.accumulation_steps * MICRO_STEP_SECONDS[device]
    return RunTime(start=START_SECONDS[device], steps=steps * each)


def _flops_per_step(job: Job) -> float:
    """Raises HarnessError for a model without a closed form: building one would take too long."""
    if job.task != DEFAULT_TASK or job.model.factory or job.data.factory:
        raise HarnessError("FLOPs are known for causal language models only")
    model, length = job_model(job), job.data.sequence_length
    frozen = model.multiplying_parameters if job.adapter.is_present else 0  # adapters are small
    geometry = ModelGeometry(
        multiplying_parameters=model.multiplying_parameters, block_parameters=0, layers=model.layers,
        attention_width=model.attention_width, sequence_length=length, frozen_parameters=frozen,
    )  # fmt: skip
    return float(model_flops_per_token(geometry)) * length * (job.training.global_batch_size or 1)


def _rate(cell: Cell, device: str) -> float | None:
    if device == "cpu":
        return CORE_FLOPS * (os.cpu_count() or 1)
    found: Device | None = limits_here(device).device
    name = PEAK_NAMES.get(cell.job.training.precision, "bfloat16")
    peak = None if found is None else found.peak_flops.get(name)
    return None if peak is None else PEAK_SHARE * peak * cell.world_size


def _steps(job: Job) -> float | None:
    """Of the whole run: as the job says, or epochs of as many samples as it takes of its data."""
    training = job.training
    if training.epochs is None:
        return training.steps or DEFAULT_STEPS
    if job.data.limit is None or not training.global_batch_size:
        return None
    return training.epochs * max(1, job.data.limit // training.global_batch_size)
