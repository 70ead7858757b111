"""Reads a configuration: YAML file, then --set values, checked with one-line errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.backends.refusals import choices, explain_refusal, explain_refusals
from harness.backends.yaml_values import InvalidYaml, parse_value
from harness.errors import HarnessError
from harness.files import read_settings
from harness.job.experiment import INHERITS, Experiment
from harness.job.job import FACTORIES, Job, SettingsSection, split_factory
from harness.job.job import NAMED_FILES as SETTINGS
from harness.shipped import resolve

Model = TypeVar("Model", bound=BaseModel)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises HarnessError that begins with `where`."""
    try:
        return parse_value(text)
    except InvalidYaml as error:
        raise HarnessError(f"{where} {error}") from error


def read_yaml_file(path: Path, what: str, model: type[Model], must_be: str, advice: str = "") -> Model:
    """Read and validate; `what` names the kind of file and `must_be` the mapping that it should hold.

    Raises HarnessError naming the file, what was given and what is allowed.
    """
    document = parse_yaml(read_settings(path, what, advice or f"; give {must_be}"), f"{what} {path}")
    if not isinstance(document, dict):
        raise HarnessError(f"{what} {path} must be {must_be}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise HarnessError(f"{what} {path}: {explain_refusal(error, model)}") from error


@cache
def other_tools() -> dict[str, list[str]]:
    """Settings, with a value where one is meant, by names and values that other tools have for them."""
    text = files(__package__).joinpath("other_tools.yaml").read_text(encoding="utf-8")
    found: dict[str, list[str]] = parse_value(text)
    return found


def settings_by_name() -> Mapping[str, tuple[str, ...]]:
    """Dotted settings by their last word and by other tools' names, in small letters."""
    found = {name: tuple(meant) for name, meant in other_tools().items()}
    for section, field in Experiment.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsSection):
            for key in field.annotation.model_fields:
                found[key] = (*found.get(key, ()), f"{section}.{key}")
    return found


HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")
BYTES = ("data", "tokenizer", "bytes")
"""The tokenizer that has no files."""


