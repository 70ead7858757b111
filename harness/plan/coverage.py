"""Which jobs have predicted activations and speed; model states and traffic have closed forms for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harness.errors import HarnessError
from harness.forms.activations import blocks_between
from harness.forms.optimizers import OWN_STATES, implementation
from harness.forms.peak_memory.families import has_timeline
from harness.job.job import DEFAULT_TASK, Job, axes_of
from harness.judge.wording import listed
from harness.plan.architectures import ARCHITECTURES, mixture_of_experts
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario, with_settings

PREDICTED = ("training.activation_checkpointing", "loss.chunk_tokens", "optimizer.groups")
"""Settings of `axes_of` that profiles of activations and the time model cover."""


ALL = "activations and speed {} are"
SPEED = "speed {} is"


def why_states_alone(
    model: PlannedModel, job: Job, *, covered: tuple[str, ...] = (), of: str = ALL
) -> str | None:
    """Why neither activations nor speed of a job are predicted; None: they are.

    covered: settings of `axes_of` that whoever asks takes into account. of: what is asked, ALL or SPEED.
    """
    own = [f"{name}.factory" for name in ("model", "data", "loss") if getattr(job, name).factory]
    architecture = ARCHITECTURES.get(str(model.config.get("model_type")))
    if job.task != DEFAULT_TASK:
        what = f"of task {job.task}"
    elif own:
        what = f"with {' and '.join(own)}"
    elif mixture_of_experts(model.config):
        what = f"of {model.architecture}, a mixture of experts,"
        return (
            f"activations and speed {what} follow from what its router does with the data and are not "
            "predicted; model states and traffic are"
        )
    elif architecture is not None and not architecture.causal:
        what = f"of {model.architecture}, which is not a causal language model,"
    else:
        if not (given := unpredicted_axes(job, covered)):
            return None
        if job.training.precision == "fp8":
            return EMULATED
        left = f"{of.format(f'under {listed(given)}')} not predicted; "
        return left + ("model states and traffic are" if job.optimizer.factory is None else OWN_STATES)
    return (
        f"activations and speed {what} are not predicted, only those of causal language models of "
        "transformers; model states and traffic are"
    )


CHECKPOINTING = "training.activation_checkpointing"
OPTIMIZER = "optimizer.kind"
FROZEN = "frozen optimizer.groups"
COMPILED = "model.compile"
"""Whose speed is that of eager code, the least that it is: fused kernels read and write less."""
MOST_COPIES = {"adam": 2, "sgd": 1, "adamw-8bit": 3, "adamw-8bit-bnb": 0}
"""The most that the update of other optimizers allocates, in copies of what it works on. Adam and SGD:
gradients with the decay added; Adam: the roots (torch 2.13, optim/adam.py and sgd.py, foreach; one by one the
quotient too). torchao 0.18: both moments in full and the root, which its compiled kernel may leave away.
bitsandbytes 0.50: one kernel in place."""
FEWEST_BLOCKS = 3
"""From which compiled blocks keep more together than one eager block computes again."""


def neighbours(scenario: Scenario) -> tuple[Scenario, Scenario] | None:
    """Predicted scenarios between which the memory of one that is not lies, the one that needs less first;
    None: they are not known.

    Compiled blocks keep their inputs at least, as eager ones do that compute all else again, and no more than
    eager ones keep: the compiler takes the cut with the fewest bytes (torch/_functorch/partitioners.py,
    `min_cut_rematerialization_partition`). Every n-th block keeps what all would, the others what none would.
    An optimizer other than AdamW has states in closed form; its update makes no copies, or `MOST_COPIES`.
    Frozen parameters keep for the backward pass what trained ones do at most, and at least what follows from
    where gradients go (`ActivationProfile.with_frozen`). Emulated fp8 keeps what fp32 does; while a layer
    multiplies, its operands lie there in fp8 too, and widened (torchao 0.18, float8_linear.py and
    float8_ops.py).
    """
    training, model, other = scenario.job.training, scenario.job.model, scenario.other
    found: Iterable[Scenario | None]
    less: dict[str, Any] = {CHECKPOINTING: True}
    if scenario.job.optimizer.freezes and other.frozen_keep is None:
        found = [replace(scenario, other=replace(other, frozen_keep=keep)) for keep in ("least", "most")]
    elif (copies := _most_copies(scenario)) is not None:
        found = [replace(scenario, other=replace(other, update_copies=count)) for count in (0, copies)]
    elif model.compile == "block" and not training.activation_checkpointing:
        if len(scenario.model.layout.blocks) < FEWEST_BLOCKS:
            return None
        plain = {"model.compile": "none"}
        found = with_settings(scenario, less | plain), with_settings(scenario, plain)
    elif training.precision == "fp8":
        wide = with_settings(scenario, {"training.precision": "fp32"})
        found = wide, wide and replace(wide, other=replace(wide.other, emulates_fp8=True))
    elif scenario.strategy.facts.cuts_layers and (blocks_between(training.activation_checkpointing) or 1) > 1:
        found = with_settings(scenario, less), with_settings(scenario, {CHECKPOINTING: False})
    else:
        return None
    low, high = found
    if low is None or high is None or why_memory_unknown(low) or why_memory_unknown(high):
        return None
    return low, high


def why_between(scenario: Scenario) -> str:
    """Why the peak of a scenario with `neighbours` is a range."""
    training, kind = scenario.job.training, scenario.job.optimizer.kind
    if scenario.job.optimizer.freezes:
        return "frozen layers keep at most what trained ones do, and at least nothing for their own gradients"
    if copies := _most_copies(scenario):
        return (
            f"the update of optimizer.kind={kind} copies what it works on up to {copies} times, or not at all"
        )
    if training.precision == "fp8":
        return "emulated fp8 keeps what fp32 does, and while a layer multiplies at most its operands rounded"
    if scenario.job.model.compile == "block":
        return "compiled blocks keep as much as eager blocks at most, and as blocks that recompute at least"
    return (
        f"with activation_checkpointing={training.activation_checkpointing} a stage keeps between what it "
        "would with true and with false"
    )


def _most_copies(scenario: Scenario) -> int | None:
    """Of what the update works on; None: the optimizer is AdamW, or nothing is known of it."""
    optimizer = scenario.job.optimizer
    copies = None if scenario.other.update_copies is not None else MOST_COPIES.get(optimizer.kind)
    one_by_one = implementation(scenario.workload()) == "for-loop"
    return copies if copies is None or not (one_by_one and optimizer.kind == "adam") else copies + 2


def why_memory_unknown(scenario: Scenario) -> str | None:
    """Why the memory of a step is not predicted; None: it is."""
    other = scenario.other
    given = {OPTIMIZER: other.update_copies, FROZEN: other.frozen_keep}
    covered = tuple(name for name, value in given.items() if value is not None)
    return _without_timeline(scenario) or why_states_alone(scenario.model, scenario.job, covered=covered)


def _without_timeline(scenario: Scenario) -> str | None:
    workload = scenario.workload()
    every = blocks_between(workload.activation_checkpointing) or 1
    if every > 1 and scenario.strategy.facts.cuts_layers:
        return f"what stages keep with checkpointing of every {every} blocks is not predicted"
    if has_timeline(workload):
        return None
    return f"activations and speed under {scenario.label} are not predicted; model states and traffic are"


def require_speed(scenario: Scenario, *, covered: tuple[str, ...]) -> None:
    """Raise HarnessError for a job whose speed is not predicted. `covered`: settings that its model has."""
    if (reason := _without_timeline(scenario)) is not None:
        raise HarnessError(reason)
    asked = scenario.model, scenario.job
    if why_states_alone(*asked, covered=covered) is not None:
        of = SPEED if neighbours(scenario) else ALL
        raise HarnessError(str(why_states_alone(*asked, covered=covered, of=of)))


def unpredicted_axes(job: Job, covered: tuple[str, ...] = ()) -> list[str]:
    """Settings of a job that change what a step keeps and computes, and that no profile covers."""
    given = [text for text in axes_of(job) if text.partition("=")[0] not in (*PREDICTED, *covered)]
    return given + ([FROZEN] if job.optimizer.freezes and FROZEN not in covered else [])


EMULATED = (
    "fp8 products are emulated, so their speed is not that of fp8 hardware; model states and traffic are "
    "those of fp32"
)
