"""C++ extensions that DeepSpeed compiles on first use, and locks that killed builds leave. torch 2.13."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from harness.backends.libraries.facts import CPU_ADAM

QUIET_SECONDS = 120
"""A folder in which a file changed since may be a build on another machine that shares it."""
TOOLS = ("ninja", "c++")
BUILDERS = {CPU_ADAM: "CPUAdamBuilder"}
"""Classes of `deepspeed.ops.op_builder` by the extension's name."""


def build(name: str) -> list[str]:
    """Compile extension `name` unless it is there; why it cannot be, empty: it can be loaded.

    A build takes the lock, and its processes, with it where it ends by an exception.
    """
    if reasons := unmet_build(name):
        return reasons
    from deepspeed.ops import op_builder

    getattr(op_builder, BUILDERS[name])().load(verbose=False)
    return []


def unmet_build(name: str) -> list[str]:
    """Why extension `name` could not be compiled and loaded here; empty: it could, or it is there already."""
    if why := killed_build(build_folder(name) / "lock"):
        return [why]
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return [f"DeepSpeed compiles its extension {name} with {' and '.join(missing)}, not found here"]
    return []


def killed_build(lock: Path) -> str | None:
    """What a build waits for that finds this lock, if no other build holds it."""
    if (age := abandoned_seconds(lock)) is None:
        return None
    minutes = age / 60
    old = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
    return (
        f"{lock} is {old} old and no process holds it: a build of the extension {lock.parent.name} "
        "was killed, and every later one waits for this file without end; remove it"
    )


def build_folder(name: str) -> Path:
    """Where `torch.utils.cpp_extension.load` builds an extension (`_get_build_directory`)."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def abandoned_seconds(lock: Path) -> float | None:
    """Age of a lock that no build holds; None: there is none, or a build may hold it.

    A builder keeps the file open until it removes it (`FileBaton`, torch/utils/file_baton.py).
    """
    try:
        # The folder's own time changes as its builder, perhaps on another machine, writes new files.
        changed = max(path.stat().st_mtime for path in (lock.parent, *lock.parent.iterdir()))
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return None
    if time.time() - changed < QUIET_SECONDS or lock.resolve() in set(_open_files("lock")):
        return None
    return age


def _open_files(name: str) -> Iterator[Path]:
    """Files of this name that processes of this machine hold open, as far as this one may look."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            path = Path(os.readlink(descriptor))
        except OSError:
            continue
        if path.name == name:
            yield path.resolve()
