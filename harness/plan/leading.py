"""Which prediction leads where predictions cannot tell them apart, and its figures in a line."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends import registry
from harness.judge.wording import percent
from harness.plan.prediction import P, Prediction
from harness.plan.scenario import Scenario
from harness.tell.formats import gigabytes

CLOSE_SHARE = 0.05
"""Of the better rate: nearer than that only a measurement ranks."""
TIE = "which only a measurement can tell"
"""Of rates that are nearer."""
USUAL = ("ddp", "zero1", "zero2", "zero3", "fsdp-grad-op", "fsdp")
"""The few where nothing says which of them lead."""


def pointless(label: str, gpus: int) -> bool:
    """Whether a strategy that shards has one GPU alone and offloads nothing: the same as one process."""
    return gpus == 1 and label != registry.REFERENCE and not _offloads(label)


def _offloads(label: str) -> bool:
    return registry.moving_parts(label)[0]


def _shares_samples(label: str) -> bool:
    options = registry.parse(label)[1].model_dump()
    return any(name in options for name in ("sequence", "tensor", "stages"))


def _is_tight(one: Prediction) -> bool:
    """Whether it leaves no room for fragmentation and the error of a prediction."""
    return one.verdict is not None and not one.verdict.leaves_room


def _barely_fits(one: Prediction) -> bool:
    return one.verdict is not None and one.verdict.barely_fits


def by_speed(one: Prediction) -> tuple[bool, float, int]:
    """Sorts the fastest first, and last what barely fits."""
    margin = one.verdict.margin_bytes if one.verdict else 0
    return _barely_fits(one), -one.tokens_per_second_per_gpu, -margin


def close_to_first(ranked: Sequence[P]) -> list[P]:
    """Those that predictions cannot tell from the first, which is among them. `ranked`: `by_speed`."""
    least = ranked[0].tokens_per_second_per_gpu * (1 - CLOSE_SHARE) if ranked else 0.0
    same = (one for one in ranked if _barely_fits(one) == _barely_fits(ranked[0]))
    return [one for one in same if one.tokens_per_second_per_gpu >= least]


def simplest_close(ranked: Sequence[P]) -> P | None:
    """Of those that predictions cannot tell from the fastest, the one to prefer (`preference`).

    `ranked`: `by_speed`; of equal ones the first. None: there are none.
    """
    return min(close_to_first(ranked), key=preference, default=None)


def preference(one: Prediction) -> tuple[bool, bool, bool, int]:
    """Sorts those of equal speed: what needs no offload and no shared samples first, of these what leaves
    room for fragmentation and the error of a prediction, of these what has the fewest moving parts."""
    offloads, place = registry.moving_parts(one.label)
    return offloads, _shares_samples(one.label), _is_tight(one), place


def leader(ranked: Sequence[P]) -> P | None:
    """The one to take: `simplest_close` of the first class that there is. `ranked`: `by_speed`; None: none.

    What barely fits comes last. Where ranks with samples of their own fit without offload, neither offload
    nor shared samples lead; if none of those leaves room, shared samples with room are of the same class.
    """
    alone = [
        one for one in ranked if not (_barely_fits(one) or _shares_samples(one.label) or _offloads(one.label))
    ]
    has_room = not all(map(_is_tight, alone))

    def later(one: P) -> tuple[bool, bool]:
        shares = _shares_samples(one.label) and (has_room or _is_tight(one))
        return _barely_fits(one), bool(alone) and (_offloads(one.label) or shares)

    first = min(map(later, ranked), default=None)
    return simplest_close([one for one in ranked if later(one) == first])


def in_order(found: Sequence[P]) -> list[P]:
    """As they are recommended: first `leader`, then each place to `simplest_close` of those that are left."""
    rest = sorted(found, key=by_speed)
    ordered: list[P] = []
    while (first := simplest_close(rest) if ordered else leader(rest)) is not None:
        ordered.append(first)
        rest = [one for one in rest if one is not first]
    return ordered


def _ends(bounds: Sequence[float]) -> list[str]:
    return list(dict.fromkeys(map(gigabytes, bounds)))


def span(bounds: Sequence[float], joined: str = " to ") -> str:
    """'21.7 to 46.9', in GB; bounds that read alike once."""
    return joined.join(_ends(bounds))


def between(bounds: Sequence[float]) -> str:
    """'between 21.7 and 46.9', in GB; bounds that read alike once."""
    return "between " * (len(_ends(bounds)) > 1) + span(bounds, " and ")


def about(rate: float) -> str:
    """Two digits: more are worth nothing."""
    return f"{float(f'{rate:.2g}'):,.0f}" if rate >= 1 else f"{rate:.2g}"


def rate(tokens_per_second: float) -> str:
    """Three digits, by which rows of a table are told apart."""
    return (
        f"{float(f'{tokens_per_second:.3g}'):,.0f}"
        if tokens_per_second >= 100
        else f"{tokens_per_second:.3g}"
    )


IN_WORDS = {"close": "is close to the limit"}
"""Of a verdict, what is no verb."""
MARKS = {"barely fits": " (barely fits)", "close": " (close to the limit)"}
ON_HOST = 10**9
"""Bytes from which host memory is worth a word."""


def figures(found: Prediction, *, marked: bool = True) -> str:
    """'40.1 of 85.1 GB (close to the limit) and 128 GB of host memory per node, about 1,200 tokens/s a GPU'.

    Speed only of what fits. `marked`: say where it fits only closely.
    """
    verdict, host = found.verdict, found.host_bytes_per_node
    mark = MARKS.get(verdict.said, "") if verdict and marked else ""
    on_host = f" and {host / 1e9:,.0f} GB of host memory per node" if host > ON_HOST else ""
    is_timed = verdict is not None and verdict.fits and found.speed is not None
    speed = f", about {about(found.tokens_per_second_per_gpu)} tokens/s a GPU" if is_timed else ""
    speed += _updated_on_host(found) if is_timed else ""
    if not found.needed_between:
        held = f"model states take {gigabytes(found.held_beside_activations)}"
        return f"{held} of {gigabytes(found.there_bytes)} GB{on_host}, activations are not predicted"
    return f"{between(found.needed_between)} of {gigabytes(found.there_bytes)} GB{mark}{on_host}{speed}"


HOST_UPDATE_SHARE = 0.01
"""Of a step, from which the host's update is worth a word."""


def _updated_on_host(found: Prediction) -> str:
    """' at 4,096 tokens a step, of which the host's update takes 95 %'; empty: the device updates.

    The host updates once a step, however many tokens that has: without their number the rate says nothing.
    """
    speed, scenario = found.speed, found.scenario
    share = speed.host_update_share if speed else 0.0
    if speed is None or scenario is None or share < HOST_UPDATE_SHARE:
        return ""
    tokens = round(speed.tokens_per_second_per_gpu * speed.step_seconds * scenario.world_size)
    return f" at {tokens:,} tokens a step, of which the host's update takes {percent(share)}"


def if_joined(scenario: Scenario | None) -> str:
    """', if nodes are joined by NDR400 (--fabric)' where several are and nobody says how; else nothing."""
    if scenario is None or scenario.nodes == 1 or not (scenario.fabric and scenario.fabric.assumed):
        return ""
    return f", if nodes are joined by {scenario.fabric.name} (--fabric)"
