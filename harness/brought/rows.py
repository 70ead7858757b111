"""Files of Accelerate and DeepSpeed as rows: each key taken, pinned or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.backends.base import Preset
from harness.backends.presets import Change, preset_changes
from harness.brought.accelerate import read_accelerate
from harness.brought.deepspeed import read_deepspeed
from harness.brought.files import GivenFile, read_json, read_yaml
from harness.brought.job_settings import CUT, shared, value_of, wishes, with_settings
from harness.brought.reading import Brought, Refusals
from harness.brought.rules import AUTO, Chooses, Claim, Fixed, NotUsed, Off, OfPreset, ToJob, ToOption, alike
from harness.errors import HarnessError
from harness.record import FileKind, GivenMode, GivenPart, GivenSettingPart
from harness.spec import Experiment

LARGE_MODEL = 2**62
"""Parameters: no bucket of a preset is then cut to the model's size."""
PREFETCH, LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
AUTO_SIZES = "DeepSpeed's default; Accelerate would fill in a multiple of the model's hidden size"
AS_GIVEN = "-as-given"
"""After the name of a row that is run exactly as given."""


OWN_KEYS: dict[FileKind, str] = {"accelerate": "distributed_type", "deepspeed": "zero_optimization"}
"""A key by which a file is known."""
NAMES: dict[FileKind, str] = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}


@dataclass(frozen=True, kw_only=True)
class GivenRow:
    """One row of a comparison, from a file."""

    label: str
    """Canonical: the backend with its options."""
    experiment: Experiment
    """What it trains, and how it is measured."""
    part: GivenPart


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """A file and what it asks for."""

    kind: FileKind
    name: str
    """That of its row."""
    file: GivenFile
    brought: Brought


def read_files(accelerate: Sequence[Path], deepspeed: Sequence[Path]) -> list[ReadFile]:
    """Raises HarnessError for a file that asks for what no row can have; it names every such key."""
    found: list[ReadFile] = []
    files: list[tuple[FileKind, Path]] = [("accelerate", path) for path in accelerate]
    files += [("deepspeed", path) for path in deepspeed]
    for kind, path in files:
        what, refusals = f"{NAMES[kind]} configuration", Refusals()
        is_json = kind == "deepspeed" or path.suffix == ".json"
        file = read_json(path, what) if is_json else read_yaml(path, what)
        _require_kind(kind, file)
        brought = (
            read_deepspeed(file.document, refusals)
            if kind == "deepspeed"
            else read_accelerate(file.document, path.parent, refusals)
        )
        if brought is None:
            listed = refusals.found
            numbered = (f"({n}) {text}" for n, text in enumerate(listed, 1)) if len(listed) > 1 else listed
            raise HarnessError(f"{what} {path}: {'; '.join(numbered)}")
        name = _row_name(path, [other.name for other in found])
        found.append(ReadFile(kind=kind, name=name, file=file, brought=brought))
    return found


def _require_kind(kind: FileKind, file: GivenFile) -> None:
    """Raise HarnessError for a file of the other kind, whose keys would all be unknown."""
    for other, key in OWN_KEYS.items():
        if kind != other and key in file.document and OWN_KEYS[kind] not in file.document:
            raise HarnessError(
                f"'{file.path}' has '{key}', so it is a configuration of {NAMES[other]}: give it with "
                f"--from-{other}"
            )


