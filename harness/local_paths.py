"""Settings that name a local file or folder, or something of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.spec import Job
from harness.spec.factory import split_factory
from harness.spec.job import FACTORIES
from harness.spec.job import NAMED_FILES as SETTINGS

HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")
BYTES = ("data", "tokenizer", "bytes")
"""The tokenizer that has no files."""


def count_from(folder: Path, document: dict[str, Any]) -> None:
    """Let relative paths of a configuration file count from the file's folder; hub names stay.

    A path that exists only from the working directory stays, too.
    """
    for section, key in SETTINGS:
        values = document.get(section)
        if not isinstance(values, dict) or not isinstance(given := values.get(key), str):
            continue
        if given and (section, key, given) != BYTES:
            values[key] = _from(folder, given)


def expand_home(document: dict[str, Any]) -> None:
    """Replace a leading '~' by the home folder: a shell leaves it after `--set model.name=`."""
    for section, key in SETTINGS:
        values = document.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str) and values[key].startswith("~"):
            values[key] = os.path.expanduser(values[key])


def require_existing(job: Job) -> None:
    """Raise HarnessError for a path of the job that leads nowhere; hub names are not looked up."""
    for section, key in SETTINGS:
        given = getattr(getattr(job, section), key)
        if given is None or os.path.exists(given) or (section, key, given) == BYTES:
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
    for section, key in FACTORIES:
        values = document.get(section)
        if not isinstance(values, dict) or not isinstance(given := values.get(key), str):
            continue
        try:
            place, function = split_factory(given)
        except ValueError:  # said when the document is validated
            continue
        for folder in folders:
            file = _module_file(folder, place)
            if file is not None:
                values[key] = f"{os.path.normpath(file)}:{function}"
                break


def _module_file(folder: Path, place: str) -> Path | None:
    """The source of a dotted module, or the file itself, in a folder."""
    if place.endswith(".py"):
        file = folder / os.path.expanduser(place)
        return file if file.is_file() else None
    path = folder.joinpath(*place.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _from(folder: Path, given: str) -> str:
    path = os.path.normpath(folder / os.path.expanduser(given))
    if os.path.exists(path):
        # A bare word would be looked up on the hub where the working directory changes.
        return path if os.path.isabs(path) or os.sep in path else given
    leads_out = given.startswith(("./", "../"))
    return path if leads_out and not os.path.exists(given) and os.sep in path else given


def _seen_from(given: str) -> str:
    return "" if os.path.isabs(given) else f" in {Path.cwd()}"
