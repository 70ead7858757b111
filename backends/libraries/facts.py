"""What versions of the training libraries do differently: findings, closed forms and docs follow from it.

A fact is added to `facts.toml` with the run or the source that shows it. Nothing here imports the
libraries.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from harness.backends.refusals import Unsupported


def absent(packages: Collection[str]) -> list[str]:
    """Distributions, among these, that are not installed."""
    return [name for name in packages if installed_version(name) is None]


@lru_cache
def installed_version(library: str) -> str | None:
    """Version of a distribution; None: it is not installed. Asked once: its whole description is parsed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def require_installed(package: str, setting: str, install: str = "") -> None:
    """Raise Unsupported for a setting that needs this distribution where it is not installed."""
    if installed_version(package) is None:
        how = f"pip install {install or package}"
        raise Unsupported(f"{setting} needs {package}, which is not installed: {how}")


def not_installed(packages: Collection[str]) -> str:
    """Why a backend that needs these distributions cannot run: 'deepspeed is not installed (pip ...)'."""
    are = "is" if len(packages) == 1 else "are"
    return f"{' and '.join(packages)} {are} not installed (pip install {' '.join(packages)})"


if TYPE_CHECKING:
    from harness.backends.base import BackendOptions, OptimizerKind

CPU_ADAM = "cpu_adam"


def runs_cpu_adam(options: BackendOptions) -> bool:
    """Whether DeepSpeed's Adam replaces the job's."""
    return getattr(options, "adam", None) == "deepspeed"


def offloads(options: BackendOptions) -> bool:
    """Whether weights, gradients and optimizer states live in host memory."""
    return getattr(options, "offload", "none") == "cpu"


def extensions(options: BackendOptions) -> tuple[str, ...]:
    """Names, in the order in which they are to be compiled."""
    return (CPU_ADAM,) if runs_cpu_adam(options) and not unmet_cpu_adam(options) else ()


def unmet_cpu_adam(options: BackendOptions) -> list[str]:
    """Why the options leave DeepSpeed's Adam nothing to do; empty: they do not."""
    if not runs_cpu_adam(options) or getattr(options, "offload", "none") != "none":
        return []
    return ["adam=deepspeed updates states in host memory: it needs offload=optimizer or cpu"]


def why_not_replaced(options: BackendOptions, kind: OptimizerKind) -> str | None:
    """Why DeepSpeed's Adam cannot take the place of the job's optimizer; None: it can, or is not asked for.

    Of a user's own optimizer only the object says whether it is an AdamW.
    """
    if not runs_cpu_adam(options) or kind in ("adamw", "own"):
        return None
    return f"adam=deepspeed replaces AdamW, not optimizer.kind={kind}; leave adam out, or use adamw"


Effect = Literal["wrong", "default", "traffic", "states", "time", "unsupported", "not run"]


@dataclass(frozen=True, kw_only=True)
class LibraryFact:
    """What a range of versions of one library does."""

    id: str
    library: str
    """Name of the distribution."""
    versions: str
    """PEP 440; the versions of which it is true."""
    effect: Effect
    """wrong: trains something else without an error, here too. default: does another thing than one expects.
    traffic: other bytes or dtypes cross the network. states: ranks hold other bytes. time: it waits.
    unsupported: the library cannot. not run: the library has what `id` names, the harness no option."""
    what: str
    source: str
    """Which version's source or run shows it; reports quote it."""
    handled: str = "the closed form has it, and reports name it where a run shows it"
    """What the harness does about it."""
    cost: str = ""
    """What the figure that a report gives it multiplies: "the textbook's bytes"."""
    advice: str = ""
    """What to set, or why nothing need be done, where a report names it."""
    questions: tuple[str, ...] = ()
    """Which of `compare.question` it bears on; empty: those of its effect."""
    stages: tuple[int, ...] = ()
    """ZeRO stages that it concerns; empty: all."""
    precisions: tuple[str, ...] = ()
    """`training.precision`; empty: all."""
    modules: tuple[str, ...] = ()
    """Modules of adapters that it concerns; empty: of all backends that use the library."""
    device: str | None = None
    """'cpu' or 'cuda', where it concerns ranks there alone."""
    accumulated: bool = False
    """Whether it concerns only several micro-steps per step."""

    @property
    def first(self) -> str:
        """The first version of which it is true. Raises StopIteration where all earlier ones are included."""
        return next(part.version for part in SpecifierSet(self.versions) if part.operator == ">=")

    def includes(self, given: str) -> bool:
        """Whether it is true of a version; never of one that PEP 440 does not know."""
        try:
            return SpecifierSet(self.versions).contains(given, prereleases=True)
        except InvalidVersion:
            return False

    def concerns(self, stage: int, precision: str, accumulation_steps: int) -> bool:
        """Whether a ZeRO run of this stage and job is affected."""
        return (
            (not self.stages or stage in self.stages)
            and (not self.precisions or precision in self.precisions)
            and (not self.accumulated or accumulation_steps > 1)
        )


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


FACTS = tuple(
    LibraryFact(**_with_tuples(row))
    for row in tomllib.loads(files(__package__).joinpath("facts.toml").read_text(encoding="utf-8"))["fact"]
)


def fact(name: str) -> LibraryFact:
    """One fact by its id."""
    return next(entry for entry in FACTS if entry.id == name)


def traps_of(versions: Mapping[str, str]) -> list[LibraryFact]:
    """What these versions by distribution train, or take for an unset setting, against expectation."""
    return [
        entry
        for entry in FACTS
        if entry.effect in ("wrong", "default") and entry.includes(versions.get(entry.library, ""))
    ]


def not_run() -> list[LibraryFact]:
    """What a library has and no run can have."""
    return [entry for entry in FACTS if entry.effect == "not run"]


def why_not_run(name: str) -> str | None:
    """'MiCS is not run: ...' of a feature by the name that people type; None: it is none of those."""
    found = [entry for entry in not_run() if entry.id.lower() == name.lower()]
    return f"{found[0].id} is not run: {found[0].what} ({found[0].source})" if found else None


def unsupported(packages: Collection[str], module: str | None = None, device: str | None = None) -> list[str]:
    """Why the installed libraries of a backend cannot run it, one sentence per fact.

    module: of its adapter, 'harness.backends.sequence.ulysses', which need not be importable. device: of its
    ranks; None: facts of one device alone are left out.
    """
    missing = absent(packages)
    return [not_installed(missing)] * bool(missing) + [
        f"{entry.library} {installed} cannot: {entry.what} (versions {entry.versions})"
        for entry in FACTS
        if entry.effect == "unsupported"
        and entry.library in packages
        and (not entry.modules or module in entry.modules)
        and entry.device in (None, device)
        and (installed := installed_version(entry.library)) is not None
        and entry.includes(installed)
    ]
