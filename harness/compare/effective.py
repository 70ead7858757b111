"""What really runs, field by field, and which differences change the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.compare.measures import reduced_dtypes
from harness.record import Record

Effect = Literal["mathematics", "cost"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of what runs, and what a difference in it changes."""

    name: str
    effect: Effect
    """'mathematics': what is computed; 'cost': only speed, memory or communication."""
    read: Callable[[Record], Any]
    """The field's value, or None where nothing is known of it."""


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """A setting in which a run differs from its reference."""

    setting: str
    effect: Effect
    reference: Any
    given: Any


def _told(key: str) -> Callable[[Record], Any]:
    """A field as the backend read it back from its library."""
    return lambda record: (record.backend.effective or {}).get(key)


def _seen(key: str) -> Callable[[Record], Any]:
    """A field as the harness saw it itself."""
    return lambda record: getattr(record.observed, key) if record.observed else None


def compute_dtype(record: Record) -> str | None:
    """Dtype of the matrix products: autocast's, else that of the weights."""
    effective = record.backend.effective or {}
    return effective.get("autocast_dtype") or effective.get("parameter_dtype")


def clipping(record: Record) -> str | None:
    """The clipping in force: a number or 'none'; None: unknown."""
    effective = record.backend.effective
    if effective is None or "gradient_clipping" not in effective:
        return None
    value = effective["gradient_clipping"]
    return "none" if value is None else f"{value:g}"


def optimizer_class(record: Record) -> str | None:
    """Class of the optimizer; None where only a wrapper of Accelerate was seen, which is none itself."""
    name: str | None = (record.backend.effective or {}).get("optimizer")
    return None if name == "accelerate.optimizer.AcceleratedOptimizer" else name


def loss_scale(record: Record) -> float | str | None:
    """What multiplies the loss before the backward pass; 'none' without a scaler; None: unknown."""
    effective = record.backend.effective
    if effective is None or "loss_scale" not in effective:
        return None
    scale: float | None = effective["loss_scale"]
    return "none" if scale is None else scale


def optimizer_constants(record: Record) -> list[str] | None:
    """Constants of the optimizer's groups, whatever their order, as the live optimizer holds them."""
    if record.observed and record.observed.optimizer_groups:
        groups = record.observed.optimizer_groups
    elif record.backend.effective and record.backend.effective.get("optimizer_groups"):
        groups = record.backend.effective["optimizer_groups"]
    else:
        return None
    keys = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
    return sorted({", ".join(f"{key} {group[key]}" for key in keys if key in group) for group in groups})


def master_dtypes(record: Record) -> list[str] | None:
    """Dtypes of the tensors that the optimizer updates."""
    if record.observed and record.observed.master_dtypes:
        return record.observed.master_dtypes
    told = (record.backend.effective or {}).get("master_dtype")
    return [told] if told else None


def _state_dtypes(record: Record) -> list[str] | None:
    """Dtypes of Adam's moments; None where another optimizer trains than the one that was built."""
    return (record.observed.optimizer_state_dtypes or None) if record.observed else None


def reduce_dtypes(record: Record) -> list[str] | None:
    """Dtypes in which gradients crossed the wire: counted, else as the backend says."""
    counted = reduced_dtypes(record)
    if counted:
        return counted
    told = (record.backend.effective or {}).get("reduce_dtype")
    return [told] if told and record.world.world_size > 1 else None


SETTINGS = (
    Setting(name="gradient clipping", effect="mathematics", read=clipping),
    Setting(name="norm that clips", effect="mathematics", read=_told("gradient_norm")),
    Setting(name="optimizer", effect="mathematics", read=optimizer_class),
    Setting(name="optimizer constants", effect="mathematics", read=optimizer_constants),
    Setting(name="parameters without optimizer", effect="mathematics", read=_seen("parameters_left_out")),
    Setting(name="frozen parameters", effect="mathematics", read=_seen("frozen_parameters")),
    Setting(name="dtype of masters", effect="mathematics", read=master_dtypes),
    Setting(name="dtype of optimizer states", effect="mathematics", read=_state_dtypes),
    Setting(name="dtype of computation", effect="mathematics", read=compute_dtype),
    Setting(name="dtype of reduction", effect="mathematics", read=reduce_dtypes),
    Setting(name="dtype of gradients", effect="mathematics", read=_told("gradient_dtype")),
    Setting(name="dtype of accumulation", effect="mathematics", read=_told("accumulation_dtype")),
    Setting(name="attention kernel", effect="mathematics", read=_seen("attention")),
    Setting(name="dropout", effect="mathematics", read=_seen("dropout")),
    Setting(name="TF32", effect="mathematics", read=_seen("tf32")),
    Setting(name="loss scale", effect="mathematics", read=loss_scale),
    Setting(name="dtype of weights", effect="cost", read=_told("parameter_dtype")),
    Setting(name="dtype of gathering", effect="cost", read=_told("gather_dtype")),
    Setting(name="activation checkpointing", effect="cost", read=_seen("activation_checkpointing")),
    Setting(name="compiled", effect="cost", read=_seen("compiled")),
    Setting(name="offload", effect="cost", read=_told("offload")),
    Setting(name="synchronisation of gradients", effect="cost", read=_told("gradient_synchronisation")),
    Setting(name="bytes of a reduction", effect="cost", read=_told("reduce_bucket_bytes")),
    Setting(name="prefetch", effect="cost", read=_told("prefetch")),
    Setting(name="wrap units", effect="cost", read=lambda r: len(_told("wrap_units")(r) or ()) or None),
)


def setting_differences(reference: Record, record: Record) -> list[SettingDifference]:
    """Settings that both know and that differ; what only one of them knows is passed over."""
    found = []
    for setting in SETTINGS:
        left, right = setting.read(reference), setting.read(record)
        if left is not None and right is not None and left != right:
            found.append(
                SettingDifference(setting=setting.name, effect=setting.effect, reference=left, given=right)
            )
    return found
