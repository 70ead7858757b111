"""What the papers count for a strategy, whatever the library, and what explains the difference to it.

Memory: the ZeRO paper (arXiv 1910.02054, section 5 and figure 1). Communication: the same, section 7, and the
FSDP paper (arXiv 2304.11277).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from harness.backends.base import Precision
from harness.backends.strategy import SHARDINGS, StrategyKind
from harness.forms import terms
from harness.forms.activations import recomputed_share
from harness.forms.layout import DTYPE_BYTES
from harness.forms.single import ADAM_MOMENTS
from harness.forms.workload import Role, Workload
from harness.nested import totals


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What the closed forms need of a model."""

    multiplying_parameters: int
    block_parameters: int
    """Those of the transformer blocks, which recomputation runs again."""
    layers: int
    attention_width: int
    """Heads times head size, H Q."""
    sequence_length: int
    frozen_parameters: int = 0
    """Of the multiplying ones, those below adapters: gradients go through them, and they have none."""


def attention_flops_per_token(geometry: ModelGeometry) -> int:
    """12 L H Q T: scores and weighted values, forward and backward."""
    return 12 * geometry.layers * geometry.attention_width * geometry.sequence_length


def model_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 12 L H Q T: a weight multiplies in the forward pass, for its input's gradient and for its own.

    A frozen one has no gradient of its own: 4 of it instead of 6. With adapters of A elements on a frozen
    base of N these are 4 N + 6 A + 12 L H Q T.
    """
    products = 6 * geometry.multiplying_parameters - 2 * geometry.frozen_parameters
    return products + attention_flops_per_token(geometry)


def hardware_flops_per_token(geometry: ModelGeometry, *, recomputation: bool | str) -> int:
    """Model FLOPs, and 2 N + 4 L H Q T once more of the blocks that recompute.

    recomputation: as `training.activation_checkpointing` has it.
    """
    again = 2 * geometry.block_parameters + attention_flops_per_token(geometry) // 3
    return model_flops_per_token(geometry) + int(again * recomputed_share(recomputation, geometry.layers))


def least_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 6 L H Q T: what even a kernel that skips the masked half of attention must do."""
    return model_flops_per_token(geometry) - attention_flops_per_token(geometry) // 2


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """One product, as torch.cuda names it."""

    words: tuple[str, ...]
    """The device's name contains all of them."""
    teraflops: Mapping[str, float]
    sheet: str


DEVICE_PEAKS = tuple(
    DevicePeak(words=tuple(device["words"]), teraflops=device["teraflops"], sheet=device["sheet"])
    for device in tomllib.loads(files(__package__).joinpath("device_peaks.toml").read_text("utf-8"))["device"]
)


STUB = "CUDA stub"
"""The name of devices without hardware begins so (`tests/gpu_stub/native/device.cpp`)."""


def is_stub(device_name: str) -> bool:
    """Whether a device only answers as one would, as in the project's tests."""
    return device_name.startswith(STUB)


@lru_cache
def find_peak(device_name: str, dtype: str) -> tuple[float, str] | None:
    """Peak in FLOP/s and the sheet it is from; None: the device or its rate for the dtype is unknown.

    device_name: as torch.cuda.get_device_name() says it.
    dtype: 'float32', 'tf32', 'bfloat16', 'float16', 'float8'.
    """
    words = device_name.replace("-", " ").replace("_", " ").upper().split()
    if "MIG" in words or is_stub(device_name):  # a slice of the device, or none
        return None
    for device in DEVICE_PEAKS:
        if all(word.upper() in words for word in device.words):
            in_half = device.teraflops.get("bfloat16") if dtype == "float16" else None
            rate = device.teraflops.get(dtype, in_half)
            return None if rate is None else (rate * 1e12, device.sheet)
    return None


BILLION = 1e9
SECONDS_PER_HOUR = 3600.0
JOULES_PER_KILOWATT_HOUR = 3.6e6


def gpu_hours(tokens_per_second: float, gpus: int) -> float:
    """Hours of one GPU for 1e9 tokens where `gpus` together train `tokens_per_second`."""
    return BILLION / tokens_per_second * gpus / SECONDS_PER_HOUR


def kilowatt_hours(tokens_per_second: float, watts: float) -> float:
    """Energy for 1e9 tokens at this power and rate."""
    return BILLION / tokens_per_second * watts / JOULES_PER_KILOWATT_HOUR


SHARDED_KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("masters", "optimizer"),
    ("masters", "optimizer", "gradients"),
    ("masters", "optimizer", "gradients", "weights"),
)
"""By stage."""
ELEMENT_BYTES: dict[str, dict[str, int]] = {
    "mixed": {"weights": 2, "gradients": 2, "masters": 4, "optimizer": 8},
    "fp32": {"weights": 4, "gradients": 4, "masters": 0, "optimizer": 8},
    "bf16": {"weights": 2, "gradients": 2, "masters": 0, "optimizer": 4},
}


def textbook_states(
    stage: int,
    parameters: int,
    shards: int,
    precision: Precision,
    *,
    trained: int | None = None,
    moments: int = ADAM_MOMENTS,
) -> dict[str, float]:
    """Bytes per rank and kind; `trained`: how many of the parameters get gradients, by default all.

    Mixed precision, per parameter: 2 weights, 2 gradients, 12 of fp32 master and moments: DDP 16 P, ZeRO-1
    4 P + 12 P / N, ZeRO-2 2 P + 14 P / N, ZeRO-3 16 P / N. All fp32: 4, 4 and 8.
    """
    updated = parameters if trained is None else trained
    widths = dict(ELEMENT_BYTES["mixed" if precision.endswith("-mixed") else precision])
    widths["optimizer"] = widths["optimizer"] * moments // ADAM_MOMENTS
    pieces = {True: shards, False: 1}
    return {
        kind: width * (parameters if kind == "weights" else updated) / pieces[kind in SHARDED_KINDS[stage]]
        for kind, width in widths.items()
    }


