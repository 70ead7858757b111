"""What the gradients and updates of one step say of two runs, in sentences: pure functions of comparisons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.compare.gradient_scale import name_scale
from harness.compare.wording import percent
from harness.diagnose.tensors import Comparison, Examined, TensorDifference, TensorNoise, compare_tensors
from harness.record import WorldPart

SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """The first examined step whose tensors part, or the last if none do."""

    step: int
    gradients: Comparison | None
    """None: one of the engines cannot gather them."""
    updates: Comparison

    @property
    def parts(self) -> bool:
        return bool(self.updates.beyond or (self.gradients and self.gradients.beyond))


def first_parting_step(
    first: Mapping[int, Examined], second: Mapping[int, Examined], noise: Mapping[int, TensorNoise]
) -> StepVerdict:
    """Go through the examined steps until tensors part by more than noise."""
    for step in sorted(first):
        left, right, limits = first[step], second[step], noise[step]
        gradients = None
        if left.gradients is not None and right.gradients is not None:
            gradients = compare_tensors(left.gradients, right.gradients, limits.gradient_limits())
        updates = compare_tensors(left.updates, right.updates, limits.update_limits())
        verdict = StepVerdict(step=step, gradients=gradients, updates=updates)
        if verdict.parts:
            break
    return verdict


def sentences(
    verdict: StepVerdict, world: WorldPart, *, beyond: Collection[str], explained: bool
) -> Iterator[str]:
    """What to tell of a step: gradients, updates, and what follows from both.

    `beyond` names what parts in the records (loss, norm, update, weights or a parameter), `explained`
    whether the records named a cause already. `world` is that of the other run, whose ratios are named.
    """
    if verdict.gradients is None:
        yield (
            "gradients: one of the engines cannot gather them (Engine.full_gradients), so only updates are "
            "compared"
        )
    else:
        yield _about("gradients", verdict.gradients, world)
    yield _about("updates", verdict.updates, world)
    agree = verdict.gradients is not None and not verdict.gradients.beyond
    if agree and verdict.updates.beyond and not explained:
        yield (
            "so the cause stands between gradient and weight: clipping, learning rate, betas, epsilon, "
            "weight decay, dtype of masters, or parameters without an optimizer; in what the records hold of "
            "these there is no difference"
        )
    if not verdict.parts:
        yield from _nothing_parts(beyond, gathered=verdict.gradients is not None)


def _nothing_parts(beyond: Collection[str], *, gathered: bool) -> Iterator[str]:
    if not beyond:
        return
    if "norm" in beyond and not gathered:
        yield (
            "so the gradient differs, or the norm that is reported of it; Adam may hide either from the "
            "update"
        )
        return
    told = [text for name, text in (("loss", "loss"), ("norm", "gradient norm")) if name in beyond]
    if told and not set(beyond) - {"loss", "norm"}:
        yield (
            f"so both train alike, and what is wrong is the {' and the '.join(told)} that one of them reports"
        )
    else:
        yield "so no examined step shows it: the difference adds up over many, each within noise"


def _about(kind: str, compared: Comparison, world: WorldPart) -> str:
    if not compared.beyond:
        return f"{kind}: all {compared.compared} tensors agree"
    if compared.common_factor is not None:
        factor = compared.common_factor
        causes = name_scale(factor, world.world_size, world.accumulation_steps) if kind == "gradients" else []
        return f"all {kind} x {number(factor)}" + (f": {' or '.join(causes)}" if causes else "")
    absent = [tensor.name for tensor in compared.beyond if tensor.ratio == 0]
    if len(absent) == len(compared.beyond) == compared.compared:
        return f"{kind}: all are zero in the other run"
    parts = []
    if absent:
        parts.append(f"{_some(absent)} {'has' if len(absent) == 1 else 'have'} none")
    others = [_tensor(tensor) for tensor in compared.beyond if tensor.ratio != 0]
    if others:
        parts.append(_some(others))
    return f"{kind}: {len(compared.beyond)} of {compared.compared} tensors differ: {'; '.join(parts)}"


def _some(named: Sequence[str]) -> str:
    more = len(named) - SHOWN_TENSORS
    return "; ".join(named[:SHOWN_TENSORS]) + (f"; and {more} more" if more > 0 else "")


def _tensor(tensor: TensorDifference) -> str:
    size = "where the baseline has none" if tensor.ratio is None else f"x {number(tensor.ratio)}"
    apart, noise = percent(tensor.difference), percent(tensor.allowed)
    return f"{tensor.name} {size}, {apart} of its size apart (noise: {noise})"


def number(ratio: float) -> str:
    """A ratio as it is read: 2.000, 0.25."""
    return f"{ratio:.3f}" if ratio >= 1 else f"{ratio:.4g}"
