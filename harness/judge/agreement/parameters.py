"""Which parameters lie far from the reference's: at the end of a run, or in the moments of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from harness.judge.agreement.noise import Tolerance
from harness.judge.distance import estimate, movement, sketch_distances
from harness.judge.wording import a_few
from harness.record import Record

APART = 0.05
"""Relative. Gradients that differ by less are not told from those that rounding moved."""
ALIKE = 0.1 * APART
"""The same of those that are said to agree: half of all."""
FAR = 3.0
"""Times. A parameter that ends so much farther from the reference's than any other is named."""


def gradients_apart(reference: Record, record: Record) -> str | None:
    """Parameters whose gradients lie far from the reference's while most do not, as the end of a text.

    By second moments, over the change that most have in common: clipping passes one parameter's on to all.
    """
    mine, others = record.moment_norms, reference.moment_norms
    ratios = {n: mine[n][1] / others[n][1] for n in mine.keys() & others.keys() if others[n][1] > 0}
    common = median(ratios.values()) if ratios else 0.0
    if not common:
        return None
    apart = sorted(((abs(ratio / common - 1), name) for name, ratio in ratios.items()), reverse=True)
    usual = median(distance for distance, _ in apart)
    named = [name for distance, name in apart if distance > max(APART, FAR * usual)]
    if not named or usual > ALIKE or len(named) > len(apart) // 2:
        return None
    factors = [ratios[name] / common for name in named]
    one = max(factors) - min(factors) <= APART * max(factors)
    size = f"{factors[0]:.3g} times" if one else f"{min(factors):.3g} to {max(factors):.3g} times"
    return (
        f"; over the last steps gradients of {where(reference, named)} are {size} as large as in the "
        "reference, beside all others"
    )


def farthest(reference: Record, record: Record) -> tuple[str, float, float] | None:
    """The parameter that ends far beyond all others, its distance and the next, each in movements; None: no
    single one does."""
    moved = movement(reference)
    apart = sketch_distances(reference.final_weights, record.final_weights)
    shares = sorted(((apart[name] / moved[name], name) for name in apart if moved.get(name)), reverse=True)
    if len(shares) < 2 or shares[0][0] <= FAR * shares[1][0] or not shares[1][0]:
        return None
    return shares[0][1], shares[0][0], shares[1][0]


def where(reference: Record, names: Sequence[str]) -> str:
    """These parameters in words: a block's name stands for all that it trains."""
    layout, rest, shown = reference.layout, list(names), []
    for block in layout.blocks if layout is not None else []:
        trained = {name for name in movement(reference) if name.startswith(f"{block}.")}
        if trained and trained <= set(rest):
            rest = [name for name in rest if name not in trained]
            shown.append(f"block {block}")
    return a_few([*shown, *rest])


def kept(record: Record, name: str) -> float | None:
    """The norm of a parameter at the end over that at the beginning; None: not known, or it was zero."""
    first, last = (
        w.sketch if w is not None else None for w in (record.initial_weights, record.final_weights)
    )
    if not first or not last or name not in last or not first.get(name) or not first[name][0]:
        return None
    return last[name][0] / first[name][0]


def parameters_beyond(reference: Record, record: Record, limits: Tolerance) -> list[str]:
    left = (reference.final_weights.sketch if reference.final_weights else None) or {}
    right = (record.final_weights.sketch if record.final_weights else None) or {}
    moved = movement(reference)
    distances = {
        name: estimate(left[name], right[name]) / moved[name]
        for name in left
        if name in right and moved.get(name)
    }
    beyond = [n for n, value in distances.items() if n in limits.parameters and value > limits.parameters[n]]
    return sorted(beyond, key=lambda name: -distances[name])
