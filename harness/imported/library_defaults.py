"""Defaults of DeepSpeed and Accelerate, asked of the installed library in a process of its own.

Commands that start no ranks import neither, so the answer is kept per version in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.files import write_atomically
from harness.import_path import ask_module
from harness.imported.reading import LIBRARY, Fixed, OfPreset, Rule, ToOption
from harness.record import FileKind

QUESTION = "harness.imported.read_defaults"
BETWEEN = "--- defaults ---"
"""Printed by it before the answer."""
SECONDS = 300.0
"""Importing a library from a slow disk takes long."""


@cache
def library_defaults(kind: FileKind) -> dict[str, Any]:
    """What `read_defaults` prints. Raises HarnessError where the library is missing or fails."""
    kept = _file(kind)
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    text = _asked(kind)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, text)
    answer: dict[str, Any] = json.loads(text)
    return answer


def deepspeed_values(stage: int) -> dict[str, Any]:
    """Defaults by the dotted keys of DeepSpeed's JSON, at a stage of ZeRO."""
    found = library_defaults("deepspeed")
    sections = {"fp16": found["fp16"], "bf16": found["bf16"], "zero_optimization": found["zero"][str(stage)]}
    dotted = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return found["top"] | dotted


def with_defaults(rules: dict[str, Rule], values: dict[str, Any]) -> dict[str, Rule]:
    """The rules, with the library's defaults where they ask for them."""
    return {key: _filled(rule, values.get(key)) for key, rule in rules.items()}


def _filled(rule: Rule, default: Any) -> Rule:
    if isinstance(rule, ToOption | OfPreset) and rule.default is LIBRARY:
        return replace(rule, default=default)
    if isinstance(rule, Fixed) and rule.used is LIBRARY:
        return replace(rule, used=default)
    return rule


def _asked(kind: FileKind) -> str:
    try:
        ran = ask_module(QUESTION, kind, seconds=SECONDS, CUDA_VISIBLE_DEVICES="")
    except OSError as error:
        raise HarnessError(f"no process can be started to read the defaults of {kind}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise HarnessError(
            f"importing {kind} to read its defaults took over {SECONDS:.0f} s; try again"
        ) from error
    answer = ran.stdout.rpartition(BETWEEN)[2].strip()
    if ran.returncode or not answer.startswith("{"):
        last = next(iter(ran.stderr.strip().splitlines()[::-1]), "no message")
        raise HarnessError(
            f"a configuration of {kind} is read with the defaults of the installed {kind}, which cannot be "
            f"imported: {last}"
        )
    return answer


def _file(kind: FileKind) -> Path:
    """In the user's cache, by the versions that the answer depends on."""
    code = Path(__file__).with_name("read_defaults.py").read_bytes()
    key = hashlib.sha256(code + " ".join(_versions(kind)).encode()).hexdigest()[:24]
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache_folder / "sharding-harness" / "library-defaults" / f"{kind}-{key}.json"


def _versions(kind: FileKind) -> list[str]:
    """Raises HarnessError where the library is not installed."""
    try:
        return [version(name) for name in (kind, "torch")] + [str(find_spec(kind)), sys.version]
    except PackageNotFoundError as error:
        raise HarnessError(
            f"a configuration of {kind} is read with the defaults of the installed {kind}: install "
            f"'{error.name}', on which its rows run too"
        ) from error
