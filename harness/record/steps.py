"""Optimizer steps and evaluations over all ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from harness.record.part import HashSum, Part

Window = Literal["warmup", "probed", "traced", "cooldown", "timed"]


# Not a model: a report may hold millions of steps, and with slots one takes a quarter of the memory.
@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class StepPart:
    """One optimizer step over all ranks."""

    step: int
    """Number of the optimizer step, from 0."""
    window: Window
    """What the step is for: see the settings of `measure`."""
    loss: float | None
    """Mean cross entropy per target token of the global batch, in nats; None: not finite. Of an observed
    script see `observation.loss`."""
    gradient_norm: float | None
    """Global L2 norm before clipping; None: not finite, so a loss scaler skipped the update, or of an
    observed script that does not compute it."""
    learning_rate: float
    """As the job has it; of an observed script as its optimizer holds it."""
    applied_learning_rate: float | None = None
    """As the optimizer holds it after the step, of all ranks and groups the one farthest from the job's;
    None: no torch optimizer trains."""
    applied_gradient_norm: float | None = None
    """Norm of the gradients that the optimizer was given, after clipping, over all ranks; of the first
    steps only. None: not looked at, or no torch optimizer stepped."""
    tokens: int | None
    """Tokens that are not padding, over all ranks; None: not known of an observed script."""
    target_tokens: int | None
    """Tokens whose prediction counts in the loss, over all ranks; None: not known of an observed script."""
    samples: int | None
    """Samples of the global batch; None: not known of an observed script."""
    seconds: float
    """The slowest rank's."""
    sample_hashes: HashSum | None
    """Sum modulo 2^64 of a hash of each sample consumed, over all ranks: equal for equal samples; None: not
    known of an observed script."""


class EvaluationPart(Part):
    """Loss on the held-out samples, over all ranks."""

    step: int
    """Number of optimizer steps taken before."""
    loss: float | None
    """Mean cross entropy per target token, in nats; None: not finite."""
    target_tokens: int
    """Tokens whose prediction counts in the loss."""
    samples: int | None = None
    """Over all ranks; None in records from before evaluations were timed."""
    seconds: float | None = None
    """The slowest rank's, from a synchronised device to a synchronised device."""


class WindowsPart(Part):
    """How many steps each window holds."""

    warmup: int
    """First steps, in no statistic."""
    probed: int
    """Steps whose memory and communication are recorded, not timed."""
    timed: int
    """Steps behind every figure of speed."""
    traced: int = 0
    """Steps under torch's profiler, not timed."""
    cooldown: int = 0
    """After probed and traced steps, in no statistic: the probes' side effects make them longer."""
