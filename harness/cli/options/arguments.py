"""Reads the arguments that commands share. It prints nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.errors import HarnessError
from harness.gpus.found import find_gpus
from harness.safe_text import inside

DEFAULT_CPU_RANKS = 2


def split_backends(text: str) -> list[str]:
    """Split a comma-separated list; 'key=value' pieces belong to the backend before them."""
    labels: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if "=" in piece and ":" not in piece and labels:
            labels[-1] += f",{piece}"
        else:
            labels.append(piece)
    if not labels:
        raise HarnessError("--backends is empty; give names such as ddp,zero3,fsdp, or all")
    return labels


def numbers(text: str, option: str, unit: str) -> list[int]:
    """'2,4' as numbers, each once. Raises HarnessError."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise HarnessError(f"{option} was given '{text}'; give numbers of {unit} such as 2 or 2,4")
    return list(dict.fromkeys(counts))


def default_ranks(device: str) -> int:
    """Default number of ranks on this machine: one per GPU, or two on the CPU."""
    return max(1, find_gpus().count) if device == "cuda" else DEFAULT_CPU_RANKS


def require_gpus(device: str, world_size: int) -> None:
    """Raise HarnessError if there are more ranks on CUDA than GPUs."""
    if device == "cuda" and world_size > (count := find_gpus().count):
        raise HarnessError(
            f"{world_size} ranks were asked for, but torch can use {count} GPUs here; lower --nproc or set "
            "runtime.device=cpu"
        )


def command_line() -> list[str]:
    """The command line to type to repeat this one."""
    return inside(Path.cwd(), ["harness", *sys.argv[1:]])
