"""Why two runs differ, as far as their records show it, before anything is rerun: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.diagnose.pair import Run
from harness.judge.distance import Distance
from harness.judge.effective import SettingDifference
from harness.judge.explain import explain
from harness.judge.job_equivalence import Difference
from harness.judge.noise import Limits
from harness.judge.wording import percent, words

FIRST_STEPS = 4
"""Most defects act from the start, long before losses show them."""
LAST_STEPS = 4
"""Up to and including the one in which losses or norms diverge."""
REPORTED = ("loss-of-one-rank", "loss-normalisation", "loss-scale", "norm-of-shard")
"""Causes that concern what is reported, and not gradients or updates."""
QUANTITIES = {
    "loss": "loss {} nats",
    "norm": "gradient norm {}",
    "update": "distance moved {}",
    "weights": "final weights {} of the distance moved",
}
"""A loss is in nats per token, everything else in percent."""


def steps_to_examine(parting: int | None, last: int) -> list[int]:
    """The first steps, and those up to the one in which the runs diverge.

    Where only final weights differ that is the last step: the cause may be in any.
    """
    until = last if parting is None else parting
    early = range(min(FIRST_STEPS, until + 1))
    return sorted({*early, *range(max(0, until - LAST_STEPS + 1), until + 1)})


def how_far(found: Distance, limits: Limits) -> str:
    """'largest differences: loss 1.2e-03 nats (noise: 4.8e-06), ...'."""
    parts = [
        f"{text.format(_size(name, value))} (noise: {_size(name, getattr(limits, name))})"
        for name, text in QUANTITIES.items()
        if (value := getattr(found, name)) is not None
    ]
    if not parts:
        return "neither losses, norms nor weights can be compared"
    return f"largest differences: {', '.join(parts)}"


def _size(quantity: str, value: float) -> str:
    return f"{value:.1e}" if quantity == "loss" else percent(value)


def about_job(differences: Sequence[Difference], other: Run) -> Iterator[str]:
    """Fields that make the other run a different training, although both have the same job."""
    for difference in differences:
        yield (
            f"not the same training: {difference.field}: {words(difference.given)} in {other.name}, "
            f"{words(difference.reference)} in the baseline"
        )


def about_settings(
    differences: Sequence[SettingDifference], baseline: Run, other: Run, *, clean: bool
) -> Iterator[str]:
    """Settings in force that differ and change the mathematics: suspects, unless the runs agree."""
    what = "without effect here" if clean else "suspected setting"
    for difference in differences:
        if difference.effect == "mathematics":
            here, there = _values(difference)
            yield f"{what}: {difference.setting}: {here} in {other.name}, {there} in {baseline.name}"


def about_replicas(run: Run) -> Iterator[str]:
    """Ranks that end with different weights although they should be equal."""
    groups: dict[str, list[str]] = {}
    for rank in run.record.ranks:
        if rank.final_digest is not None:
            groups.setdefault(rank.final_digest, []).append(str(rank.rank))
    if len(groups) > 1:
        cut = " against ".join(f"rank {', '.join(group)}" for group in groups.values())
        yield f"ranks of {run.name} end with different weights: {cut}"


def about_reports(baseline: Run, other: Run, limits: Limits) -> Iterator[str]:
    """A wrongly reported loss or norm, if a step shows it."""
    cause = explain(baseline.record, other.record, limits)
    if cause.kind in REPORTED:
        yield cause.text


def _values(difference: SettingDifference) -> tuple[str, str]:
    """The run's value and the reference's; of two lists only what the other does not hold."""
    given, reference = difference.given, difference.reference
    if difference.constants is None and isinstance(given, list) and isinstance(reference, list):
        own = [[item for item in side if item not in other]
               for side, other in ((given, reference), (reference, given))]  # fmt: skip
        if any(own):
            return words(own[0]), words(own[1])
    return difference.texts
