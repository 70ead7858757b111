"""What really runs, field by field, and which differences change the mathematics."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, get_args

from harness.forms.layout import derived
from harness.judge.quantities import reduced_bytes, reduced_dtypes
from harness.judge.wording import both, differs, words
from harness.record import Record

Kinds = dict[str, dict[str, str]]
"""Constants of each kind of group by their text."""
Constants = dict[str, list[str]]
"""Values of each constant by its name, one for each kind of group."""


def _by_name(kinds: Kinds) -> Constants:
    found: Constants = {}
    for _, group in sorted(kinds.items()):
        for name, value in group.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return found


def _kinds_of_group(record: Record) -> Kinds:
    """Constants of the optimizer's groups by their text, groups with equal constants once."""
    observed = record.observed.optimizer_groups if record.observed else []
    effective = record.backend.effective
    groups = observed or (effective.optimizer_groups if effective else [])
    return _kinds(groups)


def _kinds(groups: Sequence[dict[str, Any]]) -> Kinds:
    return {_joined(constants): constants for group in groups for constants in (_constants(group),)}


def _kinds_by_step(record: Record) -> list[Kinds]:
    """Constants of the groups in each step; those at the end where nothing else is known."""
    changes = record.observed.constants_by_step if record.observed else {}
    known = {first: _kinds(groups) for first, groups in changes.items()}
    at_end = _kinds_of_group(record)
    found = []
    for step in record.steps:
        begun = [first for first in known if first <= step.step]
        found.append(known[max(begun)] if begun else at_end)
    return found


