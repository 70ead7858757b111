"""Strategies by kinds, counts, sizes and order of collectives; what does not agree is not named."""

from pathlib import Path
from typing import Any

import pytest

from harness.traces.strategy import Likeness, likeness_of
from tests.harness.traces.test_scanning import event, one, said, written

NAMES = {
    "gather": "_allgather_base",
    "scatter": "_reduce_scatter_base",
    "reduce": "allreduce",
    "exchange": "all_to_all",
    "send": "send",
}
Moves = list[tuple[str, int]]
"""Collectives of a step in order, with the elements of the complete tensor."""
RANKS = 8


def looks_like(steps: list[Moves], folder: Path, style: str = "") -> Likeness:
    events: list[Any] = [event("user_annotation", style, 0, 1, tid=1, pid=9)] if style else []
    for number, moves in enumerate(steps):
        begin = 10_000 * number
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, 9_000, tid=1, pid=9))
        for place, (kind, elements) in enumerate(moves):
            given, taken = (elements // RANKS, elements) if kind == "gather" else (elements, elements)
            told = said(NAMES[kind], given, taken, RANKS)
            events.append(
                event("cpu_op", "record_param_comms", begin + 10 + 10 * place, 5, tid=1, pid=9, **told)
            )
    return likeness_of(one(written(folder, events, distributedInfo={"rank": 0, "world_size": RANKS})))


UNITS = [8000, 4000, 4000, 4000, 1600]
AHEAD: Moves = [("gather", n) for n in UNITS]
BACK: Moves = [move for n in UNITS[::-1] for move in (("gather", n), ("scatter", n))]
KEPT: Moves = [("scatter", n) for n in UNITS[::-1]]
SHARDS: Moves = [
    move for n in UNITS[::-1] for move in (("gather", n), ("scatter", n), ("reduce", n // RANKS))
]
PARAMETERS: Moves = [("gather", 80 * n) for n in range(1, 24)]
BUCKETS: Moves = [("reduce", n) for n in (7000, 10_000, 4600)]
SEQUENCE: Moves = [("gather", 6400), ("scatter", 6400)] * 16
FULL, GRAD_OP = "ZeRO-3 or FSDP full shard", "weights kept gathered after the forward pass"
NAMED: dict[str, tuple[list[Moves], str, str]] = {
    "FSDP2": ([AHEAD + BACK] * 3, "FSDP::pre_forward", "FSDP2 full shard"),
    "FSDP1": ([AHEAD + BACK[1:]] * 2, "FullyShardedDataParallel.forward", "FSDP1 full shard"),
    "FSDP without annotations": ([AHEAD + BACK], "", FULL),
    "FSDP, four micro-steps": ([(AHEAD + BACK) * 4] * 2, "", FULL),
    "FSDP, the recording begins within a step": (
        [BACK[4:], AHEAD + BACK, AHEAD + BACK],
        "FSDP::x",
        "FSDP2 full shard",
    ),
    "without annotations, the recording begins within a step": (
        [BACK[4:], AHEAD + BACK, AHEAD + BACK],
        "",
        FULL,
    ),
    "FSDP1 whose largest unit is not gathered again": (
        [
            [("gather", n) for n in (8000, 4000, 4000)]
            + [("scatter", 4000), ("gather", 4000), ("scatter", 4000), ("scatter", 8000)]
        ]
        * 2,
        "_FSDP.x",
        "FSDP1 full shard",
    ),
    "ZeRO-3": ([PARAMETERS + PARAMETERS[::-1] + [("scatter", 12_000), ("scatter", 10_080)]], "", FULL),
    "weights kept": ([AHEAD + KEPT] * 2, "", f"FSDP or ZeRO-3 with {GRAD_OP}, or ZeRO-1 or ZeRO-2"),
    "weights kept, FSDP2": ([AHEAD + KEPT] * 2, "FSDP::pre_forward", f"FSDP2, {GRAD_OP}"),
    "hybrid": (
        [AHEAD + SHARDS],
        "FSDP::x",
        "hybrid sharding (FSDP2 full shard, and its shards all-reduced over replicas)",
    ),
    "ZeRO-1": (
        [[*BUCKETS, ("gather", 21_600)]] * 2,
        "",
        "ZeRO-1 or ZeRO-2 as DeepSpeed does them: gradients all-reduced, updated weights gathered",
    ),
    "ZeRO-2": (
        [[*KEPT, ("gather", 21_600)]] * 2,
        "",
        "ZeRO-1 or ZeRO-2 that scatter gradients, and gather updated weights",
    ),
    "DDP": ([BUCKETS] * 3, "DistributedDataParallel.forward", "DDP"),
    "DDP without annotations, buckets built anew": (
        [BUCKETS, BUCKETS[::-1], [("reduce", 21_600)]],
        "",
        "DDP, or ZeRO-0",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_strategy_is_named_where_its_collectives_agree(case: str, tmp_path: Path) -> None:
    steps, style, name = NAMED[case]
    assert looks_like(steps, tmp_path, style).strategy == name


NONE: dict[str, tuple[list[Moves], str]] = {
    "parts of sequences": ([SEQUENCE] * 2, "scattered before weights are gathered"),
    "parts of sequences of two sizes": (
        [SEQUENCE + [("gather", 1600), ("scatter", 1600)] * 9] * 2,
        "scattered before",
    ),
    "more gathered than any pass needs": (
        [[("gather", 999)] * 90 + KEPT],
        "not the sizes of what is gathered",
    ),
    "activations of other lengths in each step": (
        [[("reduce", 100 * n)] * 3 for n in (64, 1, 7)],
        "different numbers",
    ),
    "exchanges alone": ([[("exchange", 9000)] * 8], "no one strategy"),
    "gathers alone": ([AHEAD], "no one strategy"),
}


@pytest.mark.parametrize("case", NONE)
def test_what_does_not_agree_is_not_named_and_why(case: str, tmp_path: Path) -> None:
    steps, why = NONE[case]
    like = looks_like(steps, tmp_path)
    assert (like.strategy, like.expected_bytes) == (None, None)
    assert why in like.evidence[-1]


EXPERTS: Moves = [("exchange", 2500)] * 4
LEFT: dict[str, tuple[list[Moves], str, str, str]] = {
    "DDP and experts": (
        [EXPERTS + BUCKETS] * 2,
        "DistributedDataParallel.x",
        "DDP",
        "all-to-all of 40,000 bytes per step",
    ),
    "FSDP and experts": (
        [AHEAD + EXPERTS + BACK] * 2,
        "FSDP::x",
        "FSDP2 full shard",
        "all-to-all of 40,000 bytes per step",
    ),
    "FSDP and tensor parallelism": (
        [AHEAD + [("reduce", 3000)] * 4 + BACK],
        "FSDP::x",
        "FSDP2 full shard",
        "all-reduce of 48,000 bytes per step",
    ),
    "DDP and a large gather": (
        [[*BUCKETS, ("gather", 64_000)]],
        "",
        "DDP, or ZeRO-0",
        "all-gather of 256,000 bytes per step",
    ),
    "DDP and a gather ahead of it": (
        [[("gather", 21_600), *BUCKETS]],
        "",
        "DDP, or ZeRO-0",
        "all-gather of 86,400 bytes per step",
    ),
    "DDP between pipeline stages": (
        [[("send", 9000)] * 2 + BUCKETS],
        "",
        "DDP, or ZeRO-0",
        "send of 72,000 bytes per step",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_a_strategy_does_not_explain_is_said_next_to_it(case: str, tmp_path: Path) -> None:
    steps, style, name, left = LEFT[case]
    like = looks_like(steps, tmp_path, style)
    assert like.strategy == f"{name}, and {left} that it does not explain"
    assert like.expected_bytes is None
