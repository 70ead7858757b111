"""What gradients and updates of one step show about two runs, in sentences: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.diagnose.tensors import Comparison, Examined, TensorDifference, TensorNoise, compare_tensors
from harness.judge.explain import name_scale
from harness.judge.wording import percent
from harness.record import WorldPart

SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """The first examined step with different tensors, or the last one if there is none."""

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
    """Compare the examined steps until tensors differ by more than noise."""
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
    """Sentences about a step: gradients, updates, and what follows from both.

    `beyond` names what differs in the records (loss, norm, update, weights or a parameter), `explained`
    whether the records named a cause already. `world` is that of the other run, whose ratios are named.
    """
    if verdict.gradients is None:
        yield ("gradients: not compared, since one of the engines cannot gather them (Engine.full_gradients)")
    else:
        yield _about("gradients", verdict.gradients, world)
    yield _about("updates", verdict.updates, world)
    agree = verdict.gradients is not None and not verdict.gradients.beyond
    if agree and verdict.updates.beyond and not explained:
        yield (
            "so the cause lies between gradient and weight: clipping, learning rate, betas, epsilon, weight "
            "decay, dtype of masters, or parameters without an optimizer; the records show no difference in "
            "any of these"
        )
    if not verdict.parts:
        yield from _nothing_parts(beyond, gathered=verdict.gradients is not None)


def _nothing_parts(beyond: Collection[str], *, gathered: bool) -> Iterator[str]:
    if not beyond:
        return
    if "norm" in beyond and not gathered:
        yield ("so the gradient or its reported norm differs; Adam may hide either from the update")
        return
    reported = [text for name, text in (("loss", "loss"), ("norm", "gradient norm")) if name in beyond]
    if reported and not set(beyond) - {"loss", "norm"}:
        yield (f"so both train equally, but one of them reports a wrong {' and '.join(reported)}")
    else:
        yield "so no examined step shows it: the difference accumulates over many steps, each within noise"


def _about(kind: str, compared: Comparison, world: WorldPart) -> str:
    if not compared.beyond:
        return f"{kind}: all {compared.compared} tensors agree"
    if compared.common_factor is not None:
        factor = compared.common_factor
        causes = name_scale(factor, world.mesh, world.accumulation_steps) if kind == "gradients" else []
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
    difference, noise = percent(tensor.difference), percent(tensor.allowed)
    return f"{tensor.name} {size}, off by {difference} (noise: {noise})"


def number(ratio: float) -> str:
    """A ratio as it is read: 2.000, 0.25."""
    return f"{ratio:.3f}" if ratio >= 1 else f"{ratio:.4g}"
