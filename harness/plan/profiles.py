"""Finds the activation profile of a scenario: shipped with the package, traced before, or traced now."""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from harness.backends.presets import ACCELERATOR_PRECISION, preset_changes
from harness.errors import HarnessError
from harness.files import user_cache, write_atomically
from harness.forms.activations import (
    SELECTIVE,
    ActivationProfile,
    Saved,
    Size,
    blocks_between,
    from_json,
)
from harness.forms.pipeline import samples_at_once
from harness.forms.tensor import EXCHANGED, local_workload, ranks_of
from harness.forms.workload import Workload
from harness.import_path import module_command, safe_environment
from harness.job.job import AdapterSection, ModelSection
from harness.launch.launcher import EVERY_RANK, require_libraries
from harness.plan.model import local_config, local_profile, packed_inputs
from harness.plan.scenario import Scenario

TRACER = "harness.rank.probes.activation_trace"
TRACING_SECONDS = 300
Trace = Callable[[str], str]
"""Takes a request and returns a profile, as `rank.probes.activation_trace.profile_text` does; by default in
a new process, which has to import torch first."""


def request_text(config: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    """What is asked of a tracer."""
    return json.dumps({"config": dict(config), "variant": variant}, sort_keys=True, default=str)


def traced(request: str, trace: Trace | None = None) -> ActivationProfile:
    """The profile of a request: kept from before, or traced now. Raises HarnessError if it cannot be."""
    return _traced(request, trace or _trace)


class Tracer:
    """A process that traces what it is asked, one request after the other, and imports torch once: from the
    first request until its context ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ends = ExitStack()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()
        self._process = None

    def __call__(self, request: str) -> str:
        """Raises HarnessError if it cannot be traced, or not in time."""
        if self._process is None:
            self._errors = self._ends.enter_context(TemporaryFile("w+"))  # noqa: SIM115
            self._process = subprocess.Popen(
                module_command(TRACER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                text=True, env=safe_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            self._ends.enter_context(self._process)  # closes its pipes and waits
            self._ends.callback(self._process.kill)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watch = Timer(TRACING_SECONDS, process.kill)
        watch.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
            answer = process.stdout.readline()
            is_late = not watch.is_alive()
        finally:
            watch.cancel()
        if answer:
            found: dict[str, str] = json.loads(answer)
            if "error" in found:
                raise HarnessError(found["error"])
            return found["profile"]
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()] or ["no message"]
        self.__exit__()
        if is_late:
            raise HarnessError(f"tracing the model's activations took over {TRACING_SECONDS} s")
        raise HarnessError(f"the process that traces the model's activations ended: {said[-1]}")


@lru_cache(maxsize=256)
def _traced(request: str, trace: Trace) -> ActivationProfile:
    file = _file(request)
    if file.exists():
        return from_json(json.loads(file.read_text()))
    text = trace(request)
    _keep(request, text)
    return from_json(json.loads(text))


def _keep(request: str, text: str) -> None:
    file = _file(request)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)


def _file(request: str) -> Path:
    """In the user's cache."""
    key = hashlib.sha256((request + _versions()).encode()).hexdigest()[:24]
    return user_cache() / "activations" / f"{key}.json"


def _trace(request: str) -> str:
    with Tracer() as trace:
        return trace(request)


@lru_cache(maxsize=1)
def _versions() -> str:
    require_libraries("activations of a model whose profile is not shipped")
    tracer = Path(__file__).parents[1] / "rank" / "probes" / "activation_trace.py"
    known = [*map(version, EVERY_RANK), hashlib.sha256(tracer.read_bytes()).hexdigest()]
    with suppress(OSError):  # nodes of a cluster share a cache; with products of bf16 a step takes less
        own = set(Path("/proc/cpuinfo").read_text().split())
        known += sorted(own & {"avx512_bf16", "amx_tile"})
    return " ".join(known)


SHIPPED = Path(__file__).with_name("data") / "activations.json.xz"
NOT_IN_A_PROFILE = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "layer_types", "max_window_layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers",
    "pad_token_id", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip
"""Keys of a configuration that change neither the shapes in a block nor those around the blocks."""
OUTPUTS = "+outputs"
"""Of a route on which Accelerate widens the model's outputs."""
"""Families that compute in low precision under torch's autocast."""


def activation_profile(scenario: Scenario, trace: Trace | None = None) -> ActivationProfile:
    """The profile of a scenario's model, precision route, attention kernel, checkpointing and micro-batch.

    Raises HarnessError if the model has to be traced and cannot be.
    """
    job, other = scenario.job, scenario.other
    config, adapter = other.traced(scenario)
    found = workload_profile(
        scenario.workload(), config, job.model, trace,
        adapter=adapter, chunk_tokens=job.loss.chunk_tokens, widens_outputs=not other.computes_loss,
    )  # fmt: skip
    return _bounded(other.kept(found, scenario), scenario)


def _bounded(found: ActivationProfile, scenario: Scenario) -> ActivationProfile:
    """With what views of FSDP1's flat parameters keep, and what is asked for as a bound (`neighbours`)."""
    other, checkpointing = scenario.other, scenario.job.training.activation_checkpointing
    workload, adapter = scenario.workload(), scenario.job.adapter
    if other.emulates_fp8:
        # What the largest layer of a block holds besides.
        inside = [tensor for name, tensors in scenario.model.layout.units() if name for tensor in tensors]
        shapes = [tensor.shape for tensor in inside if len(tensor.shape) == 2]
        weights, tokens = max(map(prod, shapes), default=0), max(map(sum, shapes), default=0)
        found = found.beside_blocks(Size((EMULATED_BYTES * weights, 0, 0, EMULATED_BYTES * tokens, 0, 0)))
    if (
        workload.strategy.family == "fsdp1"
        and adapter.is_present
        and not workload.options.get("wraps_layers")
    ):
        kept = saved_by_token(_of_views(scenario), workload.compute_bytes)
        found = found.with_block(kept, until_backward=checkpointing is not True)
    if other.frozen_keep is None:
        return found
    layout = workload.layout
    if workload.strategy.family == "fsdp1":  # frozen parameters flat with trained ones have a gradient
        whole = [tensors for _, tensors in layout.units() if all(map(layout.is_frozen, tensors))]
        layout = replace(layout, frozen=frozenset(tensor.name for tensors in whole for tensor in tensors))
    return found.with_frozen(
        layout, least=other.frozen_keep == "least", recomputes=checkpointing is not False
    )


def saved_by_token(values: Mapping[str, int], width: int) -> tuple[Saved, ...]:
    """What modules keep of so many values a token, of `width` bytes each."""
    return tuple(
        Saved(module=module, size=Size((0, 0, 0, width * count, 0, 0))) for module, count in values.items()
    )


def _of_views(scenario: Scenario) -> dict[str, int]:
    """Values a token that frozen layers of a block keep where they are views of a flat parameter that has
    adapters too, and so have gradients: inputs of products, and what RMS norms scale."""
    layout, config = scenario.model.layout, scenario.model.config
    inside = [tensor for name, tensors in layout.units() if name == layout.blocks[0] for tensor in tensors]
    scales = {t.name.rpartition(".")[0]: t.numel for t in inside if "norm" in t.name and len(t.shape) == 1}
    biased = {t.name.rpartition(".")[0] for t in inside if t.name.endswith(".bias")}
    norms = {name: width for name, width in scales.items() if name not in biased}
    return packed_inputs(layout, scenario.job.adapter, str(config.get("model_type"))) | norms


EMULATED_BYTES = 9
"""Of each value of a product's operands and outcome at most: its size as its scale is computed, or widened
and divided by it, 4 + 4, and in fp8, 1 (torchao 0.18, float8_utils.py and float8_ops.py)."""


def workload_profile(
    workload: Workload,
    config: Mapping[str, Any],
    model: ModelSection,
    trace: Trace | None = None,
    *,
    adapter: AdapterSection | None = None,
    chunk_tokens: int | None = None,
    widens_outputs: bool = True,
) -> ActivationProfile:
    """Activation profile for a workload of a Hugging Face configuration, with the job's model settings.

    widens_outputs: False where a model computes its loss itself, before Accelerate widens its outputs.
    """
    if model.trust_remote_code:
        raise HarnessError("activations are not known: code of the model's folder replaces transformers'")
    local, variants = _asked(workload, config, model, adapter, widens_outputs)
    profile, *again = (find_profile(local, **variant, trace=trace) for variant in variants)
    if again:
        between = blocks_between(workload.activation_checkpointing) or 1
        profile = replace(profile, recomputed=again[0].block, between=between)
    if chunk_tokens is not None:
        tokens = min(chunk_tokens, samples_at_once(workload) * (workload.part_length or 0))
        profile = profile.with_loss_in_chunks(tokens, int(config["vocab_size"]))
    attention = workload.layout.attention
    if workload.strategy.sequence == "exchange" and attention and model.attention_kernel != "eager":
        # Results come back in a tensor of their own; a fused kernel's is the next layer's input else.
        own = saved_by_token({EXCHANGED: attention.heads * attention.head_size}, workload.compute_bytes)
        profile = profile.with_block(own, until_backward=workload.activation_checkpointing is not True)
    return local_profile(profile, workload)


def _asked(
    workload: Workload,
    config: Mapping[str, Any],
    model: ModelSection,
    adapter: AdapterSection | None,
    widens_outputs: bool,
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The configuration of what a rank computes, and variants of its profile: where every n-th block is
    recomputed, one without that and one with it."""
    of_adapter = {}
    if adapter is not None and adapter.is_present:  # its factor does not decide a profile
        of_adapter["adapter"] = adapter.model_dump(exclude_defaults=True, exclude={"alpha"})
    checkpointing = workload.activation_checkpointing
    route = precision_route(workload)
    variant = of_adapter | {
        "route": route if widens_outputs else route.removesuffix(OUTPUTS),
        # FlashAttention's package keeps what the flash kernel behind sdpa keeps.
        "attention": "sdpa" if model.attention_kernel == "flash_attention_2" else model.attention_kernel,
        "single_sample": samples_at_once(workload) == 1,
        "device": workload.device,
        "dropout": model.dropout,
    }
    ranks = ranks_of(workload)
    flags: tuple[bool | str, ...] = (False, True)
    if (blocks_between(checkpointing) or 1) == 1:
        flags = (checkpointing if checkpointing == SELECTIVE else bool(checkpointing),)
    return (
        config if ranks == 1 else local_config(config, ranks),
        [variant | {"checkpointing": flag} for flag in flags],
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
    outputs = OUTPUTS if strategy.through_accelerate else ""
    if local_workload(workload).strategy.of_family.autocasts:
        return f"autocast{outputs}"
    count = workload.layout.parameter_count
    changes = preset_changes(strategy, workload.precision, workload.preset, count)
    # `Accelerator._prepare_fsdp2` does not call `prepare_model`.
    cast_alone = strategy.family == "fsdp2" or any(c.setting == ACCELERATOR_PRECISION for c in changes)
    return "cast" if not outputs or cast_alone else f"cast+autocast{outputs}"


def find_profile(config: Mapping[str, Any], *, trace: Trace | None = None, **asked: Any) -> ActivationProfile:
    """Activation profile for a Hugging Face configuration; `adapter` and `dropout` may be left out: none."""
    dropout, adapter = asked.get("dropout", 0.0), asked.get("adapter")
    variant = {name: value for name, value in asked.items() if name not in ("dropout", "adapter")}
    if dropout != 0:  # profiles are shipped without
        variant["dropout"] = dropout
    if adapter is not None or isinstance(variant["checkpointing"], str):
        of_adapter = {} if adapter is None else {"adapter": dict(adapter)}
        return traced(request_text(config, variant | of_adapter), trace)
    shipped = _shipped(config_key(config), variant_key(variant)) if dropout == 0 else None
    return shipped or traced(request_text(config, variant), trace)


def config_key(config: Mapping[str, Any]) -> str:
    """Digest of what decides a profile."""
    relevant = {key: value for key, value in config.items() if key not in NOT_IN_A_PROFILE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()[:16]


def variant_key(variant: Mapping[str, Any]) -> str:
    """Name of a variant of a model's profile."""
    flags = [name for name in ("checkpointing", "single_sample") if variant[name]]
    return " ".join([variant["device"], variant["route"], variant["attention"] or "auto", *flags])


@lru_cache(maxsize=256)
def _shipped(config: str, variant: str) -> ActivationProfile | None:
    """The profile that is shipped (`benchmarks/activation_profiles.py`); None: there is none.

    Only what stands under the configuration's key is parsed: the files hold megabytes.
    """
    wanted = f'"{config}":'
    for text in _shipped_texts():
        if (start := text.find(wanted)) >= 0:
            of_config = json.JSONDecoder().raw_decode(text, start + len(wanted))[0]
            if variant in of_config:
                return from_json(of_config[variant])
    return None


@lru_cache(maxsize=1)
def _shipped_texts() -> tuple[str, ...]:
    files = sorted(SHIPPED.parent.glob("activations*.json.xz"))
    return tuple(lzma.decompress(file.read_bytes()).decode() for file in files)
