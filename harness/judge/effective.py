"""What really runs, field by field, and which differences change the mathematics."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from harness.judge.measures import reduced_bytes, reduced_dtypes
from harness.judge.wording import both, differs
from harness.record import Record

Constants = dict[str, list[str]]
"""Values of each constant by its name, one for each kind of group."""


def optimizer_constants(record: Record) -> list[str] | None:
    """Constants of the optimizer's groups, whatever their order, as the live optimizer holds them."""
    return sorted(_kinds_of_group(record)) or None


def constants_by_name(record: Record) -> Constants:
    """Each constant with its values, in the order of the texts."""
    found: Constants = {}
    for _, group in sorted(_kinds_of_group(record).items()):
        for name, value in group.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return found


def _kinds_of_group(record: Record) -> dict[str, dict[str, str]]:
    """Constants of the optimizer's groups by their text, groups with equal constants once."""
    observed = record.observed.optimizer_groups if record.observed else []
    effective = record.backend.effective
    groups = observed or (effective.optimizer_groups if effective else [])
    return {_joined(constants): constants for group in groups for constants in (_constants(group),)}


def optimizer_groups(record: Record) -> dict[str, str] | None:
    """Constants by parameter; None where it is not known which parameters a group holds."""
    groups = record.observed.optimizer_groups if record.observed else []
    if not groups or any("parameters" not in group for group in groups):
        return None
    return {name: _joined(_constants(group)) for group in groups for name in map(str, group["parameters"])}


def _constants(group: dict[str, Any]) -> dict[str, str]:
    keys = ("lr_scale", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum")
    return {key: str(group[key]) for key in keys if key in group}


def _joined(constants: dict[str, str]) -> str:
    """'betas [0.9, 0.95], eps 1e-08'."""
    return ", ".join(f"{name} {value}" for name, value in constants.items())


_WITHOUT_EFFECT = re.compile(r"_FILE$|DEBUG|COMM_ID|HOSTID|SOCKET_IFNAME|ASYNC_ERROR_HANDLING|TRACE|DUMP")
Effect = Literal["mathematics", "cost"]
CLIPPING_TOLERANCE = 1e-2
"""Relative. Libraries round the norm that they tell; what clips changes it by more, or does not matter."""
LAST_MICRO_STEP = "last micro-step"
EVERY_MICRO_STEP = "every micro-step"
SMALL_SHARE = 0.01
"""Of the reduced bytes: less than so much is norms and flags, not gradients."""
GROUPS = "parameters of the optimizer's groups"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of what runs, and what a difference in it changes."""

    name: str
    effect: Effect
    """'mathematics': what is computed; 'cost': only speed, memory or communication."""
    read: Callable[[Record], Any]
    """The field's value, or None where nothing is known of it."""
    plural: bool = False
    """Whether the name is a plural."""
    finding: str | None = None
    """Id of the finding that reports a difference."""
    read_constants: Callable[[Record], Constants] | None = None
    """The same value by constant, for a setting that consists of several."""


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """A setting in which a run differs from its reference."""

    setting: str
    effect: Effect
    reference: Any
    given: Any
    plural: bool = False
    """Whether the setting's name is a plural."""
    constants: tuple[Constants, Constants] | None = None
    """Those of the reference and of the run, for a setting that consists of several."""

    @property
    def texts(self) -> tuple[str, str]:
        """The run's value and the reference's for people; of several constants only those that differ."""
        reference, given = self.constants or ({}, {})
        names = [name for name, values in given.items() if reference.get(name, values) != values]
        if not names:
            return both(self.given, self.reference)
        of_run, of_reference = (
            ", ".join(f"{name} {' and '.join(side[name])}" for name in names) for side in (given, reference)
        )
        return of_run, of_reference

    @property
    def differs(self) -> str:
        """'gradient clipping differs'."""
        return differs(self.setting, plural=self.plural)

    def as_json(self) -> dict[str, Any]:
        """The difference in `diagnose --json`."""
        return {
            "setting": self.setting,
            "effect": self.effect,
            "reference": self.reference,
            "given": self.given,
        }


def _reported(key: str) -> Callable[[Record], Any]:
    """A field as the backend read it back from its library."""
    return lambda record: getattr(record.backend.effective, key, None)


def _seen(key: str) -> Callable[[Record], Any]:
    """A field as the harness saw it itself."""
    return lambda record: getattr(record.observed, key) if record.observed else None


def compute_dtype(record: Record) -> str | None:
    """Dtype of the matrix products: as their outputs show it, else autocast's, else that of the weights."""
    if record.observed and record.observed.compute_dtype:
        return record.observed.compute_dtype
    effective = record.backend.effective
    return None if effective is None else effective.autocast_dtype or effective.parameter_dtype


def clipping(record: Record) -> str | None:
    """The clipping in force: a number or 'none'; None: unknown.

    As the gradients that the optimizer was given show it in the first steps, else as the backend says.
    """
    effective = record.backend.effective
    if effective is None:
        return None
    value = _seen_clipping(record, effective.gradient_clipping)
    return "none" if value is None else f"{value:g}"


def optimizer_class(record: Record) -> str | None:
    """Class of the optimizer; None where only a wrapper of Accelerate was seen, which is none itself."""
    name = record.backend.effective.optimizer if record.backend.effective else None
    return None if name == "accelerate.optimizer.AcceleratedOptimizer" else name


def loss_scale(record: Record) -> float | str | None:
    """What multiplies the loss before the backward pass; 'none' without a scaler; None: unknown."""
    effective = record.backend.effective
    if effective is None:
        return None
    return "none" if effective.loss_scale is None else effective.loss_scale


def _seen_clipping(record: Record, reported: float | None) -> float | None:
    """What gradients were clipped to if that contradicts what the backend says, else what it says."""
    if any(len(set(norms)) > 1 for norms in zip(*(r.gradient_norms for r in record.ranks), strict=False)):
        return reported  # each rank clips by a norm of its own, which is another finding
    pairs = [
        (step.gradient_norm, step.applied_gradient_norm)
        for step in record.steps
        if step.gradient_norm and step.applied_gradient_norm is not None
    ]
    clipped = [after for before, after in pairs if after < (1 - CLIPPING_TOLERANCE) * before]
    if not clipped:
        acts = reported is not None and any(
            before > (1 + CLIPPING_TOLERANCE) * reported for before, _ in pairs
        )
        return None if acts else reported
    largest = max(clipped)
    if reported is not None and abs(largest - reported) <= CLIPPING_TOLERANCE * reported:
        return reported
    return float(f"{largest:.3g}")


def synchronisation(record: Record) -> str | None:
    """Micro-steps in which gradients are reduced: counted, else as the backend says."""
    effective = record.backend.effective
    return counted_synchronisation(record) or (effective.gradient_synchronisation if effective else None)


def counted_synchronisation(record: Record) -> str | None:
    """The same as collectives show it; None: nothing was counted, or a step has one micro-step."""
    early = [rank.early_reduced_bytes for rank in record.ranks if rank.early_reduced_bytes is not None]
    if not early or record.world.world_size == 1:
        return None
    return EVERY_MICRO_STEP if max(early) > SMALL_SHARE * reduced_bytes(record) else LAST_MICRO_STEP


def master_dtypes(record: Record) -> list[str] | None:
    """Dtypes of the tensors that the optimizer updates."""
    if record.observed and record.observed.master_dtypes:
        return record.observed.master_dtypes
    return [record.backend.effective.master_dtype] if record.backend.effective else None


def _state_dtypes(record: Record) -> list[str] | None:
    """Dtypes of Adam's moments; None where another optimizer trains than the one that was built."""
    return (record.observed.optimizer_state_dtypes or None) if record.observed else None


def _frozen_dtypes(record: Record) -> list[str] | None:
    """Dtypes in which weights are held that are not trained; None: there are none."""
    return (record.observed.frozen_dtypes or None) if record.observed else None


def reduce_dtypes(record: Record) -> list[str] | None:
    """Dtypes in which gradients crossed the wire: counted, else as the backend says."""
    counted = reduced_dtypes(record)
    if counted:
        return counted
    reported = record.backend.effective.reduce_dtype if record.backend.effective else None
    return [reported] if reported and record.world.world_size > 1 else None


def transport_variables(record: Record) -> dict[str, str] | None:
    """Variables of NCCL that can change its algorithms, and of torch's use of it; None on the CPU.

    They decide the order in which sums are taken, and speed. Those that name files, hosts or devices, that
    ask for a log, or that torchrun sets by itself, do not.
    """
    if record.world.device != "cuda" or record.environment.accelerator is None:
        return None  # older records have some of the variables only
    variables = record.environment.variables
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_", "RCCL_")) and not _WITHOUT_EFFECT.search(name)
    }


