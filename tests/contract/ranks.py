"""Runs all cases of one backend on real ranks that share one process group."""

import hashlib
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from harness.backends import registry
from harness.backends.base import World
from harness.backends.zero.extension_builds import build_folder
from tests import kept
from tests.forkserver import on_ranks as ranks_of

JOIN_SECONDS = 300


def on_ranks(what: str, label: str, world_size: int, folder: Path, *arguments: object) -> list:
    """Do a deed of `tests.contract.deeds`, or 'module:function', on every rank; what each returned, in order.

    The function is called with the backend, the rank's world and the arguments. Only the first session of
    tests after a change of what runs there does it; `folder` is theirs alone.
    """
    name = hashlib.sha256(f"{what} {label} {world_size} {arguments}".encode()).hexdigest()[:16]
    return kept.runs().value(f"deed-{name}", lambda: _done(what, label, world_size, folder, arguments))


def _done(what: str, label: str, world_size: int, folder: Path, arguments: tuple[object, ...]) -> list:
    for extension in registry.parse(label)[1].extensions():
        _compile(extension)
    work = partial(_do, what, label, arguments)
    variables = {"TORCH_FR_BUFFER_SIZE": "20000", "CONTRACT_FOLDER": str(folder)}
    return ranks_of(work, world_size, folder, JOIN_SECONDS, **variables)


def _do(what: str, label: str, arguments: tuple[object, ...], world: World) -> object:
    backend, world = registry.create(label), registry.placed(label, world)
    assert backend.unmet_requirements(world) == []
    deed = registry.load(what if ":" in what else f"tests.contract.deeds:{what}")
    return deed(backend, world, *arguments)


def _compile(extension: str) -> None:
    """Compile a C++ extension into the tests' cache unless it is there, before ranks whose time is limited.

    One session at a time does it, so that a folder with DeepSpeed's lock was left by a build that was killed.
    """
    with kept.runs().place(f"extension-{extension}"):
        if (folder := build_folder(extension)).joinpath("lock").exists():
            shutil.rmtree(folder)
        code = f"from harness.backends.zero.extension_builds import build; assert not build({extension!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