def _row_name(path: Path, others: Sequence[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.")[:40] or "file"
    numbered = (name, *(f"{name}-{number}" for number in range(2, len(others) + 3)))
    return next(candidate for candidate in numbered if candidate not in others)


def like_for_like(files: Sequence[ReadFile], experiment: Experiment) -> tuple[Experiment, list[GivenRow]]:
    """The job of all rows, with what the files say of it where the configuration is silent, and the rows."""
    taken = shared([file.brought for file in files], experiment)
    names = ", ".join(file.file.path.name for file in files)
    job = with_settings(experiment, taken, names)
    return job, [_row(file, job, "like-for-like", job.runtime.preset) for file in files]


def exactly_as_given(file: ReadFile, experiment: Experiment) -> GivenRow:
    """A row whose job and options are the file's, under the library's defaults."""
    own = with_settings(experiment, wishes(file.brought), file.file.path.name)
    return _row(file, own, "exactly-as-given", "library-defaults")


def _row(file: ReadFile, job: Experiment, mode: GivenMode, preset: Preset) -> GivenRow:
    backend = file.brought.backend
    strategy = registry.strategy_of(backend)
    assert strategy is not None
    changes = preset_changes(strategy, job.training.held_precision, preset, LARGE_MODEL)
    settle = _Settling(backend=backend, job=job, mode=mode, changes={c.setting: c for c in changes})
    parts = [settle.part(claim) for claim in file.brought.claims]
    options = file.brought.options | settle.options
    options["row"] = file.name + (AS_GIVEN if mode == "exactly-as-given" else "")
    if mode == "exactly-as-given":
        options["preset"] = preset
    try:
        label = registry.canonical_label(label_of(backend, options))
    except registry.UnknownBackend as error:
        raise HarnessError(f"{file.file.path}: {error}") from error
    part = GivenPart(
        file=file.file.path.name, kind=file.kind, mode=mode, sha256=file.file.sha256, settings=parts
    )
    return GivenRow(label=label, experiment=job, part=part)


def label_of(backend: str, options: Mapping[str, Any]) -> str:
    """'zero3:offload=cpu', as a person types it."""
    text = ",".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                    for key, value in options.items())  # fmt: skip
    return f"{backend}:{text}" if text else backend


class _Settling:
    """Decides key by key what a row has, and collects the options of its backend."""

    def __init__(
        self, *, backend: str, job: Experiment, mode: GivenMode, changes: Mapping[str, Change]
    ) -> None:
        self._backend = backend
        self._job = job
        self._mode = mode
        self._changes = changes
        self.options: dict[str, Any] = {}

    def part(self, claim: Claim) -> GivenSettingPart:
        match claim.rule:
            case ToJob():
                return self._job_setting(claim, claim.rule)
            case ToOption():
                return self._option(claim, claim.rule)
            case OfPreset():
                return self._of_preset(claim, claim.rule)
            case Fixed():
                return self._fixed(claim, claim.rule)
            case NotUsed():
                return _pinned(claim, None, claim.rule.reason)
            case Off():
                return _taken(claim, "off")
            case Chooses():
                return _taken(claim, claim.used, setting="backend")

    def _job_setting(self, claim: Claim, rule: ToJob) -> GivenSettingPart:
        if not self._in_force(rule.setting):
            return _pinned(claim, None, f"training.precision is {self._job.training.precision}")
        used = value_of(self._job, rule.setting)
        if claim.value == AUTO:
            return _taken(claim, used, setting=rule.setting, reason="left to the job")
        if used == claim.value:
            return _taken(claim, used, setting=rule.setting, reason=rule.reason)
        if used is None:
            used = "as the rest of the batch leaves it" if rule.setting in CUT else "none"
        return _pinned(claim, used, "the job of all rows decides it", setting=rule.setting)

    def _in_force(self, setting: str) -> bool:
        of_fp16 = setting in ("training.initial_loss_scale", "training.loss_scale_growth_interval")
        return not of_fp16 or self._job.training.precision == "fp16-mixed"

    def _option(self, claim: Claim, rule: ToOption) -> GivenSettingPart:
        if rule.only and self._backend not in rule.only:
            return _pinned(claim, None, f"no setting of {self._backend}")
        default = rule.own_defaults.get(self._backend, rule.default)
        if (change := self._changes.get(rule.option)) is not None:
            in_buckets = f"{change.value}, or the model's parameters if there are fewer"
            used = in_buckets if rule.option.endswith("_bucket_size") else change.value
            return _pinned(claim, used, change.reason, setting=rule.option)
        if rule.option == PREFETCH and (live := self._changes.get(LIVE)) is not None:
            return _pinned(claim, None, f"nothing is gathered ahead while {LIVE} is {live.value}")
        if claim.value == AUTO:
            return _pinned(claim, default, AUTO_SIZES, setting=rule.option)
        if claim.value != default:
            self.options[rule.option] = claim.value
        return _taken(claim, claim.value, setting=rule.option)

    def _of_preset(self, claim: Claim, rule: OfPreset) -> GivenSettingPart:
        change = self._changes.get(rule.setting)
        used = _leaf(change.value) if change is not None else rule.default
        if claim.value == AUTO or claim.value is None or alike(claim.value, used):
            return _taken(claim, used)
        return _pinned(claim, used, change.reason if change else "the library's default")

    def _fixed(self, claim: Claim, rule: Fixed) -> GivenSettingPart:
        if claim.value == AUTO or alike(claim.given, rule.used):
            return _taken(claim, rule.used)
        return _pinned(claim, rule.used, rule.reason)


def _leaf(value: Any) -> Any:
    """The value inside of sections with one key each: {'grad_accum_dtype': 'fp32'}."""
    while isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return value


def _taken(
    claim: Claim, used: Any, *, setting: str | None = None, reason: str | None = None
) -> GivenSettingPart:
    return GivenSettingPart(
        key=claim.key, given=claim.given, handling="taken", used=used, setting=setting, reason=reason
    )


def _pinned(claim: Claim, used: Any, reason: str, *, setting: str | None = None) -> GivenSettingPart:
    return GivenSettingPart(
        key=claim.key, given=claim.given, handling="pinned", used=used, setting=setting, reason=reason
    )