OWN: dict[str, Callable[[Record], Any]] = {
    "gradient clipping": clipping,
    "optimizer": optimizer_class,
    "optimizer constants": optimizer_constants,
    "dtype of masters": master_dtypes,
    "dtype of optimizer states": _state_dtypes,
    "dtype of computation": compute_dtype,
    "dtype of reduction": reduce_dtypes,
    "settings of NCCL": transport_variables,
    "loss scale": loss_scale,
    "dimensions of the ranks": lambda r: r.world.layout,
    "dtype of frozen weights": _frozen_dtypes,
    "synchronisation of gradients": synchronisation,
    "wrap units": lambda r: len(_reported("wrap_units")(r) or ()) or None,
}
"""Readers of settings that are no single field."""


def _settings() -> Iterator[Setting]:
    """Of `settings.toml`."""
    text = files(__package__).joinpath("settings.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    for effect in get_args(Effect):
        for name, row in found[effect].items():
            seen, reported = row.pop("seen", None), row.pop("reported", None)
            read = OWN[name] if name in OWN else _seen(seen) if seen else _reported(reported)
            constants = constants_by_name if read is optimizer_constants else None
            yield Setting(name=name, effect=effect, read=read, read_constants=constants, **row)


SETTINGS = tuple(_settings())


def setting_differences(reference: Record, record: Record) -> list[SettingDifference]:
    """Settings that both know and that differ; what only one of them knows is passed over."""
    found = []
    for setting in SETTINGS:
        left, right = setting.read(reference), setting.read(record)
        if left is not None and right is not None and left != right:
            found.append(
                SettingDifference(
                    setting=setting.name,
                    effect=setting.effect,
                    reference=left,
                    given=right,
                    plural=setting.plural,
                    constants=(read(reference), read(record)) if (read := setting.read_constants) else None,
                )
            )
    if not any(difference.setting == "optimizer constants" for difference in found):
        found += _group_differences(reference, record)
    return found


def _group_differences(reference: Record, record: Record) -> list[SettingDifference]:
    """The same constants, but of other parameters: each side has those that differ, by name."""
    left, right = optimizer_groups(reference), optimizer_groups(record)
    if left is None or right is None:
        return []
    names = sorted(name for name in left.keys() & right.keys() if left[name] != right[name])
    if not names:
        return []
    sides = ({name: side[name] for name in names} for side in (left, right))
    return [
        SettingDifference(
            setting=GROUPS, plural=True, effect="mathematics", reference=next(sides), given=next(sides)
        )
    ]
