"""Loaded by every Python process of an observed command, since this folder is first on PYTHONPATH.

Loads the `sitecustomize` that the environment has of its own, then has training libraries looked at once
they are imported. Imports nothing but the standard library: most of these processes never train.
"""

from __future__ import annotations

import json
import os
import sys
import time
from _thread import RLock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

RUN_DIRECTORY = "HARNESS_OBSERVE"
"""Variable with the folder of the run; without it nothing is observed."""
PACKAGES = "HARNESS_OBSERVE_PACKAGES"
"""Variable with the folder from which `harness` is imported where the environment does not have it."""
PROCESSES = "HARNESS_OBSERVE_PROCESSES"
"""Variable with the folder in which each process that has imported torch has a file, named by its number."""

FRAMEWORKS = (
    "accelerate.accelerator",
    "accelerate.state",
    "deepspeed.runtime.engine",
    "transformers.trainer",
    "lightning.pytorch.loops.optimization.automatic",
    "pytorch_lightning.loops.optimization.automatic",
)
"""Modules that may be called back about. Some import torch themselves, and are then half imported already."""

OnImport = Callable[[str, Callable[[ModuleType], None]], None]


class AfterImport:
    """A finder that calls back once a module has been imported, and finds nothing itself."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[ModuleType], None]]] = {
            name: [] for name in ("torch", *FRAMEWORKS)
        }
        self._looking: set[str] = set()
        self._executing: set[str] = set()

    def on_import(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call back with the module of this name, at once where it is imported already."""
        if name in sys.modules and name not in self._executing:
            callback(sys.modules[name])
        else:
            self._callbacks.setdefault(name, []).append(callback)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, its loader followed by the callbacks."""
        if name not in self._callbacks or name in self._looking:
            return None
        self._looking.add(name)
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((found for found in specs if found is not None), None)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            self._follow(name, spec.loader)
        return spec

    def _follow(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._executing.add(name)
            try:
                execute(module)
            finally:
                self._executing.discard(name)
            for callback in self._callbacks.pop(name, []):
                try:
                    callback(module)
                except Exception as error:  # of a version that is not known: the script runs all the same
                    sys.stderr.write(f"harness observe: {name} is not observed: {error!r}\n")

        loader.exec_module = exec_module


def load_next() -> None:
    """Load the `sitecustomize` that this one hides."""
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def observe() -> None:
    """Have torch looked at once it is imported. A script that cannot be observed runs all the same."""
    finder = AfterImport()

    def start(_: ModuleType) -> None:
        try:
            if (packages := os.environ.get(PACKAGES)) and packages not in sys.path:
                sys.path.append(packages)
            _start_observing(finder.on_import)
        except (Exception, SystemExit) as error:
            sys.stderr.write(f"harness observe: this process is not observed: {error!r}\n")

    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    finder.on_import("torch", start)


def _start_observing(on_import: OnImport) -> None:
    found = Apart()
    apart = found if found.has_two else nullcontext
    with apart():
        from harness.rank.observing.session import start_observing

        start_observing(Path(os.environ[RUN_DIRECTORY]), on_import, apart)


class Apart:
    """Keeps the observer's modules from the script's where both have one of a name, such as a `psutil.py`.

    Within a call the script's own folders, first on the path, are not there, and neither are their modules;
    after it the observer's are not. Libraries look for modules, and for themselves, whenever they are called.
    """

    def __init__(self) -> None:
        library = os.path.dirname(os.__file__)
        ahead = sys.path[: sys.path.index(library)] if library in sys.path else []
        asked = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        # Python makes its entries absolute; a script's own folder may be one of them.
        asked = [*asked, *map(os.path.abspath, filter(None, asked))]
        kept = {entry for entry in asked if os.path.abspath(entry) not in (_script_folder(), os.getcwd())}
        # A script may lie beside `harness` itself.
        self._folders = set(ahead) - kept - {os.environ.get(PACKAGES, "")}
        self._names = {
            name for folder in self._folders for name in _modules_in(folder) if self._are_two(name)
        }
        self.has_two = bool(self._names)
        self._held: dict[str, ModuleType] = {}
        self._known: set[str] = set()
        self._size = 0
        self._lock = RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            path, theirs = list(sys.path), self._take()
            sys.path[:] = self._without_folders()
            sys.modules.update(self._held)
            self._size = len(sys.modules)
            try:
                yield
            finally:
                self._held = self._take()
                sys.modules.update(theirs)
                sys.path[:] = path
                self._size = len(sys.modules)

    def _take(self) -> dict[str, ModuleType]:
        """Take the modules of these names, and those in them, away from Python."""
        if len(sys.modules) != self._size:
            self._known |= {name for name in list(sys.modules) if name.partition(".")[0] in self._names}
        return {name: sys.modules.pop(name) for name in self._known if name in sys.modules}

    def _without_folders(self) -> list[str]:
        return [entry for entry in sys.path if entry not in self._folders]

    def _are_two(self, name: str) -> bool:
        """Whether the script's folders lead to another module of this name than the rest of the path."""
        own = PathFinder.find_spec(name, sys.path)
        if own is None or own.origin is None:
            return False  # a folder without __init__.py gives way to any package
        others = PathFinder.find_spec(name, self._without_folders())
        return name == "harness" if others is None else others.origin not in (None, own.origin)


def _script_folder() -> str:
    return os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "-"))


def _modules_in(folder: str) -> set[str]:
    """Names of what may be modules in a folder."""
    try:
        found = os.listdir(folder or ".")
    except OSError:  # an archive, or none is there
        return set()
    endings = ("", *all_suffixes())  # a folder has none; a folder of data may hold thousands of other files
    names = (entry.partition(".") for entry in found)
    return {name for name, dot, ending in names if name.isidentifier() and dot + ending in endings}


def note_ends(folder: Path) -> None:
    """Have the ends noted of processes that this one started and waits for: only a parent learns exit codes.

    torchrun, accelerate launch, deepspeed and multiprocessing all wait with `os.waitpid`.
    """
    wait = os.waitpid

    def waitpid(process: int, options: int, /) -> tuple[int, int]:
        found, status = wait(process, options)
        if found:
            _note_end(folder / str(found), status)
        return found, status

    os.waitpid = waitpid
    if "subprocess" in sys.modules:  # which keeps the function that it found
        popen: Any = sys.modules["subprocess"].Popen
        handle = popen._handle_exitstatus

        def handle_status(self: Any, status: int, *rest: Any, **named: Any) -> None:
            _note_end(folder / str(self.pid), status)
            handle(self, status, *rest, **named)

        popen._handle_exitstatus = handle_status


def _note_end(path: Path, status: int) -> None:
    """As `run_directory.observed_record.note_end`; the script goes on whatever happens."""
    try:
        if (os.WIFEXITED(status) or os.WIFSIGNALED(status)) and path.exists():
            end = {"exit_code": os.waitstatus_to_exitcode(status), "at": time.time()}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(end) + "\n")
    except OSError as error:
        sys.stderr.write(f"harness observe: the end of process {path.name} is not noted: {error!r}\n")


if __name__ == "sitecustomize":
    if RUN_DIRECTORY in os.environ:
        observe()
    if PROCESSES in os.environ:
        note_ends(Path(os.environ[PROCESSES]))
    load_next()
