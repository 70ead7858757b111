"""Calls the functions that a job brings: its model, its data, its loss.

They run with the rights of whoever starts the job; nothing is fetched to run them.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import HarnessError, JobError
from harness.files import locked
from harness.import_path import put_before_packages, put_last
from harness.job.job import CODE_SWITCH, Job, split_factory
from harness.record.provenance import package_root
from harness.run_directory.events import doing
from harness.safe_text import described


def configuration(model: Any) -> Any:
    """The Hugging Face configuration of a model; None: it has none."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "_attn_implementation") else None


def brought_packages(job: Job) -> set[str]:
    """Top-level names of the modules that hold the job's model and loss."""
    places = [split_factory(f)[0] for f in (job.model.factory, job.loss.factory) if f is not None]
    names = [_module_name(place, _root(place)) if place.endswith(".py") else place for place in places]
    return {name.partition(".")[0] for name in names}


def _module_name(place: str, root: str) -> str:
    parts = Path(place).resolve().relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def call_factory(setting: str, spelling: str, arguments: Mapping[str, Any]) -> Any:
    """What the function that `setting` names returns. Raises JobError in one line.

    `spelling`: 'module:function', or 'path/file.py:function'.
    """
    place, _ = split_factory(spelling)
    root = _root(place)
    put_before_packages(root)
    try:
        return _called(setting, spelling, arguments, root)
    finally:
        put_last(root)  # an optional library that another one looks for is none of the job's


def _called(setting: str, spelling: str, arguments: Mapping[str, Any], root: str) -> Any:
    place, name = split_factory(spelling)
    shown = f"{setting} '{spelling}'"
    if place.endswith(".py"):
        file, module_name = Path(place).resolve(), _module_name(place, root)
        if not file.is_file():
            raise JobError(f"{shown}: there is no file {file}; give module:function of a file that is there")
        module = _import(module_name, shown, str(file))
        found = getattr(module, "__file__", None)
        if found is None or Path(found).resolve() != file:
            owner = found or "a module of Python"
            raise JobError(f"{shown}: the name '{module_name}' belongs to {owner}; rename your file")
    else:
        module = _import(place, shown, place)
    function = getattr(module, name, None)
    if function is None:
        raise JobError(f"{shown}: the module has no '{name}'; give the name of a function in it")
    if not callable(function):
        raise JobError(f"{shown} is a {type(function).__name__}; give a function that returns it")
    section = setting.partition(".")[0]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise JobError(
            f"{shown} does not take {section}.arguments {dict(arguments)}: {error}; its signature is "
            f"{name}{inspect.signature(function)}"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        with doing(shown):
            return function(**arguments)
    except HarnessError:
        raise
    except SystemExit as error:
        raise JobError(f"{shown} called sys.exit({error.code!r}); return what it makes instead") from error
    except Exception as error:
        raise JobError(f"{shown} raised {described_error(error)}") from error


def _root(place: str) -> str:
    """The folder in which a factory's module and those beside it are looked for."""
    if not place.endswith(".py"):
        return str(Path.cwd())
    file = Path(place).resolve()
    package = package_root(file)
    return str(package.parent if package else file.parent)


def _import(name: str, shown: str, what: str) -> ModuleType:
    try:
        with doing(f"{shown}: importing {what}"):
            return importlib.import_module(name)
    except SystemExit as error:
        raise JobError(
            f"{shown}: importing {what} called sys.exit({error.code!r}); leave that to `if __name__ == "
            "'__main__'`"
        ) from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise JobError(
                f"{shown}: importing {what} needs '{error.name}', which is not installed"
            ) from error
        raise JobError(
            f"{shown}: module '{name}' is neither in the folder of the job's file, nor in the working "
            "directory, nor installed"
        ) from error
    except Exception as error:
        raise JobError(f"{shown}: importing {what} raised {described_error(error)}") from error


def described_error(error: Exception) -> str:
    """Kind, message and place of an error, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(described(error).split())
    return f"{type(error).__name__}: {message} ({frame.filename}, line {frame.lineno})"


LOCK_NAME = "harness.lock"


def class_in_folder(job: Job, config: Any, auto_class: str) -> bool:
    """Whether the job lets the folder's own class stand for transformers' `auto_class`."""
    return job.model.trust_remote_code and auto_class in (getattr(config, "auto_map", None) or {})


@contextmanager
def one_at_a_time(job: Job) -> Iterator[None]:
    """Let one rank of a machine load the folder's code: transformers copies it to a cache that all share."""
    if not job.model.trust_remote_code:
        yield
        return
    from transformers.dynamic_module_utils import HF_MODULES_CACHE  # type: ignore[attr-defined]

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK_NAME):
        yield


def why_refused(name: str, error: Exception, *, setting: str = "model.name") -> str | None:
    """One line if loading failed only because the job does not let the folder's code run."""
    if "trust_remote_code" not in str(error):
        return None
    if setting != "model.name":
        return (
            f"{setting} '{name}' contains custom code, which runs for the model's own tokenizer only; save "
            "it as tokenizer.json, or leave data.tokenizer out"
        )
    return (
        f"{setting} '{name}' contains custom code (auto_map in its config.json), which must run to load it; "
        f"read that code, then set {CODE_SWITCH}: true, or give a model that transformers knows"
    )
