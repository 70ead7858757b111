"""Multiplies the events of a small real run to those of one with more ranks and steps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.run_directory.request import RunRequest, rank_file

Event = dict[str, Any]
SECONDS = ("seconds", "data_seconds", "phase_seconds")
HASHES = ("sample_hashes", "batch_hash_sum")


def scale_run(source: Path, target: Path, ranks: int, steps: int) -> RunRequest:
    """Write the event files of `ranks` ranks and `steps` steps to the folder `target`; returns their request.

    Every rank repeats the events of a rank of the run in `source`. Durations, losses and hashes get values of
    their own, at full precision; what all ranks of that run agree on stays equal.
    """
    request = RunRequest.read(source)
    rows = [_events(source, rank) for rank in range(request.world_size)]
    chance = random.Random(0)
    norms = [chance.uniform(0.5, 2.0) for _ in range(steps)]
    for rank in range(ranks):
        own = rows[rank % len(rows)]
        lines = (
            json.dumps(event, separators=(",", ":")) for event in _scaled(own, rank, ranks, norms, chance)
        )
        rank_file(target, rank).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return request.model_copy(update={"world_size": ranks, "ranks_per_node": ranks})


def _events(source: Path, rank: int) -> list[Event]:
    return [json.loads(line) for line in rank_file(source, rank).read_text(encoding="utf-8").splitlines()]


def _scaled(
    events: Sequence[Event], rank: int, ranks: int, norms: Sequence[float], chance: random.Random
) -> Iterator[Event]:
    given = [event for event in events if event["kind"] == "step"]
    left = False
    for event in events:
        if event["kind"] == "measured":
            group = {"rank": rank, "group_ranks": list(range(ranks)), "group_size": ranks}
            yield event | {"communication": [row | group for row in event["communication"]]}
        elif event["kind"] != "step":
            yield event | {name: rank for name in ("rank",) if name in event}
        elif not left:
            left = True
            for step, norm in enumerate(norms):
                yield _step(given[min(step, len(given) - 1)], step, norm, chance)


def _step(event: Event, step: int, norm: float, chance: random.Random) -> Event:
    own = event | {"step": step, "gradient_norm": norm}
    own |= {name: _varied(event[name], chance) for name in SECONDS}
    own |= {name: f"{chance.getrandbits(64):016x}" for name in HASHES if event[name] is not None}
    loss = event["loss_sum"] * chance.uniform(0.9, 1.1)
    return own | {
        "loss_sum": loss,
        "computed_loss_sum": loss if event["computed_loss_sum"] is not None else None,
    }


def _varied(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        return {name: _varied(own, chance) for name, own in value.items()}
    return value * chance.uniform(0.9, 1.1)
