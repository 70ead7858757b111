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

from harness.backends.explain import Unsupported

Effect = Literal["wrong", "default", "traffic", "states", "time", "unsupported", "not run"]
NOT_RUN = "no option asks for it; a DeepSpeed file that does is refused"
IN_CLOSED_FORM = "the closed form has it, and reports name it where a run shows it"


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
    handled: str = IN_CLOSED_FORM
    """What the harness does about it."""
    cost: str = ""
    """What the figure that a report gives it multiplies: "the textbook's bytes"."""
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
        source="DeepSpeed 0.19.3 (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT, "
        "https://github.com/deepspeedai/DeepSpeed/pull/8068); 0.14.5 to 0.19.2 do not clip",
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
    LibraryFact(
        id="zero0-begins-at-step-two", library="deepspeed", versions=">=0.19", effect="default",
        what="stage 0 in low precision takes an optimizer step on zero gradients while it sets up, so that "
        "Adam begins at its second step",
        handled="the step count is set back",
        source="DeepSpeed 0.19, runtime/fp16/unfused_optimizer.py, initialize_optimizer_states",
        stages=(0,), precisions=("bf16-mixed", "fp16-mixed"),
    ),
    LibraryFact(
        id="accumulated-in-low-precision", library="deepspeed", versions=">=0.19", effect="default",
        what="adds up micro-steps in bf16 at bf16-mixed; told to use fp32, stage 0 refuses and stage 1 "
        "reports a gradient norm that is off by half",
        handled="fp32 at stages 2 and 3; the dtype of accumulation is part of the effective configuration",
        source="DeepSpeed 0.19.8, runtime/engine.py, get_data_types",
        precisions=("bf16-mixed",), accumulated=True,
    ),
    LibraryFact(
        id="gradients-all-reduced", library="deepspeed", versions=">=0.12.4", effect="default",
        what="gradients are all-reduced, not reduce-scattered", cost="the textbook's bytes",
        handled="the closed form counts what is sent; use_multi_rank_bucket_allreduce=false reaches the "
        "textbook",
        source="DeepSpeed 0.12.4 (use_multi_rank_bucket_allreduce, true by default, "
        "https://github.com/deepspeedai/DeepSpeed/pull/4695); 0.12.3 reduced each part to its owner",
        stages=(1, 2),
    ),
    LibraryFact(
        id="fsdp-plugin-ignored", library="accelerate", versions=">=1.15", effect="default",
        what="without an accelerator it ignores an FSDP plugin and runs DDP or unsynchronised processes",
        handled="Accelerate's FSDP is unsupported on the CPU", source="seen in 1.15.0", device="cpu",
    ),
    LibraryFact(
        id="steps-in-backward", library="accelerate", versions=">=1.15", effect="default",
        what="steps a DeepSpeed optimizer inside backward",
        handled="the step is held back until the loop has set the learning rate",
        source="Accelerate 1.15.0, utils/deepspeed.py, DeepSpeedEngineWrapper.backward",
    ),
    LibraryFact(
        id="one-rank-is-not-sharded", library="torch", versions=">=2.11", effect="default",
        what="FSDP1 takes NO_SHARD on one rank whatever was asked",
        handled="the finding strategy-differs", source="seen in 2.11 and later",
        modules=("harness.backends.fsdp1",),
    ),
    LibraryFact(
        id="masters-in-low-precision", library="torch", versions=">=2.13", effect="default",
        what="FSDP's optimizer updates weights in the dtype in which the model was loaded",
        handled="models are loaded in fp32; a difference is the finding master-dtype-differs",
        source="torch 2.13, distributed/fsdp: masters have the dtype in which the model was loaded",
    ),
    LibraryFact(
        id="reduced-in-low-precision", library="deepspeed", versions=">=0.19.8", effect="default",
        what="gradients are averaged in the compute dtype", handled="like-for-like reduces in fp32",
        source="DeepSpeed 0.19.8 (communication_data_type) and FSDP of torch 2.13 (reduce_dtype): the "
        "compute dtype by default",
    ),
    LibraryFact(
        id="waits-for-the-device", library="deepspeed", versions=">=0.19.8", effect="time",
        what="the throughput timer waits for the GPU in every micro-step, as no other backend does",
        handled="like-for-like switches it off",
        source="DeepSpeed 0.19.8, utils/timer.py, ThroughputTimer: enabled and synchronized by default",
        device="cuda",
    ),
    LibraryFact(
        id="second-fp32-copy", library="deepspeed", versions=">=0.14.5", effect="states",
        what="an fp32 copy of weights that are fp32 already", cost="the textbook's states",
        source="DeepSpeed 0.14.5 to 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py clone the partition "
        "in fp32 whatever its dtype", precisions=("fp32",),
    ),
    LibraryFact(
        id="persistent-reduction-bucket", library="deepspeed", versions=">=0.19.8", effect="states",
        what="a reduction bucket stays allocated: 5e8 elements by default, whatever the model",
        source="DeepSpeed 0.19.8, runtime/zero/stage3.py, ipg_buckets", stages=(3,),
    ),
    LibraryFact(
        id="gradients-cut-at-stage-1", library="deepspeed", versions=">=0.19.8", effect="states",
        what="stage 1 keeps only its part of them after the last micro-step", cost="the textbook's gradients",
        source="DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, copy_grads_in_partition", stages=(1,),
    ),
    LibraryFact(
        id="gradients-twice", library="torch", versions=">=2.13", effect="states",
        what="DDP's buckets hold a second copy of the gradients",
        source="torch 2.13, csrc/distributed/c10d/reducer.cpp",
    ),
    LibraryFact(
        id="weights-cut-between-steps", library="torch", versions=">=2.13", effect="states",
        what="weights are sharded again after the backward pass", cost="the textbook's states",
        source="torch 2.13, distributed/fsdp: SHARD_GRAD_OP and reshard_after_forward=False",
    ),
    LibraryFact(
        id="reduced-every-micro-step", library="deepspeed", versions=">=0.12.0", effect="traffic",
        what="gradients are reduced in every micro-step", cost="the textbook's bytes",
        source="DeepSpeed 0.12.0 to 0.19.8, runtime/engine.py, allreduce_gradients: stages 2 and 3 "
        "communicate before the boundary too", stages=(2,), accumulated=True,
    ),
    LibraryFact(
        id="moved-every-micro-step", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="every micro-step gathers weights and reduces gradients", cost="the textbook's bytes",
        source="DeepSpeed 0.19.8, runtime/zero/stage3.py, independent_gradient_partition_epilogue",
        stages=(3,), accumulated=True,
    ),
    LibraryFact(
        id="gathered-every-micro-step", library="torch", versions=">=2.13", effect="traffic",
        what="weights are gathered in every micro-step", cost="the textbook's bytes",
        source="torch 2.13, distributed/fsdp: the backward pass gives weights back", accumulated=True,
    ),
    LibraryFact(
        id="root-not-resharded", library="torch", versions=">=2.13", effect="traffic",
        what="the root unit stays gathered between forward and backward pass", cost="the textbook's bytes",
        source="torch 2.13, distributed/fsdp: FSDP1 always, fully_shard unless the root gets "
        "reshard_after_forward=True",
    ),
    LibraryFact(
        id="weights-stay-gathered", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="small models stay gathered up to default thresholds", cost="the textbook's bytes",
        source="DeepSpeed 0.19.8, runtime/zero/config.py", stages=(3,),
    ),
    LibraryFact(
        id="tied-weights-gathered-twice", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="tied weights are gathered at each use", cost="the textbook's bytes",
        source="DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py", stages=(3,),
    ),
    LibraryFact(
        id="gathers-by-module", library="deepspeed", versions=">=0.19.8", effect="traffic",
        what="module by module", cost="as many gathers per forward pass as one per block",
        source="DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py", stages=(3,),
    ),
    *(
        LibraryFact(
            id=name, library="deepspeed", versions=">=0.19.8", effect="not run", what=what, handled=NOT_RUN,
            source=source,
        )
        for name, what, source in (
            ("qwZ", "ZeRO++ quantizes weights by a CUDA kernel; what it rounds has no closed form here",
             "DeepSpeed 0.19.8, QuantizerBuilder"),
            ("qgZ", "ZeRO++ quantizes gradients by a CUDA kernel; what it rounds has no closed form here",
             "DeepSpeed 0.19.8, QuantizerBuilder"),
            ("MiCS", "removed from DeepSpeed; fsdp-hybrid and fsdp1-hybrid shard within groups of ranks and "
             "replicate across them as it did", "DeepSpeed 0.19.8 refuses 'mics_shard_size'"),
            ("DeepCompile", "CUDA only; what its passes gather ahead has no closed form here",
             "DeepSpeed 0.19.8, is_deepcompile_supported"),
            ("SuperOffload", "CUDA only, where it was not run", "DeepSpeed 0.19.8, superoffload_stage3.py"),
            ("ZenFlow", "scrambles the model: after `initialize`, matrices hold their transposes' bytes, so "
             "that another model trains; use offload=optimizer", "run with DeepSpeed 0.19.8 at stage 2"),
        )
    ),
)  # fmt: skip


def fact(name: str) -> LibraryFact:
    """One fact by its id."""
    return next(entry for entry in FACTS if entry.id == name)


def holds(name: str, versions: Mapping[str, str]) -> bool:
    """Whether a fact is true of these versions by distribution; of a library not named: as of its newest."""
    entry = fact(name)
    return entry.library not in versions or entry.includes(versions[entry.library])


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


def absent(packages: Collection[str]) -> list[str]:
    """Those of these distributions that are not installed."""
    return [name for name in packages if installed_version(name) is None]


def installed_version(library: str) -> str | None:
    """Of a distribution; None: it is not installed."""
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
    head = "| library | versions | effect | what | costs, times | what the harness does | source |"
    lines = [head, "|" + " --- |" * 7]
    lines += [
        f"| {entry.library} | `{entry.versions}` | {entry.effect} | {entry.what} | {entry.cost} "
        f"| {entry.handled} | {entry.source} |"
        for entry in FACTS
    ]
    return "\n".join(lines) + "\n"
