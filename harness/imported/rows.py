"""Files of Accelerate and DeepSpeed as rows: each key taken, pinned or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from harness.backends import presets, registry
from harness.backends.base import Preset
from harness.backends.refusals import explain_refusals
from harness.backends.yaml_values import InvalidYaml, parse_value
from harness.errors import HarnessError
from harness.imported import reading
from harness.imported.accelerate import read_accelerate
from harness.imported.deepspeed import label_of, read_deepspeed
from harness.job.config import FOREIGN_KEYS, settings_by_name
from harness.job.experiment import Experiment
from harness.job.job import EFFECTIVE, SettingsSection
from harness.nested import leaves, removed
from harness.record import FileKind, GivenMode, GivenPart, GivenSettingPart

CUT = ("training.global_batch_size", "training.micro_batch_size", "training.accumulation_steps")
"""The batch and its cut: of these three, two decide the third."""
OF_FP16 = ("training.initial_loss_scale", "training.loss_scale_growth_interval")
LENGTH = ("training.steps", "training.epochs")
"""Only one of them is given."""
SCHEDULE = ("schedule.kind", "schedule.warmup_steps", "schedule.final_fraction", "schedule.scheduler",
            "schedule.parameters")  # fmt: skip
"""A file's scheduler replaces all of them."""
Settings = Mapping[str, Any]
"""Values by dotted name."""


def job_settings(imported: reading.Imported, given: Collection[str] = ()) -> dict[str, Any]:
    """What a file says of the job; nothing of what it leaves to it.

    A key that it does not give has its library's default, but for settings that are `given` elsewhere.
    """
    own = [key for key in imported.resolutions if key.rule.kind == "job" and key.value != reading.AUTO]
    found = {k.rule.target: k.value for k in own if not (k.is_absent and k.rule.target in given)}
    return found | imported.settings


def explicit(experiment: Experiment) -> set[str]:
    """Settings that the configuration or --set gave, dotted."""
    found = set()
    for section in experiment.model_fields_set:
        values = getattr(experiment, section)
        if isinstance(values, SettingsSection):  # the task of a job is no section
            found |= {f"{section}.{key}" for key in values.model_fields_set}
    return found


def shared(files: Sequence[reading.Imported], experiment: Experiment) -> dict[str, Any]:
    """What the job of all rows takes from files: where they agree and the configuration is silent."""
    given = explicit(experiment)
    taken: dict[str, Any] = {}
    for setting in dict.fromkeys(name for file in files for name in job_settings(file, given)):
        values = [found[setting] for file in files if setting in (found := job_settings(file, given))]
        if setting not in given and all(value == values[0] for value in values):
            taken[setting] = values[0]
    together = {name for file in files for name in job_settings(file) if name.startswith("schedule.")}
    if not together <= set(taken):  # the schedules of the files differ
        taken = {name: value for name, value in taken.items() if name not in together}
    for group in (CUT, LENGTH, SCHEDULE):
        if given & set(group):  # together with what was given they could contradict each other
            taken = {name: value for name, value in taken.items() if name not in group}
    without = _of_other_optimizers(taken.get("optimizer.kind", experiment.optimizer.kind))
    return {name: value for name, value in taken.items() if name not in without}


def with_settings(experiment: Experiment, settings: Settings, what: str) -> Experiment:
    """The experiment with other values; those that would contradict them are left out.

    Raises HarnessError, beginning with `what`, for a value that a setting does not allow.
    """
    document = experiment.model_dump(exclude_unset=True)
    if set(settings) & set(LENGTH):
        _drop(document, LENGTH)
    if "schedule.scheduler" in settings:  # warmup_steps stays for parameters that are left to the job
        _drop(document, (name for name in SCHEDULE if name != "schedule.warmup_steps"))
    if "optimizer.kind" in settings:
        _drop(document, _of_other_optimizers(settings["optimizer.kind"]))
    cut = set(settings) & set(CUT)
    for name in CUT[::-1] if cut else ():
        held = {one for one in CUT if document.get("training", {}).get(one.partition(".")[2]) is not None}
        if len(held | cut) > 2 and name not in cut:
            _drop(document, (name,))
    for name, value in settings.items():
        section, key = name.split(".")
        document.setdefault(section, {})[key] = value
    try:
        return _with_rates(Experiment.model_validate(document))
    except ValidationError as error:
        raise HarnessError(f"{what}: {explain_refusals(error, Experiment, settings_by_name())}") from error


