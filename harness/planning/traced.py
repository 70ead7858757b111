"""Profiles that were not shipped: traced in another process, since tracing needs torch, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.atomic_write import write_atomically
from harness.errors import HarnessError
from harness.forms.activations import ActivationProfile, from_json
from harness.import_path import module_command, safe_environment
from harness.launch.libraries import EVERY_RANK, require_libraries

TRACER = "harness.worker.activation_trace"
TRACING_SECONDS = 300
ERROR_LINE = re.compile(r"[A-Za-z_.]+(Error|Exception)\b: ")
Trace = Callable[[str], str]
"""Takes a request and returns a profile, as `worker.activation_trace.profile_text` does; by default in a new
process, which has to import torch first."""


def request_text(config: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    """What is asked of a tracer."""
    return json.dumps({"config": dict(config), "variant": variant}, sort_keys=True, default=str)


def traced(request: str, trace: Trace | None = None) -> ActivationProfile:
    """The profile of a request: kept from before, or traced now. Raises HarnessError if it cannot be."""
    return _traced(request, trace or _trace)


def trace_ahead(requests: Iterable[str]) -> None:
    """Trace what is not kept yet in one process, which imports torch once; failures come with `traced`."""
    missing = [request for request in dict.fromkeys(requests) if not _file(request).exists()]
    if not missing:
        return
    with suppress(HarnessError, ValueError):
        found = json.loads(_trace("[" + ",".join(missing) + "]"))
        for request, text in zip(missing, found, strict=True):
            if text is not None:
                _keep(request, text)


@lru_cache(maxsize=256)
def _traced(request: str, trace: Trace) -> ActivationProfile:
    file = _file(request)
    if file.exists():
        return from_json(json.loads(file.read_text()))
    text = trace(request)
    _keep(request, text)
    return from_json(json.loads(text))


def _keep(request: str, text: str) -> None:
    file = _file(request)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)


def _file(request: str) -> Path:
    """In the user's cache."""
    key = hashlib.sha256((request + _versions()).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "sharding-harness" / "activations" / f"{key}.json"


def _trace(request: str) -> str:
    command = module_command(TRACER)
    environment = safe_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        ran = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=TRACING_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"tracing the model's activations took over {TRACING_SECONDS} s") from error
    if ran.returncode:
        raise HarnessError(f"the model's activations cannot be traced: {_error_line(ran.stderr)}")
    return ran.stdout


def _error_line(text: str) -> str:
    """The line that names the error, whose message may have further lines; else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if ERROR_LINE.match(line)]
    return (named or lines)[-1]


@lru_cache(maxsize=1)
def _versions() -> str:
    require_libraries("activations of a model whose profile is not shipped")
    return " ".join([*map(version, EVERY_RANK), _tracer_digest()])


def _tracer_digest() -> str:
    worker = Path(__file__).parents[1] / "worker"
    files = ("activation_trace.py", "kernel_scratch.py", "storage_events.py", "trace_profile.py")
    return hashlib.sha256(b"".join((worker / name).read_bytes() for name in files)).hexdigest()
