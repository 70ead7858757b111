"""What versions of the training libraries do differently: findings, closed forms and docs follow from it.

A fact is added with the run or the source that shows it. Nothing here imports the libraries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

Effect = Literal["wrong", "default", "traffic", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class LibraryFact:
    """What a range of versions of one library does."""

    id: str
    library: str
    """Name of the distribution."""
    versions: str
    """PEP 440; the versions of which it is true."""
    effect: Effect
    """wrong: trains something else without an error. default: an unset setting means something else.
    traffic: other bytes or dtypes cross the network. unsupported: the library cannot."""
    what: str
    handled: str
    """What the harness does about it."""
    source: str
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


FACTS = (
    LibraryFact(
        id="zero-clips-by-default", library="deepspeed", versions=">=0.19.3", effect="default",
        what="clips gradients at 1.0 if `gradient_clipping` is not set; earlier versions do not clip",
        handled="`gradient_clipping` is always set; a difference is the finding clipping-differs",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8068; `GRADIENT_CLIPPING_DEFAULT` is 0. in "
        "0.19.2 and 1.0 in 0.19.3",
    ),
    LibraryFact(
        id="zero2-loses-micro-steps", library="deepspeed", versions=">=0.17.6,<0.18.3", effect="wrong",
        what="stage 2 computes wrong gradients when several micro-steps make a step",
        handled="the finding faulty-version",
        source="https://github.com/deepspeedai/DeepSpeed/issues/7718; seen in 0.18.0: the contract's losses "
        "differ by 2.7e-2 with two micro-steps, by 8.6e-7 with one",
        stages=(2,), accumulated=True,
    ),
    LibraryFact(
        id="zero0-bf16-scales-gradients", library="deepspeed", versions=">=0.17.6,<0.18.6", effect="wrong",
        what="stage 0 in bf16 divides gradients by a loss scale never applied, and does not clear them",
        handled="the finding faulty-version",
        source="https://github.com/deepspeedai/DeepSpeed/pull/7839, first released in 0.18.6; seen in 0.18.0 "
        "and 0.18.5, not in 0.18.6; 0.17.5 takes another optimizer (engine.py, `DDP_BFLOAT16`)",
        stages=(0,), precisions=("bf16-mixed",),
    ),
    LibraryFact(
        id="zero-broadcasts-bytes", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="initial weights are broadcast as bytes (uint8); earlier versions send them in their own dtype",
        handled="closed forms follow the version of the record",
        source="`DeepSpeedEngine._broadcast_model` of 0.19.7 and 0.19.8; seen in 0.18.6 and 0.19.3",
    ),
    LibraryFact(
        id="trainer-without-label-shift", library="transformers", versions="<5.10.1", effect="unsupported",
        what="Trainer lacks what says whether the model shifts its labels (`_loss_shifts_labels`)",
        handled="runs through Trainer are recorded as unsupported",
        source="trainer.py of 5.9.0 and 5.10.1; seen in 5.0.0 and 4.57.6",
    ),
    LibraryFact(
        id="no-ring-attention", library="torch", versions="<2.10", effect="unsupported",
        what="context parallelism lacks the package of its ring attention (`_context_parallel._attention`)",
        handled="cp and fsdp-cp are recorded as unsupported", source="seen in 2.6.0 and 2.9.1",
        modules=("harness.backends.context_parallel",),
    ),
    LibraryFact(
        id="stages-disagree", library="torch", versions="<2.10", effect="unsupported",
        what="stages of a pipeline disagree on what they send: rank 1 waits for 4 bytes and is sent 8",
        handled="pp is recorded as unsupported", source="seen in 2.9.1 with gloo; 2.13.0 and 2.14.1 do not",
        modules=("harness.backends.pipeline.backend",),
    ),
    LibraryFact(
        id="no-fsdp2-on-cpu", library="torch", versions="<2.7", effect="unsupported",
        what="FSDP2 needs streams that record events, which the CPU's lack (`torch.cpu.Stream.record_event`)",
        handled="fsdp, fsdp-grad-op, fsdp-hybrid and fsdp-tp on the CPU are recorded as unsupported",
        source="seen in 2.6.0; 2.9.1 has it", device="cpu",
        modules=("harness.backends.fsdp2", "harness.backends.tensor", "harness.backends.context_parallel"),
    ),
    LibraryFact(
        id="cuts-without-source", library="torch", versions="<2.7", effect="unsupported",
        what="tensor parallelism has no `src_data_rank`: one rank would send its weights to all",
        handled="tp and fsdp-tp are recorded as unsupported", source="seen in 2.6.0; 2.9.1 has it",
        modules=("harness.backends.tensor",),
    ),
    LibraryFact(
        id="autotp-without-head", library="deepspeed", versions="<0.19", effect="unsupported",
        what="AutoTP refuses `vocab_parallel_lm_head` and does not note how it cut a parameter",
        handled="autotp-zero1 to 3 are recorded as unsupported", source="seen in 0.16.3 and 0.18.2",
        modules=("harness.backends.autotp",),
    ),
    LibraryFact(
        id="no-ulysses", library="deepspeed", versions="<0.17", effect="unsupported",
        what="Ulysses lacks `UlyssesSPAttentionHF`",
        handled="ulysses-zero1 to 3 are recorded as unsupported", source="seen in 0.16.3; 0.18.2 has it",
        modules=("harness.backends.ulysses",),
    ),
)  # fmt: skip


def fact(name: str) -> LibraryFact:
    """One fact by its id."""
    return next(entry for entry in FACTS if entry.id == name)


def holds(name: str, versions: Mapping[str, str]) -> bool:
    """Whether a fact is true of these versions by distribution; of a library not named: as of its newest."""
    entry = fact(name)
    return entry.library not in versions or entry.includes(versions[entry.library])


def absent(packages: Collection[str]) -> list[str]:
    """Those of these distributions that are not installed."""
    return [name for name in packages if installed_version(name) is None]


def installed_version(library: str) -> str | None:
    """Of a distribution; None: it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def not_installed(packages: Collection[str]) -> str:
    """Why a backend that needs these distributions cannot run: 'deepspeed is not installed (pip ...)'."""
    are = "is" if len(packages) == 1 else "are"
    return f"{' and '.join(packages)} {are} not installed (pip install {' '.join(packages)})"