def textbook_sent_bytes(
    sharding: str,
    parameters: int,
    world_size: int,
    *,
    weight_bytes: int,
    reduce_bytes: int,
    shard_size: int | None = None,
    trained: int | None = None,
    after_update: bool = False,
    second_copy_ranks: int | None = None,
) -> float | None:
    """Bytes that a rank sends per optimizer step with one synchronisation; None: no closed form here.

    With P parameters, f = (N - 1) / N, w and r bytes per element of gathered weights and reduced
    gradients: DDP 2 f P r; ZeRO-1 and ZeRO-2 and SHARD_GRAD_OP f P (w + r); ZeRO-3 and FULL_SHARD
    f P (2 w + r); hybrid the same within S ranks, plus an all-reduce of P / S over N / S replicas.
    Of layers in stages: None, since activations cross, whose size the parameters do not tell.
    Of frozen weights no gradient is reduced; `trained` counts the others. `after_update`: weights are
    gathered after their update, so only those that have one. `second_copy_ranks`: the backward pass gathers
    within groups of so many ranks, which keep a copy (hpZ, arXiv 2306.10209, section 3.2).
    """
    facts = SHARDINGS.get(sharding)
    shards = shard_size if facts and facts.has_replicas else world_size
    if facts is None or not shards or facts.cuts_layers:
        return None
    if sharding == "single":
        return 0.0
    updated = parameters if trained is None else trained
    if sharding == "none":
        return 2 * (world_size - 1) / world_size * updated * reduce_bytes
    replicas = world_size // shards
    moved = updated if after_update else parameters
    passes = 2 if facts.reshards and second_copy_ranks is None else 1
    inside = (shards - 1) / shards * (passes * weight_bytes * moved + reduce_bytes * updated)
    if facts.reshards and second_copy_ranks:
        inside += (second_copy_ranks - 1) / second_copy_ranks * weight_bytes * moved
    return inside + 2 * (replicas - 1) / replicas * updated / shards * reduce_bytes


def gathers_updated(strategy: StrategyKind) -> bool:
    """ZeRO 1 and 2 gather what they have updated, the others what they are about to use."""
    return strategy.zero_stage in (1, 2)


@dataclass(frozen=True, kw_only=True)
class TermDifference:
    """One cause of what an implementation sends beyond the textbook, or less."""

    term: str
    expected_bytes: float
    """Ring bytes per rank and step."""
    textbook_bytes: float
    remark: str

    @property
    def difference(self) -> float:
        return self.expected_bytes - self.textbook_bytes


def textbook_collectives(
    workload: Workload, *, weight_dtype: str, reduce_dtype: str
) -> list[terms.Collective]:
    """What `textbook_sent_bytes` adds up, collective by collective, under the terms of the families."""
    strategy, trained = workload.strategy, workload.layout.trained_count
    count = trained if gathers_updated(strategy) else workload.layout.parameter_count
    weights, gradients = count * DTYPE_BYTES[weight_dtype], trained * DTYPE_BYTES[reduce_dtype]
    role: Role = "shard" if strategy.facts.has_replicas else "world"
    again: Role = role if workload.second_copy_ranks is None else "shard"

    def gather(phase: str, term: str) -> terms.Collective:
        of = role if term != terms.BACKWARD else again
        return terms.Collective(phase, "all_gather", weight_dtype, term, weights, role=of)

    def reduce(op: str) -> terms.Collective:
        return terms.Collective("backward", op, reduce_dtype, terms.GRADIENTS, gradients, role=role)

    if strategy.sharding == "single" or strategy.facts.cuts_layers:
        return []
    if strategy.sharding == "none":
        return [reduce("all_reduce")]
    found = [gather("step", terms.UPDATED) if gathers_updated(strategy) else gather("forward", terms.FORWARD)]
    if strategy.facts.reshards:
        found.append(gather("backward", terms.BACKWARD))
    found.append(reduce("reduce_scatter"))
    if strategy.facts.has_replicas:
        shard = gradients // workload.shards
        found.append(
            terms.Collective("backward", "all_reduce", reduce_dtype, terms.REPLICAS, shard, role="replica")
        )
    return found


def term_differences(
    workload: Workload, volume: terms.Volume, textbook: Iterable[terms.Collective]
) -> list[TermDifference]:
    """Expected minus textbook, term by term, per step; terms that agree are left out.

    The differences add up to the whole difference.
    """
    expected = _by_term(workload, (c for c in volume.collectives if c.phase in terms.STEP_PHASES))
    steps = len(workload.steps)
    given = _by_term(workload, textbook)
    remarks = dict(volume.remarks)
    found = []
    for term in dict.fromkeys((*given, *expected)):
        ours, theirs = expected.get(term, 0.0) / steps, given.get(term, 0.0)
        if ours != theirs:
            remark = remarks.get(term, "" if theirs else "the textbook leaves it out")
            found.append(TermDifference(term=term, expected_bytes=ours, textbook_bytes=theirs, remark=remark))
    return found


def _by_term(workload: Workload, collectives: Iterable[terms.Collective]) -> dict[str, float]:
    return totals((one.term, one.sent_bytes(workload)) for one in collectives)
