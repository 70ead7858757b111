"""What is noted of one optimizer step while it runs, and its event once its clock has stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.record import Window
from harness.run_directory.events import AppliedGradients, StepEvent
from harness.worker.observer import DIGESTED_STEPS
from harness.worker.observing.batch import MicroBatch
from harness.worker.observing.losses import LossSum, StepLoss


@dataclass
class Step:
    """One optimizer step of one rank."""

    number: int
    window: Window
    began: float
    """By the monotonic clock."""
    own_seconds: float = 0.0
    """Spent on observing within the step."""
    ended: float | None = None
    """None: the optimizer has not stepped."""
    micro_steps: int = 0
    """Backward passes that have ended."""
    data_seconds: float = 0.0
    batches: list[MicroBatch] = field(default_factory=list)
    losses: StepLoss = field(default_factory=StepLoss)
    norm: Any = None
    """As clipping returned it; None: nothing clipped."""
    rate: float | None = None
    group_rates: dict[int, float | None] = field(default_factory=dict)
    """By group of the optimizers that stepped."""
    in_micro_step: bool = False
    """Whether a forward pass has begun whose backward pass has not ended."""

    @property
    def seconds(self) -> float:
        assert self.ended is not None
        return max(0.0, self.ended - self.began - self.own_seconds)

    def event(
        self, phases: dict[str, float], applied: tuple[float, float] | None, trained: int
    ) -> tuple[StepEvent, LossSum | None]:
        """The event of the step and where its loss is from; reads tensors of the device.

        applied: squares and elements of the gradients that the optimizer was given. trained: elements of the
        whole model that train.
        """
        loss = self.losses.total(self.batches, micro_steps=self.micro_steps)
        share = None
        if applied is not None:
            squares, count = applied
            share = AppliedGradients(squares=finite(squares), share=count / max(1, trained))
        norm, is_partial = (None, False) if self.norm is None else number(self.norm)
        hashes = [batch.hash_sum() for batch in self.batches]
        total = f"{sum(hashes) % 2**64:016x}" if hashes else None
        event = StepEvent(
            step=self.number,
            window=self.window,
            loss_sum=finite(loss.value) if loss else None,
            loss_weight=loss.weight if loss else None,
            gradient_norm=None if norm is None else finite(norm),
            norm_is_partial=is_partial,
            learning_rate=self.rate or 0.0,
            applied_learning_rate=self.rate,
            group_learning_rates=[
                self.group_rates.get(place) for place in range(max(self.group_rates, default=-1) + 1)
            ],
            applied=share,
            global_target_tokens=None,
            samples=sum(batch.count for batch in self.batches) if self.batches else None,
            tokens=_sum([batch.tokens() for batch in self.batches]),
            target_tokens=_sum([batch.targets() for batch in self.batches]),
            sample_hashes=total,
            batch_hash_sum=total,
            batch_digests=[digest for batch in self.batches for digest in batch.digests()]
            if self.number < DIGESTED_STEPS
            else None,
            seconds=self.seconds,
            data_seconds=min(self.data_seconds, self.seconds),
            phase_seconds=phases,
        )
        return event, loss


def finite(value: float) -> float | None:
    """The value; None where it is not finite."""
    return value if math.isfinite(value) else None


def number(value: Any) -> tuple[float, bool]:
    """A scalar of torch or of Python; whether it is this rank's part of a norm.

    The norm that FSDP2 returns is that of each rank's shards until somebody asks for all of it, which takes a
    collective (torch 2.13, `_NormPartial`). The squares of the parts add up to the square of the norm.
    """
    if not isinstance(value, Tensor):
        return float(value), False
    value = value.detach()
    if not isinstance(value, DTensor):
        return float(value), False
    mesh = value.device_mesh
    replicas = mesh.size() // mesh.shape[-1]
    return float(value.to_local()) / replicas**0.5, any(p.is_partial() for p in value.placements)


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