def _with_rates(experiment: Experiment) -> Experiment:
    """The experiment with the values of scheduler's arguments that a file leaves to the job."""
    schedule, filled = experiment.schedule, {
        "warmup_min_lr": 0.0, "warmup_max_lr": experiment.optimizer.learning_rate,
        "warmup_num_steps": experiment.schedule.warmup_steps, "total_num_steps": experiment.training.steps,
    }  # fmt: skip
    parameters = {
        name: filled[name] if value == reading.AUTO and filled.get(name) is not None else value
        for name, value in schedule.parameters.items()
    }
    if parameters == schedule.parameters:
        return experiment
    return experiment.model_copy(update={"schedule": schedule.model_copy(update={"parameters": parameters})})


def _of_other_optimizers(kind: str) -> list[str]:
    """Settings that this optimizer has not."""
    return [f"optimizer.{key}" for key, kinds in EFFECTIVE.items() if kind not in kinds]


def _drop(document: dict[str, Any], names: Iterable[str]) -> None:
    for section, key in (name.split(".") for name in names):
        document.get(section, {}).pop(key, None)


LARGE_MODEL = 2**62
"""Parameters: no bucket of a preset is then cut to the model's size."""
PREFETCH, LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
AUTO_SIZES = "DeepSpeed's default; Accelerate would fill in a multiple of the model's hidden size"
ABSENT = "absent from the file: the library's default"
WRAP, WRAPPED = "auto_wrap", "TRANSFORMER_BASED_WRAP"
"""FSDP1's option of its wrap policy, and what it is without."""
AS_GIVEN = "-as-given"
"""After the name of a row that is run exactly as given."""


YAML_SUFFIXES = (".yaml", ".yml")
AT_THE_TOP = {
    kind: {key.partition(".")[0] for key in (*keys, *reading.SECTIONS[kind])}
    for kind, keys in reading.KEYS.items()
}
MOST_TYPING_ERRORS = 2
"""In the keys of a file, each of which is named with the closest one; more are another tool's."""
NAMES: dict[FileKind, str] = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}
OWN_KEYS: dict[FileKind, str] = {kind: FOREIGN_KEYS[name] for kind, name in NAMES.items()}
"""A key by which a file is known."""
OF_THE_LAUNCHER = (
    "Give the file of DeepSpeed or Accelerate that your launcher uses (accelerate launch --config_file FILE: "
    "--from-accelerate FILE), or choose a strategy with --backends."
)


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
    file: reading.GivenFile
    imported: reading.Imported
    refused: tuple[str, ...] = ()
    """Why keys were left out that no row can have."""


def read_files(
    accelerate: Sequence[Path], deepspeed: Sequence[Path], *, leaves_out: bool = False
) -> list[ReadFile]:
    """Raises HarnessError for a file that asks for what no row can have; it names every such key.

    `leaves_out`: such keys are left out where the rest of the file can be read without them.
    """
    found: list[ReadFile] = []
    files: list[tuple[FileKind, Path]] = [("accelerate", path) for path in accelerate]
    files += [("deepspeed", path) for path in deepspeed]
    for kind, path in files:
        what, refusals = f"{NAMES[kind]} configuration", reading.Refusals()
        is_json = kind == "deepspeed" and path.suffix not in YAML_SUFFIXES
        suffix = ".json" if is_json else path.suffix
        file = reading.read_file(path, what, suffix=suffix, has_comments=kind == "deepspeed")
        _require_kind(kind, file)
        imported = _read(kind, file.document, path.parent, refusals)
        refused = tuple(refusals.found)
        if imported is None and leaves_out:
            kept = deepcopy(file.document)
            known = all(removed(kept, tuple(key.split("."))) for key in refusals.keys)
            if known and len(refusals.keys) == len(
                refusals.found
            ):  # keys alone, and no section that it needs
                imported = _read(kind, kept, path.parent, reading.Refusals())
        if imported is None:
            listed = refusals.found
            numbered = (f"({n}) {text}" for n, text in enumerate(listed, 1)) if len(listed) > 1 else listed
            raise HarnessError(f"{what} {path}: {'; '.join(numbered)}")
        name = _row_name(path, [other.name for other in found])
        found.append(ReadFile(kind=kind, name=name, file=file, imported=imported, refused=refused))
    return found


def _read(
    kind: FileKind, document: Mapping[str, Any], folder: Path, refusals: reading.Refusals
) -> reading.Imported | None:
    if kind == "deepspeed":
        return read_deepspeed(document, refusals)
    return read_accelerate(document, folder, refusals)


def _require_kind(kind: FileKind, file: reading.GivenFile) -> None:
    """Raise HarnessError for a file of the other kind or of another tool, whose keys would all be unknown."""
    for other, key in OWN_KEYS.items():
        if kind != other and key in file.document and OWN_KEYS[kind] not in file.document:
            raise HarnessError(
                f"'{file.path}' has '{key}', so it is a configuration of {NAMES[other]}: give it with "
                f"--from-{other}"
            )
    own = [key for key in file.document if key in AT_THE_TOP[kind]]
    count = len(file.document)
    if count - len(own) > max(MOST_TYPING_ERRORS if own else 1, 0.75 * count):
        error = HarnessError(
            f"'{file.path}' is not a configuration of {NAMES[kind]}: {count - len(own)} of its {count} keys "
            "are another tool's."
        )
        error.add_note(OF_THE_LAUNCHER)
        raise error


