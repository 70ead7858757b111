"""Reads a configuration: YAML file, then --set values, checked with one-line errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.backends.explain import choices, explain_all
from harness.backends.values import InvalidYaml, parse_value
from harness.errors import HarnessError
from harness.local_paths import count_from, expand_home, find_factories
from harness.plain_files import read_settings
from harness.renamed import Notify, rename_assigned, rename_settings, require_one_name
from harness.setting_names import settings_by_name
from harness.shipped import resolve
from harness.spec import Experiment
from harness.spec.experiment import INHERITS


def load_experiment(
    path: Path | None, assignments: Sequence[str] = (), notify: Notify = lambda _: None
) -> Experiment:
    """Read the YAML file, apply 'a.b=c' assignments in order, validate.

    Old names of settings are read; `notify` is called once for each. Values of a file stand over those of the
    files that it `inherits`, section by section and key by key.

    Values after '=' are YAML, so `training.steps=60` is a number and `model.config={...}` a mapping.
    Relative paths in a file count from its folder, those of assignments from the working directory. Modules
    of factories are looked for in both.
    Raises HarnessError naming every key that is wrong, what was given and what is allowed.
    """
    notices: dict[str, None] = {}
    document = _with_inherited(path, (), notices.setdefault) if path else {}
    require_one_name(assignment.partition("=")[0].strip() for assignment in assignments)
    for assignment in assignments:
        _assign(document, assignment, notices.setdefault)
    for notice in notices:
        notify(notice)
    expand_home(document)
    find_factories(document, [Path(), *([path.parent] if path else [])])
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise HarnessError(explain_all(error, Experiment, settings_by_name())) from error


def _with_inherited(path: Path, heirs: Sequence[Path], notify: Notify) -> dict[str, Any]:
    """The values of a file, with those of the files it inherits where it has none.

    `heirs`: the files that inherit it. Raises HarnessError, also for a file that inherits itself.
    """
    own = Path(os.path.realpath(path))  # Path.resolve() raises for links in a circle
    if own in heirs:
        raise HarnessError(
            f"configuration {path} inherits itself; remove its `{INHERITS}` or that of its base"
        )
    document = _read(path)
    # A section whose lines are all commented out is empty, not null.
    document = {key: {} if value is None else value for key, value in document.items()}
    bases = document.pop(INHERITS, [])
    count_from(path.parent, document)
    find_factories(document, [path.parent, Path()])
    rename_settings(document, notify)
    merged: dict[str, Any] = {}
    for name in _names(bases, path):
        base = resolve(Path(name), "configs")
        base = base if base.is_absolute() else path.parent / base
        merged = _merged(merged, _with_inherited(base, [*heirs, own], notify))
    return _merged(merged, document)


def _names(given: Any, path: Path) -> list[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise HarnessError(
            f"configuration {path}: `{INHERITS}` was given {given!r}; give a file, or a list of "
            "files of which later ones go before earlier ones"
        )
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "\0" not in name


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Own values before those of the base, mappings key by key; values of another model type do not mix."""
    if "model_type" in own and own["model_type"] != base.get("model_type"):
        return own
    merged = dict(base)
    for key, value in own.items():
        before = merged.get(key)
        merged[key] = (
            _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        )
    return merged


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
