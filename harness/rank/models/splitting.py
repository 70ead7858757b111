"""Whether the gradient of a batch hangs on how the batch is cut, which no strategy could then hide.

Of a large model whether its loss does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harness.backends.base import Batch
from harness.job.job import DEFAULT_TASK, Job
from harness.rank.models.losses import ComputeLoss, loss_function
from harness.record import SplitPart

SAMPLES = 8
"""Of the batch that is cut in two."""
MOST_PARAMETERS, MOST_WITH_GRADIENTS = 500_000_000, 50_000_000
"""Of a model that is copied in double precision, on the CPU; of more than the second without gradients: only
losses are compared."""
BATCHES, MOST_FOR_ALL = 8, 5_000_000
"""So many first batches of a model with so many parameters are cut: where a value decides what runs, both
halves of one batch may agree by chance. Of a larger model the first."""
ROUNDING = 100 * 2.0**-23
"""Code of the user's own may cast to fp32 amid double precision: so many roundings of that."""
FP32_ROUNDING = 2.0**-10
"""Where the code takes fp32 only."""
NUDGE = 0.01
"""By which share each trained weight is moved before anything is measured."""
FAR = 1e9
"""Distance, relative, of gradients that are not finite, as where a half has one sample of a kind."""


def split_dependence(
    job: Job, model: nn.Module, batch_of: Callable[[Sequence[int]], Batch], steps: Sequence[Sequence[int]]
) -> SplitPart | None:
    """Compare gradients of batches with those of their halves, in double precision where the code takes it.

    steps: the samples of each. Of a large model losses are compared alone. None where the loss is a sum over
    samples by construction, and where it cannot be measured.
    """
    if job.task == DEFAULT_TASK and job.model.factory is None and job.loss.factory is None:
        return None
    parameters = list(model.parameters())
    count, half = sum(p.numel() for p in parameters), min(SAMPLES, len(steps[0])) // 2
    if not half or any(p.is_meta for p in parameters) or count > MOST_PARAMETERS:
        return None
    cuts = [
        [batch_of(some) for some in (ids[:SAMPLES], ids[:half], ids[half:SAMPLES])]
        for ids in steps[: BATCHES if count <= MOST_FOR_ALL else 1]
    ]
    for double, rounding in ((True, ROUNDING), (False, FP32_ROUNDING)):
        try:
            with torch.random.fork_rng(devices=[]), double_precision(on=double):
                found = [_measured(job, model, parts, rounding, double=double) for parts in cuts]
            known = [part for part in found if part is not None]
            return max(known, key=_how_far) if known else None
        except Exception:  # code of the user's own: the run itself says what is wrong
            continue
    return None


def _how_far(part: SplitPart) -> tuple[bool, bool, float]:
    return part.is_random, part.varies, part.difference


@contextmanager
def double_precision(*, on: bool = True) -> Iterator[None]:
    """New tensors are float64."""
    before = torch.get_default_dtype()
    if on:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def doubled(batch: Batch) -> Batch:
    """A batch whose floating numbers are float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _measured(
    job: Job, model: nn.Module, parts: Sequence[Batch], rounding: float, *, double: bool
) -> SplitPart | None:
    batch, *halves = [doubled(part) for part in parts] if double else parts
    of = _gradient if sum(p.numel() for p in model.parameters()) <= MOST_WITH_GRADIENTS else _loss

    def passed(*passes: list[Batch]) -> list[Tensor]:
        """What a fresh copy gives for some batches, then for others."""
        own = copy.deepcopy(model)
        own = (own.double() if double else own.float()).train()
        _nudge(own)
        compute = loss_function(job, own)
        return [of(own, compute, batches) for batches in passes]

    whole, again, cut = passed([batch], [batch], halves)
    size = float(whole.norm())
    if not size or not torch.isfinite(whole).all():
        return None
    found = SplitPart(
        difference=_share(cut - whole, size), repetition=_share(again - whole, size), rounding=rounding
    )
    if not found.varies:
        return found
    first = [passed([half])[0] for half in halves]
    later = [passed([half], [batch])[1] for half in halves]
    apart = [torch.stack(first).sum(0) - whole, *(one - again for one in later)]
    return found.model_copy(update={"by_samples": max(_share(one, size) for one in apart)})


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    """Move what trains off its initial values: a copy that passes keep, such as a teacher, begins with these.

    Only then does a pass that follows them change the next one.
    """
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            parameter.mul_((1 + NUDGE * noise).to(parameter))


def _share(difference: Tensor, size: float) -> float:
    """The length of a difference as a share of `size`; `FAR` where it is not finite, as records cannot be."""
    share = float(difference.norm()) / size
    return share if math.isfinite(share) else FAR


@torch.no_grad()
def _loss(model: nn.Module, compute: ComputeLoss, batches: Sequence[Batch]) -> Tensor:
    """Summed over the batches, of one element."""
    return torch.stack([compute(model, batch).sum() for batch in batches]).sum().reshape(1)


def _gradient(model: nn.Module, compute: ComputeLoss, batches: Sequence[Batch]) -> Tensor:
    """Of the summed losses, with respect to all that trains."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        compute(model, batch).sum().backward()  # type: ignore[no-untyped-call]
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trained])
