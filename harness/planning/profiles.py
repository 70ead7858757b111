"""Finds the activation profile of a scenario: shipped with the package, traced before, or traced now."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.atomic_write import write_atomically
from harness.backends.presets import ACCELERATOR_PRECISION, preset_changes
from harness.errors import HarnessError
from harness.planning.scenario import Scenario
from harness.spec import ModelSection
from harness.theory.activations import ActivationProfile, from_json
from harness.theory.workload import Workload

SHIPPED = Path(__file__).with_name("data") / "activations.json.xz"
TRACER = "harness.worker.activation_trace"
TRACING_SECONDS = 300
ERROR_LINE = re.compile(r"[A-Za-z_.]+(Error|Exception)\b: ")
Trace = Callable[[str], str]
"""Takes a request and returns a profile, as `worker.activation_trace.profile_text` does; by default in a new
process, which has to import torch first."""
NOT_IN_A_PROFILE = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "layer_types", "max_window_layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers",
    "pad_token_id", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Keys of a configuration that change neither the shapes in a block nor those around the blocks."""


def activation_profile(scenario: Scenario, trace: Trace | None = None) -> ActivationProfile:
    """The profile of a scenario's model, precision route, attention kernel, checkpointing and micro-batch.

    Raises HarnessError if the model has to be traced and cannot be.
    """
    return workload_profile(scenario.workload(), scenario.model.config, scenario.job.model, trace)


def workload_profile(
    workload: Workload, config: Mapping[str, Any], model: ModelSection, trace: Trace | None = None
) -> ActivationProfile:
    """The same for a workload of a Hugging Face configuration, with the job's settings of the model."""
    if model.trust_remote_code:
        raise HarnessError("activations are not known: code of the model's folder replaces transformers'")
    return find_profile(
        config,
        route=precision_route(workload),
        attention=_kernel(model),
        checkpointing=bool(workload.activation_checkpointing),
        single_sample=workload.micro_batch_size == 1,
        device=workload.device,
        dropout=model.dropout,
        trace=trace,
    )


def precision_route(workload: Workload) -> str:
    """How low precision comes about: 'autocast' on fp32 weights, or 'cast' weights; 'fp32' without it.

    `backends/single.py`, `backends/ddp.py`: autocast. FSDP casts what it gathers (`mp_policy`), DeepSpeed the
    whole model. Where Accelerate brings the autocast, it also makes the model's outputs fp32
    (`Accelerator.prepare_model`); FSDP1 through Accelerate has it on top unless like-for-like turns it off.
    """
    strategy, asked = workload.strategy, workload.options.get("precision")
    if workload.precision == "fp32" or workload.widened:
        return "fp32"
    if not workload.mixed or asked == "cast" or strategy.zero_stage is not None:
        return "cast"
    outputs = "+outputs" if strategy.through_accelerate else ""
    if strategy.family in ("single", "ddp"):
        return f"autocast{outputs}"
    count = workload.layout.parameter_count
    changes = preset_changes(strategy, workload.precision, workload.preset, count)
    # `Accelerator._prepare_fsdp2` does not call `prepare_model`.
    cast_alone = strategy.family == "fsdp2" or any(c.setting == ACCELERATOR_PRECISION for c in changes)
    return "cast" if not outputs or cast_alone else f"cast+autocast{outputs}"


def _kernel(model: ModelSection) -> str | None:
    """The kernel that transformers is asked for; None: its own choice."""
    # FlashAttention's package keeps what the flash kernel behind sdpa keeps.
    return "sdpa" if model.attention_kernel == "flash_attention_2" else model.attention_kernel


def find_profile(
    config: Mapping[str, Any],
    *,
    route: str,
    attention: str | None,
    checkpointing: bool,
    single_sample: bool,
    device: str,
    dropout: float | None = 0.0,
    trace: Trace | None = None,
) -> ActivationProfile:
    """The same for a Hugging Face configuration."""
    variant: dict[str, Any] = {
        "route": route, "attention": attention, "checkpointing": checkpointing, "device": device,
        "single_sample": single_sample,
    }  # fmt: skip
    if dropout != 0:  # profiles are shipped without
        variant["dropout"] = dropout
    shipped = _shipped().get(config_key(config), {}).get(variant_key(variant))
    if shipped is not None and dropout == 0:
        return from_json(shipped)
    request = {"config": dict(config), "variant": variant}
    return _traced(json.dumps(request, sort_keys=True, default=str), trace or _trace)


def config_key(config: Mapping[str, Any]) -> str:
    """Digest of what decides a profile."""
    relevant = {key: value for key, value in config.items() if key not in NOT_IN_A_PROFILE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]


def variant_key(variant: Mapping[str, Any]) -> str:
    """Name of a variant of a model's profile."""
    flags = [name for name in ("checkpointing", "single_sample") if variant[name]]
    return " ".join([variant["device"], variant["route"], variant["attention"] or "auto", *flags])


@lru_cache(maxsize=1)
def _shipped() -> dict[str, dict[str, Any]]:
    """Profiles by configuration and variant; `benchmarks/activation_profiles.py` writes the files.

    Of a configuration that stands in several files, the variants of all of them.
    """
    document: dict[str, dict[str, Any]] = {}
    for file in sorted(SHIPPED.parent.glob("activations*.json.xz")):
        for key, variants in json.loads(lzma.decompress(file.read_bytes())).items():
            document[key] = document.get(key, {}) | variants
    return document


@lru_cache(maxsize=64)
def _traced(request: str, trace: Trace) -> ActivationProfile:
    """Traced in another process, since tracing needs torch, and kept in the user's cache."""
    key = hashlib.sha256((request + _versions()).encode()).hexdigest()[:24]
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sharding-harness" / "activations"
    )
    file = cache / f"{key}.json"
    if not file.exists():
        text = trace(request)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError:
            return from_json(json.loads(text))
    return from_json(json.loads(file.read_text()))


def _trace(request: str) -> str:
    command = [sys.executable, "-m", TRACER]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ran = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=TRACING_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"tracing the model's activations took over {TRACING_SECONDS} s") from error
    if ran.returncode:
        raise HarnessError(f"the model's activations cannot be traced: {_error_line(ran.stderr)}")
    return ran.stdout


def _error_line(text: str) -> str:
    """The line that names the error, whose message may have further lines; else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if ERROR_LINE.match(line)]
    return (named or lines)[-1]


def _versions() -> str:
    from importlib.metadata import version

    return f"{version('torch')} {version('transformers')} {_tracer_digest()}"


def _tracer_digest() -> str:
    worker = Path(__file__).parents[1] / "worker"
    files = ("activation_trace.py", "kernel_scratch.py", "storage_events.py", "trace_profile.py")
    return hashlib.sha256(b"".join((worker / name).read_bytes() for name in files)).hexdigest()