def _row_name(path: Path, others: Sequence[str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.")[:40]
    try:
        is_text = isinstance(parse_value(name), str) and name.lower() != "none"
    except InvalidYaml:
        is_text = False
    if not is_text:  # an option would read it as a value, such as 3
        name = f"file-{name}".strip("-")
    numbered = (name, *(f"{name}-{number}" for number in range(2, len(others) + 3)))
    return next(candidate for candidate in numbered if candidate not in others)


def like_for_like(files: Sequence[ReadFile], experiment: Experiment) -> tuple[Experiment, list[GivenRow]]:
    """The job of all rows, with what the files say of it where the configuration is silent, and the rows."""
    taken = shared([file.imported for file in files], experiment)
    names = ", ".join(file.file.path.name for file in files)
    job = with_settings(experiment, taken, names)
    return job, [_row(file, job, "like-for-like", job.runtime.preset) for file in files]


def exactly_as_given(file: ReadFile, experiment: Experiment) -> GivenRow:
    """A row whose job and options are the file's, under the library's defaults."""
    own = with_settings(experiment, job_settings(file.imported, explicit(experiment)), file.file.path.name)
    given = explicit(experiment)
    preset = experiment.runtime.preset if "runtime.preset" in given else "library-defaults"
    return _row(file, own, "exactly-as-given", preset)


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """What a plan takes from a file."""

    backend: str
    """Canonical, with options."""
    experiment: Experiment
    settings: dict[str, Any]
    """What the file changes of the job, dotted; None: it is left to follow from the rest."""
    part: GivenPart
    refused: tuple[str, ...]


def planned_file(file: ReadFile, experiment: Experiment) -> PlannedFile:
    """Backend and job of a file, as it is run exactly as given; the preset is that of the job."""
    row = exactly_as_given(file, experiment)
    name, _, options = row.label.partition(":")
    kept = [text for text in options.split(",") if text.partition("=")[0] not in ("row", "preset", "")]
    preset = registry.parse(row.label)[1].preset
    job = with_settings(row.experiment, {"runtime.preset": preset}, file.file.path.name)
    before, after = (
        {".".join(keys): value for keys, value in leaves(one.model_dump(mode="json", exclude_unset=True))}
        for one in (experiment, job)
    )
    left = {name: None for name in CUT if name in before and name not in after}
    return PlannedFile(
        backend=registry.canonical_label(f"{name}:{','.join(kept)}" if kept else name),
        experiment=job,
        settings={name: value for name, value in after.items() if before.get(name) != value} | left,
        part=row.part,
        refused=file.refused,
    )


def _row(file: ReadFile, job: Experiment, mode: GivenMode, preset: Preset) -> GivenRow:
    backend = file.imported.backend
    strategy = registry.strategy_of(backend)
    assert strategy is not None
    changes = presets.preset_changes(strategy, job.training.held_precision, preset, LARGE_MODEL)
    resolver = _Resolver(
        backend=backend,
        job=job,
        mode=mode,
        changes={c.setting: c for c in changes},
        offload=file.imported.options.get("offload", "none"),
    )
    parts = [resolver.part(key) for key in file.imported.resolutions]
    options = file.imported.options | resolver.options
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


@dataclass(kw_only=True)
class _Resolver:
    """Decides key by key what a row has, and collects the options of its backend."""

    backend: str
    job: Experiment
    mode: GivenMode
    changes: Mapping[str, presets.PresetChange]
    options: dict[str, Any] = field(default_factory=dict)
    offload: str = "none"

    def part(self, key: reading.KeyResolution) -> GivenSettingPart:
        rule = key.rule
        match rule.kind:
            case "job":
                return self._job_setting(key)
            case "option":
                return self._option(key)
            case "preset":
                return self._of_preset(key)
            case "fixed":
                if key.is_absent:
                    return _pinned(key, rule.default, f"{ABSENT}, {key.value}; {rule.reason}")
                if key.value == reading.AUTO or reading.alike(key.value, rule.default):
                    return _taken(key, rule.default)
                return _pinned(key, rule.default, rule.reason)
            case "not_used":
                return _pinned(key, None, rule.target)
            case "off":
                return _taken(key, "off")
            case "chooses":
                return _taken(key, key.used, setting="backend")
        schedule, name = self.job.schedule, key.name.rpartition(".")[2]
        if schedule.scheduler is None:
            return _pinned(key, schedule.kind, "the job of all rows decides it", setting="schedule.kind")
        if key.is_absent:
            return _taken(key, key.value, ABSENT, setting="schedule.parameters")
        used = schedule.parameters.get(name)
        said = "left to the job" if key.value == reading.AUTO else None
        return _taken(key, used, said, setting="schedule.parameters")

    def _job_setting(self, key: reading.KeyResolution) -> GivenSettingPart:
        setting = key.rule.target
        training = self.job.training
        if training.precision != "fp16-mixed" and setting in OF_FP16:
            return _pinned(key, None, f"training.precision is {training.precision}")
        section, name = setting.split(".")
        used = getattr(getattr(self.job, section), name)
        open_batch = "follows from the rest of the batch" if used is None and setting in CUT else None
        if key.value == reading.AUTO:
            used = open_batch or used
            return _taken(key, used, "left to the job", setting=setting)
        if used == key.value:
            return _taken(key, used, ABSENT if key.is_absent else key.rule.reason, setting=setting)
        if key.is_absent:
            return _pinned(key, used, f"{ABSENT}, {key.value}; the job decides it", setting=setting)
        if used is None:
            used = open_batch or "none"
        return _pinned(key, used, "the job of all rows decides it", setting=setting)

    def _option(self, key: reading.KeyResolution) -> GivenSettingPart:
        rule, option = key.rule, key.rule.target
        has_option = option in type(registry.parse(self.backend)[1]).model_fields
        # The whole model as one unit is another comparison than like for like.
        if option == WRAP and key.value is not None and not (has_option and self.mode == "exactly-as-given"):
            given = f"{ABSENT}, NO_WRAP; " if key.is_absent else ""
            return _pinned(key, WRAPPED, f"{given}{rule.reason}")
        if not has_option:
            if option == WRAP:
                return _taken(key, WRAPPED, rule.reason)
            return _pinned(key, None, f"no setting of {self.backend}")
        if (change := self.changes.get(option)) is not None:
            in_buckets = f"{change.value}, or the model's parameters if there are fewer"
            used = in_buckets if option.endswith("_bucket_size") else change.value
            return _pinned(key, used, change.reason, setting=option)
        if option == PREFETCH and (live := self.changes.get(LIVE)) is not None:
            return _pinned(key, None, f"nothing is gathered ahead while {LIVE} is {live.value}")
        if key.value == reading.AUTO:
            return _pinned(key, rule.default, AUTO_SIZES, setting=option)
        if key.value != rule.default:
            self.options[option] = key.value
        if option == WRAP:
            return _taken(key, "NO_WRAP" if key.value else WRAPPED, rule.reason, setting=option)
        return _taken(key, key.value, ABSENT if key.is_absent else rule.reason, setting=option)

    def _of_preset(self, key: reading.KeyResolution) -> GivenSettingPart:
        change = self.changes.get(key.rule.target)
        used = key.rule.default if change is None else change.value
        while isinstance(used, dict) and len(used) == 1:  # {'grad_accum_dtype': 'fp32'}
            (used,) = used.values()
        if used == reading.COMPUTE_DTYPE:
            used = self.job.training.held_precision.removesuffix("-mixed")
        precision = self.job.training.held_precision
        strategy = registry.strategy_of(self.backend)
        assert strategy is not None
        if strategy.sequence is not None and key.rule.target == presets.COMMUNICATION_DTYPE:
            why = "with sequence parallelism DeepSpeed reads seq_parallel_communication_data_type instead"
            return _pinned(key, None, why)
        if key.value in (reading.AUTO, None) or reading.alike(key.value, used):
            return _taken(key, used)
        if change is not None or key.rule.option is None:
            return _pinned(key, used, change.reason if change else "the library's default")
        if key.rule.target == presets.DATA_TYPES:
            stage, offload = strategy.zero_stage or 0, self.offload
            if stage == 0 or presets.takes_bf16_optimizer(stage, precision, key.value, offload):
                return _pinned(
                    key, used, presets.BF16_OPTIMIZER if stage else f"stage 0 adds up in {used} only"
                )
        self.options[key.rule.option] = key.value
        return _taken(key, key.value, key.rule.reason, setting=key.rule.option)


def _handled(
    handling: Literal["taken", "pinned"],
    key: reading.KeyResolution,
    used: Any,
    reason: str | None = None,
    *,
    setting: str | None = None,
) -> GivenSettingPart:
    return GivenSettingPart(
        key=key.name, given=key.given, handling=handling, used=used, setting=setting, reason=reason
    )


_taken, _pinned = partial(_handled, "taken"), partial(_handled, "pinned")
