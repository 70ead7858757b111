"""Where Python looks for modules: never in the current folder, unless a job names a module there.

`python -m`, `python -c` (multiprocessing's servers) and empty entries of PYTHONPATH would each put the
current folder in front of the standard library. Imported before anything else: needs only what Python has
loaded by then.
"""

import os
import sys

SAFE_PATH = "PYTHONSAFEPATH"
"""With it Python puts neither the current folder nor a script's in front."""
ENTRIES = "PYTHONPATH"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_given: dict[str, str | None] = {}
"""Both variables as this process got them."""


def is_program_of_ours() -> bool:
    """Whether this process runs the command `harness`, or a module of it that `python -m` names."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    if started != "-m":
        return started == "harness"
    words = sys.orig_argv[1:]
    named = next(
        (words[i + 1 :][:1] for i, w in enumerate(words) if w.startswith("-") and w.endswith("m")), []
    )
    return any(f"{word}.".startswith("harness.") for word in named)


def leave_current_folder() -> None:
    """Have this process and those that it starts import nothing from the current folder."""
    if not _given:
        _given.update({name: os.environ.get(name) for name in (SAFE_PATH, ENTRIES)})
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    named = [os.path.abspath(entry) for entry in _entries()]
    if here != _ROOT and here not in named:
        # Later entries are folders that an installed package names.
        first = _index_of(lambda entry: entry == os.path.dirname(os.__file__))
        sys.path[:first] = [entry for entry in sys.path[:first] if entry and os.path.abspath(entry) != here]
    os.environ.update(safe_environment())
    if not os.environ[ENTRIES]:
        del os.environ[ENTRIES]


def safe_environment() -> dict[str, str]:
    """The environment of this process, in which Python processes import nothing from the current folder."""
    entries = _entries()
    try:
        if os.getcwd() == _ROOT and sys.path[:1] in ([""], [_ROOT]):
            entries.append(_ROOT)  # a checkout that is not installed
    except OSError:  # it was removed
        pass
    return os.environ | {SAFE_PATH: "1", ENTRIES: os.pathsep.join(dict.fromkeys(entries))}


def given_environment() -> dict[str, str]:
    """The environment with both variables as this process got them, for a program of the user's own."""
    environment = dict(os.environ)
    for name, value in _given.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def module_command(module: str) -> list[str]:
    """The words that start a module of the harness, or of a library, in a new interpreter."""
    return [sys.executable, "-P", "-m", module]


def ask_module(  # type: ignore[no-untyped-def]  # typing is not loaded yet
    module: str, *words: str, request: str | None = None, seconds: float | None = None, **environment: str
):
    """What a module does in a process of its own with `request` as its input: subprocess's CompletedProcess.

    environment: variables besides `safe_environment`. Raises subprocess.TimeoutExpired after `seconds`.
    """
    import subprocess  # not before the first question

    return subprocess.run(
        [*module_command(module), *words], input=request, capture_output=True, text=True, timeout=seconds,
        env=safe_environment() | environment, check=False,
    )  # fmt: skip


def put_before_packages(folder: str) -> None:
    """Have a folder searched after the standard library and before installed packages."""
    put_last(folder)
    sys.path.remove(folder)
    sys.path.insert(_index_of(lambda entry: entry.endswith(("site-packages", "dist-packages"))), folder)


def put_last(folder: str) -> None:
    """Have a folder searched after all others."""
    sys.path[:] = [*(entry for entry in sys.path if entry != folder), folder]


def _entries() -> list[str]:
    return [entry for entry in os.environ.get(ENTRIES, "").split(os.pathsep) if entry]


def _index_of(matches) -> int:  # type: ignore[no-untyped-def]  # typing is not loaded yet
    return next((index for index, entry in enumerate(sys.path) if matches(entry)), len(sys.path))