def _given(document: dict[str, Any], settings: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Section, key and value of those of these settings that are given as text."""
    for section, key in settings:
        values = document.get(section)
        if isinstance(values, dict) and isinstance(given := values.get(key), str):
            yield section, key, given


def count_from(folder: Path, document: dict[str, Any]) -> None:
    """Let relative paths of a configuration file count from the file's folder; hub names stay.

    A path that exists only from the working directory stays, too.
    """
    for section, key, given in _given(document, SETTINGS):
        if not given or (section, key, given) == BYTES:
            continue
        path = os.path.normpath(folder / os.path.expanduser(given))
        if os.path.exists(path):
            # A bare word would be looked up on the hub where the working directory changes.
            counts = os.path.isabs(path) or os.sep in path
        else:
            counts = given.startswith(("./", "../")) and not os.path.exists(given) and os.sep in path
        if counts:
            document[section][key] = path


def expand_home(document: dict[str, Any]) -> None:
    """Replace a leading '~' by the home folder: a shell leaves it after `--set model.name=`."""
    for section, key, given in _given(document, SETTINGS):
        if given.startswith("~"):
            document[section][key] = os.path.expanduser(given)


def only_elsewhere(job: Job) -> list[str]:
    """Settings with an absolute path that this machine lacks, as 'model.name /scratch/models/mine'."""
    given = {f"{section}.{key}": getattr(getattr(job, section), key) for section, key in SETTINGS}
    return [
        f"{name} {path}" for name, path in given.items()
        if path and os.path.isabs(path) and not os.path.exists(path)
    ]  # fmt: skip


def require_existing(job: Job, *, elsewhere: bool = False) -> None:
    """Raise HarnessError for a path of the job that leads nowhere; hub names are not looked up.

    `elsewhere`: the job runs on other machines, which may have what an absolute path names.
    """
    for section, key in SETTINGS:
        given = getattr(getattr(job, section), key)
        if given is None or os.path.exists(given) or (section, key, given) == BYTES:
            continue
        if elsewhere and os.path.isabs(given):
            continue
        is_local = (section, key) == ("data", "path") and job.data.source != "datasets"
        if is_local:
            what = "folder" if job.data.source == "images" else "file"
            raise HarnessError(
                f"data.path '{given}' does not exist{_seen_from(given)}; give an existing {what}"
            )
        if not HUB_NAME.fullmatch(given):
            raise HarnessError(
                f"{section}.{key} '{given}' does not exist{_seen_from(given)}; give a local folder, or a "
                "name of the hub such as gpt2 or bigscience/bloom-560m"
            )


def find_factories(document: dict[str, Any], folders: Sequence[Path]) -> None:
    """Replace the modules of factories that lie in one of these folders by their files, the first found.

    'shapes:images' becomes 'configs/shapes.py:images'; installed modules stay.
    """
    for section, key, given in _given(document, FACTORIES):
        with suppress(ValueError):  # said when the document is validated
            place, function = split_factory(given)
            if place.endswith(".py"):
                names = [os.path.expanduser(place)]
            else:
                path = place.replace(".", os.sep)
                names = [f"{path}.py", os.path.join(path, "__init__.py")]
            found = (folder / name for folder in folders for name in names)
            if (file := next((file for file in found if file.is_file()), None)) is not None:
                document[section][key] = f"{os.path.normpath(file)}:{function}"


def _seen_from(given: str) -> str:
    return "" if os.path.isabs(given) else f" in {Path.cwd()}"


FOREIGN_KEYS = {"Accelerate": "distributed_type", "DeepSpeed": "zero_optimization"}
"""A key by which the configuration of another tool is known."""


def load_experiment(path: Path | None, assignments: Sequence[str] = ()) -> Experiment:
    """Read the YAML file, apply 'a.b=c' assignments in order, validate.

    Values of a file stand over those of the files that it `inherits`, section by section and key by key.

    Values after '=' are YAML, so `training.steps=60` is a number and `model.config={...}` a mapping.
    Relative paths in a file count from its folder, those of assignments from the working directory. Modules
    of factories are looked for in both.
    Raises HarnessError naming every key that is wrong, what was given and what is allowed.
    """
    document = _with_inherited(path, ()) if path else {}
    for assignment in assignments:
        _assign(document, assignment)
    expand_home(document)
    find_factories(document, [Path(), *([path.parent] if path else [])])
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise HarnessError(explain_refusals(error, Experiment, settings_by_name())) from error


def _with_inherited(path: Path, heirs: Sequence[Path]) -> dict[str, Any]:
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
    merged: dict[str, Any] = {}
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise HarnessError(
            f"configuration {path}: `{INHERITS}` was given {bases!r}; give a file, or a list of "
            "files, where later ones override earlier ones"
        )
    for name in names:
        base = resolve(Path(name), "configs")
        base = base if base.is_absolute() else path.parent / base
        merged = _merged(merged, _with_inherited(base, [*heirs, own]))
    return _merged(merged, document)


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


CONFIGURATIONS = "`harness settings --write FILE` writes one with every setting, @default is the default job"


def _read(path: Path) -> dict[str, Any]:
    text = read_settings(path, "configuration", f"; {CONFIGURATIONS}")
    document = parse_yaml(text, f"configuration {path}")
    if document in (None, {}):
        raise HarnessError(f"configuration {path} is empty; {CONFIGURATIONS}")
    if not isinstance(document, dict):
        raise HarnessError(
            f"configuration {path} holds a {type(document).__name__}; it must be a mapping of "
            f"{choices('', Experiment.model_fields)}"
        )
    for tool, key in FOREIGN_KEYS.items():
        if key in document:
            raise HarnessError(
                f"configuration {path} has '{key}', so it is one of {tool}: give it with "
                f"--from-{tool.lower()}; --config takes {choices('', Experiment.model_fields)}"
            )
    return document


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, _, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not text.strip() or not all(parts):
        raise HarnessError(f"--set was given '{assignment}'; write SECTION.KEY=VALUE, with null for no value")
    value = parse_yaml(text, f"--set {key}")
    target = document
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise HarnessError(f"--set {key}: '{part}' is a value ({inner!r}), not a section")
        target = inner
    target[parts[-1]] = value
