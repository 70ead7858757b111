"""Reads a configuration: YAML file, then --set values, checked with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.backends.explain import choices, explain_all
from harness.backends.values import InvalidYaml, parse_value
from harness.errors import HarnessError
from harness.local_paths import count_from, expand_home
from harness.plain_files import read_settings
from harness.renamed import Notify, rename_assigned, rename_settings, require_one_name
from harness.setting_names import settings_by_name
from harness.spec import Experiment


def load_experiment(
    path: Path | None, assignments: Sequence[str] = (), notify: Notify = lambda _: None
) -> Experiment:
    """Read the YAML file, apply 'a.b=c' assignments in order, validate.

    Old names of settings are read; `notify` is called once for each.

    Values after '=' are YAML, so `training.steps=60` is a number and `model.config={...}` a mapping.
    Relative paths in a file count from its folder, those of assignments from the working directory.
    Raises HarnessError naming every key that is wrong, what was given and what is allowed.
    """
    document = _read(path) if path else {}
    # A section whose lines are all commented out is empty, not null.
    document = {key: {} if value is None else value for key, value in document.items()}
    if path is not None:
        count_from(path.parent, document)
    notices: dict[str, None] = {}
    rename_settings(document, notices.setdefault)
    require_one_name(assignment.partition("=")[0].strip() for assignment in assignments)
    for assignment in assignments:
        _assign(document, assignment, notices.setdefault)
    for notice in notices:
        notify(notice)
    expand_home(document)
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise HarnessError(explain_all(error, Experiment, settings_by_name())) from error


def _read(path: Path) -> dict[str, Any]:
    document = _parse(read_settings(path, "configuration"), f"configuration {path}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise HarnessError(
            f"configuration {path} holds a {type(document).__name__}; it must be a mapping of "
            f"{choices('', Experiment.model_fields)}"
        )
    return document


def _assign(document: dict[str, Any], assignment: str, notify: Notify) -> None:
    key, _, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not text.strip() or not all(parts):
        raise HarnessError(f"--set was given '{assignment}'; write SECTION.KEY=VALUE, with null for no value")
    value = _parse(text, f"--set {key}")
    parts = rename_assigned(key.strip(), value, notify).split(".")
    target = document
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise HarnessError(f"--set {key}: '{part}' is a value ({inner!r}), not a section")
        target = inner
    target[parts[-1]] = value


def _parse(text: str, where: str) -> Any:
    try:
        return parse_value(text)
    except InvalidYaml as error:
        raise HarnessError(f"{where} {error}") from error