def unsupported(packages: Collection[str], module: str | None = None, device: str | None = None) -> list[str]:
    """Why the installed libraries of a backend cannot run it, one sentence per fact.

    module: of its adapter, 'harness.backends.ulysses', which need not be importable. device: of its ranks;
    None: facts of one device alone are left out.
    """
    missing = absent(packages)
    concerned = [
        entry
        for entry in FACTS
        if entry.effect == "unsupported"
        and entry.library in packages
        and (not entry.modules or module in entry.modules)
        and entry.device in (None, device)
    ]
    reasons = [_reason(entry) for entry in concerned]
    return [not_installed(missing)] * bool(missing) + [reason for reason in reasons if reason is not None]


def _reason(entry: LibraryFact) -> str | None:
    """'torch 2.9.1 cannot: ...'; None: the installed version can, or none is installed."""
    installed = installed_version(entry.library)
    if installed is None or not entry.includes(installed):
        return None
    return f"{entry.library} {installed} cannot: {entry.what} (versions {entry.versions})"


def explain() -> str:
    """The table of facts in `docs/versions.md`."""
    lines = ["| library | versions | effect | what | what the harness does | source |", "|" + " --- |" * 6]
    lines += [
        f"| {entry.library} | `{entry.versions}` | {entry.effect} | {entry.what} | {entry.handled} "
        f"| {entry.source} |"
        for entry in FACTS
    ]
    return "\n".join(lines) + "\n"
