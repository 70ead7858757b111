"""Settings of a job that files bring: which are taken, and an experiment that has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from harness.backends.explain import explain_all
from harness.brought.reading import Brought
from harness.brought.rules import AUTO, ToJob
from harness.errors import HarnessError
from harness.job.config import settings_by_name
from harness.job.experiment import Experiment
from harness.job.model import Section

CUT = ("training.global_batch_size", "training.micro_batch_size", "training.accumulation_steps")
"""The batch and its cut: of these three, two decide the third."""
LENGTH = ("training.steps", "training.epochs")
"""Only one of them is given."""
SCHEDULE = ("schedule.kind", "schedule.warmup_steps", "schedule.final_fraction", "schedule.scheduler",
            "schedule.parameters")  # fmt: skip
"""A file's scheduler replaces all of them."""
Settings = Mapping[str, Any]
"""Values by dotted name."""


def wishes(brought: Brought, given: Collection[str] = ()) -> dict[str, Any]:
    """What a file says of the job; nothing of what it leaves to it.

    A key that it does not give has its library's default, but for settings that are `given` elsewhere.
    """
    found = {
        claim.rule.setting: claim.value
        for claim in brought.claims
        if isinstance(claim.rule, ToJob) and claim.value != AUTO
        and not (claim.is_absent and claim.rule.setting in given)
    }  # fmt: skip
    return found | brought.settings


def explicit(experiment: Experiment) -> set[str]:
    """Settings that the configuration or --set gave, dotted."""
    found = set()
    for section in experiment.model_fields_set:
        values = getattr(experiment, section)
        if isinstance(values, Section):  # the task of a job is no section
            found |= {f"{section}.{key}" for key in values.model_fields_set}
    return found


def shared(files: Sequence[Brought], experiment: Experiment) -> dict[str, Any]:
    """What the job of all rows takes from files: where they agree and the configuration is silent."""
    given = explicit(experiment)
    taken: dict[str, Any] = {}
    for setting in dict.fromkeys(name for file in files for name in wishes(file, given)):
        values = [found[setting] for file in files if setting in (found := wishes(file, given))]
        if setting not in given and all(value == values[0] for value in values):
            taken[setting] = values[0]
    together = {name for file in files for name in wishes(file) if name.startswith("schedule.")}
    if not together <= set(taken):  # the schedules of the files differ
        taken = {name: value for name, value in taken.items() if name not in together}
    for group in (CUT, LENGTH, SCHEDULE):
        if given & set(group):  # together with what was given they could contradict each other
            taken = {name: value for name, value in taken.items() if name not in group}
    return taken


def with_settings(experiment: Experiment, settings: Settings, what: str) -> Experiment:
    """The experiment with other values; those that would contradict them are left out.

    Raises HarnessError, beginning with `what`, for a value that a setting does not allow.
    """
    document = experiment.model_dump(exclude_unset=True)
    if set(settings) & set(LENGTH):
        _drop(document, LENGTH)
    if "schedule.scheduler" in settings:  # warmup_steps stays for parameters that are left to the job
        _drop(document, (name for name in SCHEDULE if name != "schedule.warmup_steps"))
    cut = set(settings) & set(CUT)
    for name in CUT[::-1] if cut else ():
        if len(_given(document, CUT) | cut) > 2 and name not in cut:
            _drop(document, (name,))
    for name, value in settings.items():
        section, key = name.split(".")
        document.setdefault(section, {})[key] = value
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise HarnessError(f"{what}: {explain_all(error, Experiment, settings_by_name())}") from error


def _given(document: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    pairs = ((name, *name.split(".")) for name in names)
    return {name for name, section, key in pairs if document.get(section, {}).get(key) is not None}


def _drop(document: dict[str, Any], names: Iterable[str]) -> None:
    for section, key in (name.split(".") for name in names):
        document.get(section, {}).pop(key, None)


def value_of(experiment: Experiment, setting: str) -> Any:
    """The value of a dotted setting."""
    section, key = setting.split(".")
    return getattr(getattr(experiment, section), key)
