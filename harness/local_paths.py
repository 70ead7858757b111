"""Settings that name a local file or folder, or something of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.spec import Job

SETTINGS = (("model", "name"), ("data", "path"), ("data", "tokenizer"))
HUB_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?")
TOKENIZER_WITHOUT_FILES = "bytes"


def count_from(folder: Path, document: dict[str, Any]) -> None:
    """Let relative paths of a configuration file count from the file's folder; hub names stay.

    A path that exists only from the working directory stays, too.
    """
    for section, key in SETTINGS:
        values = document.get(section)
        if not isinstance(values, dict) or not isinstance(given := values.get(key), str):
            continue
        if given and (section, key, given) != (*SETTINGS[2], TOKENIZER_WITHOUT_FILES):
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
        if given is None or Path(given).exists():
            continue
        is_file = (section, key) == ("data", "path") and job.data.source != "datasets"
        if is_file:
            raise HarnessError(
                f"data.path '{given}' does not exist{_seen_from(given)}; give an existing file"
            )
        if not HUB_NAME.fullmatch(given):
            raise HarnessError(
                f"{section}.{key} '{given}' does not exist{_seen_from(given)}; give a local folder, or a "
                "name of the hub such as gpt2 or bigscience/bloom-560m"
            )


def _from(folder: Path, given: str) -> str:
    path = os.path.normpath(folder / os.path.expanduser(given))
    if os.path.exists(path):
        # A bare word would be looked up on the hub where the working directory changes.
        return path if os.path.isabs(path) or os.sep in path else given
    leads_out = given.startswith(("./", "../"))
    return path if leads_out and not os.path.exists(given) and os.sep in path else given


def _seen_from(given: str) -> str:
    return "" if os.path.isabs(given) else f" in {Path.cwd()}"