@derived
def optimizer_groups(record: Record) -> dict[str, str] | None:
    """Constants by parameter; None where it is not known which parameters a group holds."""
    groups = record.observed.optimizer_groups if record.observed else []
    if not groups or any("parameters" not in group for group in groups):
        return None
    texts = [(_joined(_constants(group)), group["parameters"]) for group in groups]
    return {str(name): text for text, names in texts for name in names}


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
EXACT_CLIPPING = 1e-4
"""The same of norms that are not rounded: those of sound runs lie within 2e-6 in every precision. Decides
in which step of an altered run it began."""
ONE_NORM = 1e-3
"""Relative. Norms of gradients that were clipped to one value agree better."""
MOST_ALONG = 0.1
"""Cosine of the angle of gradient and weights at the beginning of a training. It decides no verdict."""
LAST_MICRO_STEP = "last micro-step"
EVERY_MICRO_STEP = "every micro-step"
ALL_BUT_THE_LAST = "every micro-step but the last"
SMALL_SHARE = 0.01
"""Of the reduced bytes: less than so much is norms and flags, not gradients."""
GROUPS = "parameters of the optimizer's groups"
CONSTANTS = "optimizer constants"


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

    def of(self, record: Record) -> Any:
        """The same, read once: a reference is compared with every run."""
        return record.once(("setting", self.name), lambda: self.read(record))


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
    when: str = ""
    """Where it does not hold in every step: since which, as the end of a clause."""

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
        return differs(self.setting, plural=self.plural)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("setting", "effect", "reference", "given")}


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

    As the gradients that the optimizer was given show it in the first steps, else as the backend says; after
    the training where that is something else.
    """
    effective = record.backend.effective
    if effective is None:
        return None
    after = record.backend.changed.get("gradient_clipping")
    value = after[0] if after else _seen_clipping(record, effective.gradient_clipping)
    return "none" if value is None else f"{value:g}"


def optimizer_class(record: Record) -> str | None:
    """Class of the optimizer; None where only a wrapper of Accelerate was seen, which is none itself."""
    name = record.backend.effective.optimizer if record.backend.effective else None
    name = next(iter(record.backend.changed.get("optimizer", ())), name)
    return None if name == "accelerate.optimizer.AcceleratedOptimizer" else name


def loss_scale(record: Record) -> float | str | None:
    """What multiplies the loss before the backward pass; 'none' without a scaler; None: unknown."""
    effective = record.backend.effective
    if effective is None:
        return None
    return "none" if effective.loss_scale is None else effective.loss_scale


def _seen_clipping(record: Record, reported: float | None) -> float | None:
    """What gradients were clipped to if that contradicts what the backend says, else what it says."""
    pairs = norms_of_update(record)
    if not pairs or clipping_fits(pairs, reported):
        return reported
    if clipping_fits(pairs, None):
        return None
    # Whatever was clipped has one norm; others are of gradients that were altered afterwards.
    largest = max(after for _, _, after in pairs)
    clipped = [after for _, before, after in pairs if before > largest]
    exact = record.job.training.precision == "fp32"  # else a norm that was told may be rounded by more
    apart = exact and clipped and max(clipped) - min(clipped) > ONE_NORM * max(clipped)
    if (
        apart
        or not clipping_fits(pairs, largest)
        or clips_by_part(record, reported)
        or decay_explains(record, reported)
    ):
        return reported
    return float(f"{largest:.3g}")


def clips_by_part(record: Record, limit: float | None) -> bool:
    """Whether each rank clips its own part: n parts of norm `limit` have the root of n times that together.

    A smaller part is left as it is, so only the largest step need show it. DeepSpeed clips by group.
    """
    groups = len(record.observed.optimizer_groups) if record.observed else 1
    pairs, parts = norms_of_update(record), range(2, record.world.world_size * max(1, groups) + 1)
    if limit is None or not pairs or any(after < _left(before, limit) for _, before, after in pairs):
        return False
    largest = max(after for _, _, after in pairs)
    return any(abs(largest / (limit * n**0.5) - 1) <= ONE_NORM for n in parts)


def left_by_parts(record: Record, limit: float | None) -> bool:
    """Whether each clipped step leaves more than the limit, and no more than parts of that norm on all ranks:
    so it does where each rank clips its part by the norm of that part."""
    times = [(before / limit, after / limit) for _, before, after in norms_of_update(record) if limit]
    most = record.world.world_size**0.5 * (1 + ONE_NORM)
    clipped = [(before, after) for before, after in times if before > 1]
    return bool(clipped) and all(
        1 + ONE_NORM < after <= min(most, before * (1 + ONE_NORM)) for before, after in clipped
    )


def halved_by_scale(record: Record, limit: float | None) -> bool:
    """Whether each gradient that clipping does not explain is half of its norm, of a loss that is scaled.

    DeepSpeed 0.19 divides by the scale that the same step has doubled (deepspeedai/DeepSpeed#8588); where it
    clips, that does not show.
    """
    effective = record.backend.effective
    odd = list(unclipped(record, limit))
    is_scaled = effective is not None and (effective.loss_scale or 1.0) > 1
    return bool(odd and is_scaled) and all(
        abs(2 * after / before - 1) <= ONE_NORM for _, before, after in odd
    )


def decay_explains(record: Record, limit: float | None) -> bool:
    """Whether gradients to which weight decay was added after clipping have about the norms that were seen.

    What clips leaves one norm. Adding decay x weights, of norm d, to a gradient of norm g leaves another one
    in each step, near the root of g^2 + d^2 as long as gradients hardly point along the weights.
    """
    pairs, added = norms_of_update(record), decay_norm(record)
    clipped = [after for _, before, after in pairs if limit is not None and before > limit] or [1.0]
    apart = max(clipped) - min(clipped) > ONE_NORM * max(clipped)
    whole = limit is None or all(before <= limit for _, before, _ in pairs)
    within = all(
        abs(after**2 - left**2 - added**2) <= 2 * MOST_ALONG * left * added
        for _, before, after in pairs
        for left in (_left(before, limit),)
    )
    return bool(pairs) and added > 0 and within and (apart or whole) and not clipping_fits(pairs, limit)


def decay_norm(record: Record) -> float:
    """Norm of weight decay x weights before the training; 0 where the weights were not sketched."""
    sketch = (record.initial_weights.sketch if record.initial_weights else None) or {}
    groups = record.observed.optimizer_groups if record.observed else []
    decay = {str(name): float(g.get("weight_decay", 0.0)) for g in groups for name in g.get("parameters", ())}
    if not decay and record.layout is not None:
        decay = dict.fromkeys(record.layout.decaying, record.job.optimizer.weight_decay)
    return math.hypot(*(decay[name] * sketch[name][0] for name in decay.keys() & sketch.keys()))


def altered_gradients(record: Record) -> tuple[int, float, float] | None:
    """The first step whose gradients no clipping explains: its number, their norm and what clipping leaves.

    None: clipping explains them, or they were not looked at.
    """
    pairs = norms_of_update(record)
    value = clipping(record)
    limit = None if value in (None, "none") else float(str(value))
    if record.backend.changed or record.backend.effective is None or clipping_fits(pairs, limit):
        return None
    return next((step, after, _left(before, limit)) for step, before, after in unclipped(record, limit))


def unclipped(record: Record, limit: float | None) -> Iterator[tuple[int, float, float]]:
    """Those of `norms_of_update` that clipping to this norm does not explain."""
    return (pair for pair in norms_of_update(record) if not clipping_fits([pair], limit, EXACT_CLIPPING))


@derived
def norms_of_update(record: Record) -> list[tuple[int, float, float]]:
    """Number and gradient norms of steps, before clipping and as the optimizer was given them.

    Empty where each rank clips by a norm of its own, or not all make every update: other findings.
    """
    unlike = any("optimizer steps" in part.otherwise for part in record.ranks)
    if unlike or any(own_norms(record, at) for at in range(len(record.steps))):
        return []
    return [
        (step.step, step.gradient_norm, step.applied_gradient_norm)
        for step in record.steps
        if step.gradient_norm and step.applied_gradient_norm is not None
    ]


def own_norms(record: Record, at: int) -> list[float | None]:
    """The norms of this step's gradients as ranks were told them, in order of ranks, where they differ; []:
    they are one norm, or its parts, as FSDP2 tells them."""
    norms = [rank.gradient_norms[at] for rank in record.ranks if at < len(rank.gradient_norms)]
    known = [norm for norm in norms if norm is not None]
    whole = record.steps[at].gradient_norm if len(known) == len(norms) else None
    are_parts = whole is not None and math.isclose(math.hypot(*known), whole, rel_tol=ONE_NORM)
    return [] if len(set(norms)) < 2 or are_parts else norms


def _left(norm: float, limit: float | None) -> float:
    return norm if limit is None else min(norm, limit)


def clipping_fits(
    pairs: Sequence[tuple[int, float, float]], limit: float | None, within: float = CLIPPING_TOLERANCE
) -> bool:
    """Whether clipping to this norm makes of each norm before it the one after it."""
    return all(
        abs(after - due) <= within * due for _, before, after in pairs for due in (_left(before, limit),)
    )


def synchronisation(record: Record) -> str | None:
    """Micro-steps in which gradients are reduced: counted, else as the backend says."""
    effective = record.backend.effective
    return counted_synchronisation(record) or (effective.gradient_synchronisation if effective else None)


def counted_synchronisation(record: Record) -> str | None:
    """Micro-steps in which collectives show reductions; None: nothing was counted, or there is but one."""
    early = [rank.early_reduced_bytes for rank in record.ranks if rank.early_reduced_bytes is not None]
    if not early or record.world.world_size == 1:
        return None
    share = max(early) / (reduced_bytes(record) or 1)
    if share <= SMALL_SHARE:
        return LAST_MICRO_STEP
    return ALL_BUT_THE_LAST if 1 - SMALL_SHARE < share <= 1 else EVERY_MICRO_STEP


def master_dtypes(record: Record) -> list[str] | None:
    if record.observed and record.observed.master_dtypes:
        return record.observed.master_dtypes
    return [record.backend.effective.master_dtype] if record.backend.effective else None


def reduce_dtypes(record: Record) -> list[str] | None:
    """Dtypes in which gradients crossed the wire: counted, else as the backend says."""
    counted = reduced_dtypes(record)
    if counted:
        return counted
    reported = record.backend.effective.reduce_dtype if record.backend.effective else None
    return [reported] if reported and record.world.world_size > 1 else None


REDUCTION_ROUNDING = 2.0**-7
"""Relative. Gradients that cross the wire in bf16 are rounded by up to 2^-9 each time they are added."""


def low_reductions(record: Record, ratio: float) -> list[str]:
    """Low dtypes in which gradients crossed the wire, if these round by as much as this ratio of norms."""
    low = [dtype for dtype in reduce_dtypes(record) or [] if dtype != "float32"]
    return low if abs(ratio - 1) < REDUCTION_ROUNDING else []


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
    CONSTANTS: lambda r: sorted(_kinds_of_group(r)) or None,
    "dtype of masters": master_dtypes,
    # None where another optimizer trains than the one that was built.
    "dtype of optimizer states": lambda r: _seen("optimizer_state_dtypes")(r) or None,
    "dtype of computation": compute_dtype,
    "dtype of reduction": reduce_dtypes,
    "settings of NCCL": transport_variables,
    "loss scale": loss_scale,
    "dimensions of the ranks": lambda r: r.world.layout,
    "dtype of frozen weights": lambda r: _seen("frozen_dtypes")(r) or None,
    "synchronisation of gradients": synchronisation,
    "wrap units": lambda r: len(_reported("wrap_units")(r) or ()) or None,
}
"""Readers of settings that are no single field."""


def _settings() -> Iterator[Setting]:
    """Settings of `settings.toml`."""
    found = tomllib.loads(files(__package__).joinpath("settings.toml").read_text(encoding="utf-8"))
    for effect in get_args(Effect):
        for name, row in found[effect].items():
            seen, reported = row.pop("seen", None), row.pop("reported", None)
            read = OWN[name] if name in OWN else _seen(seen) if seen else _reported(reported)
            yield Setting(name=name, effect=effect, read=read, **row)


SETTINGS = tuple(_settings())


def setting_differences(reference: Record, record: Record) -> list[SettingDifference]:
    """Settings that both know and that differ; what only one of them knows is passed over."""
    found = [
        SettingDifference(
            setting=setting.name, effect=setting.effect, reference=left, given=right, plural=setting.plural,
            constants=(_by_name(_kinds_of_group(reference)), _by_name(_kinds_of_group(record)))
            if setting.name == CONSTANTS else None,
        )
        for setting in SETTINGS
        for left, right in [(setting.of(reference), setting.of(record))]
        if left is not None and right is not None and left != right
    ]  # fmt: skip
    if not any(difference.setting == CONSTANTS for difference in found):
        found += _group_differences(reference, record) or _passing_difference(reference, record)
    return [_dated(difference, reference, record) for difference in found]


CHANGED = {"gradient clipping": "gradient_clipping", "optimizer": "optimizer"}
"""Settings that are read back once more after the training, by their field."""


def _dated(difference: SettingDifference, reference: Record, record: Record) -> SettingDifference:
    """With the step in which it began, where that is not the first."""
    if (pair := record.backend.changed.get(CHANGED.get(difference.setting, ""))) is not None:
        return replace(difference, when=f", after the training; {words(pair[1])} before it")
    if difference.setting == CONSTANTS and not difference.when and (steps := _apart(reference, record)):
        if steps[0] != record.steps[0].step:
            return replace(difference, when=f", changed in step {steps[0]}")
    return difference


def _apart(reference: Record, record: Record) -> list[int]:
    """Steps at whose end the constants are not the reference's."""
    if not any(side.observed and side.observed.constants_by_step for side in (reference, record)):
        return []
    both_sides = zip(record.steps, _kinds_by_step(reference), _kinds_by_step(record), strict=False)
    return [step.step for step, left, right in both_sides if left and right and left.keys() != right.keys()]


def _passing_difference(reference: Record, record: Record) -> list[SettingDifference]:
    """Constants that are the same after the training, but not in every step of it."""
    steps = _apart(reference, record)
    if not steps:
        return []
    place = next(i for i, step in enumerate(record.steps) if step.step == steps[0])
    back = next((step.step for step in record.steps if step.step > steps[-1]), steps[-1])
    sides = [_kinds_by_step(side)[place] for side in (reference, record)]
    found = SettingDifference(
        setting=CONSTANTS, plural=True, effect="mathematics", reference=sorted(sides[0]),
        given=sorted(sides[1]), constants=(_by_name(sides[0]), _by_name(sides[1])),
        when=f", changed in step {steps[0]} and back in step {back}",
    )  # fmt: skip
    return [found]


def _group_differences(reference: Record, record: Record) -> list[SettingDifference]:
    """Parameters whose constants differ, though the groups have the same ones: each side's, by name."""
    left, right = optimizer_groups(reference) or {}, optimizer_groups(record) or {}
    names = sorted(name for name in left.keys() & right.keys() if left[name] != right[name])
    mine, theirs = ({name: side[name] for name in names} for side in (right, left))
    found = SettingDifference(setting=GROUPS, plural=True, effect="mathematics", reference=theirs, given=mine)
    return [found] if names else []
