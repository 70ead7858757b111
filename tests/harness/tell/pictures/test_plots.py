"""What pictures show of comparisons, and how they place it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.record import MemoryPart, Record
from harness.tell.document import Picture
from harness.tell.pictures import plots
from harness.tell.pictures.drawing import LINE, along, beside, draw, spread
from tests.harness.tell.cells import compared, made, of_size, rows_of, texts, timed, with_world
from tests.records import LOSSES, make_ranks, make_record, make_steps

GOLDEN = Path(__file__).parents[3] / "golden" / "pictures.json"
KINDS = {"weights": 10**6, "gradients": 10**6, "optimizer": 2 * 10**6, "activations": 10**5}
NEAR = [loss + 1e-7 for loss in LOSSES]
FAR = [loss + 0.25 for loss in LOSSES]


def held(limit: int | None = None, kinds: dict[str, int] | None = KINDS) -> Record:
    moment = MemoryPart(
        step=3, moment="after_backward", allocated_bytes=5 * 10**6, peak_bytes=10**7, kinds=kinds
    )
    return with_world(
        make_record(label="ddp", ranks=make_ranks(2, memory=[[moment]] * 2)), memory_limit_bytes=limit
    )


def diverged(label: str, **changes: object):  # type: ignore[no-untyped-def]
    return make_record(label=label, steps=make_steps(FAR), **changes)


def drifting(label: str, seconds: float, slower: float) -> list[Record]:
    """The machine drifts by far more than the cells differ."""
    return [timed(label, seconds * (1 + n) * (1 + slower * n), repeat=n) for n in range(7)]


SPEEDS = ("throughput", "trade-off")
DRAWN = {
    "memory": plots.memory_picture, "volume": plots.volume_picture, "loss": plots.loss_picture,
    "throughput": plots.throughput_picture, "trade-off": plots.trade_off_picture,
    "strong": lambda comparison: plots.strong_picture(strong_scaling(comparison)),
    "weak": lambda comparison: plots.weak_picture(weak_scaling(comparison)),
}  # fmt: skip
COMPARISONS: dict[str, tuple[tuple[str, ...], list[Record]]] = {
    "a limit near the peak": (("memory",), [held(20 * 10**6)]),
    "a limit far from the peak": (("memory",), [held(10**9)]),
    "no kinds of memory and no limit": (("memory",), [held(kinds=None)]),
    "losses that agree": (("loss",), [make_record(label="fsdp", steps=make_steps(NEAR))]),
    "losses that diverge": (
        ("loss",), [make_record(label="fsdp", steps=make_steps(NEAR)), diverged("ddp")],
    ),
    "memory far beyond the others": (
        ("memory", "trade-off"),
        [of_size(label, peak * 10**6) for label, peak in (("ddp", 40), ("fsdp", 30), ("zero3", 2000))],
    ),
    "traffic": (("volume",), [of_size("ddp", 10**6, sent=4000), of_size("zero1", 10**6, sent=6000)]),
    "without ddp": (SPEEDS, [timed("fsdp", 0.5), timed("zero3", 1.0)]),
    "ddp alone": (SPEEDS, [timed("ddp", 0.5)]),
    "no round in common": (SPEEDS, [timed("ddp", 0.5), timed("zero3", 1.0, repeat=1)]),
    "one round": (SPEEDS, [
        timed("zero3", 1.0), timed("ddp", 0.5), timed("fsdp", 0.4),
        timed("ddp", 1.0, 4), timed("fsdp", 1.0, 4),
    ]),
    "rounds of a machine that drifts": (SPEEDS, [*drifting("ddp", 0.5, 0), *drifting("fsdp", 1.0, 0.01)]),
    "rounds that differ by more than the cells": (SPEEDS, [
        timed(label, seconds, repeat=n)
        for label, of_rounds in (("ddp", (1.0, 1.0, 4.0)), ("fsdp", (1.25, 1.5, 5.0)))
        for n, seconds in enumerate(of_rounds)
    ]),
    "a frontier": (("trade-off",), [
        timed(label, seconds + n / 1000, repeat=n, ranks=of_size(label, peak).ranks)
        for label, seconds, peak in (("fsdp", 1.0, 10**6), ("ddp", 0.5, 2 * 10**6), ("zero3", 1.0, 3 * 10**6))
        for n in range(6)
    ]),
    "more ranks": (("strong",), [
        *(timed("zero1", seconds, size) for size, seconds in ((1, 0.5), (2, 0.25), (4, 0.2))),
        *(timed(label, seconds / size * (1 + 0.02 * repeat * (size - 1)), size, repeat=repeat)
          for label, size in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2))
          for repeat, seconds in enumerate((0.5, 0.6, 0.4, 0.7, 0.5, 0.6, 0.45))),
    ]),
    "more ranks with more work": (("weak",), [
        timed("ddp", 0.5, 1, job_id="a" * 12),
        timed("ddp", 0.625, 2, job_id="b" * 12, training={"global_batch_size": 16}),
    ]),
}  # fmt: skip


LOOKS = ("colour", "opacity", "dash", "shape")
PLACED = ("beside", "leader_x", "leader_y", "label_x", "label_y", "losses_label", "differences_label")
"""Where names and lines stand: the tests below check that."""


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(rounded, value)]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_pictures_are_the_golden_ones(update_golden: bool) -> None:
    """Data, alternative text and caption of each; what a row says of itself stands in its picture."""
    lines: list[Any] = []
    for name, (keys, records) in COMPARISONS.items():
        for key in keys:
            picture = DRAWN[key](compared(*records))
            rows = [] if picture is None else rows_of(picture)
            said = set(texts(picture)) if picture else set()
            assert {row[field] for row in rows for field in ("text", "label") if row.get(field)} <= said
            lines.append([name, key, picture and picture.alt, picture and picture.caption])
            lines.append(sorted(text for text in said if " " in text))
            lines += [
                {
                    field: rounded(value)
                    for field, value in row.items()
                    if value is not None and field not in (*PLACED, *LOOKS)
                }
                for row in rows
            ]
    text = "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"
    if update_golden:
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_an_alternative_text_names_both_ends_of_a_long_list() -> None:
    rows = [{"place": "2 ranks", "name": f"cell{n}", "text": f"{n} %"} for n in range(20)]
    text = plots.told(rows)
    assert text.startswith("2 ranks: cell0 0 %, cell1 1 %")
    assert text.endswith("..., cell19 19 %")
    assert text.count("cell") == plots.MOST_TOLD


SIZES = (2, 4)
BARS = (plots.throughput_picture, plots.memory_picture, plots.volume_picture)


@pytest.fixture(scope="module")
def many() -> Comparison:
    labels = ["ddp", *(f"zero1:bucket={number}" for number in range(plots.MOST_CELLS - 1))]
    return Comparison(
        [
            make_record(label=label, world_size=size, run_id=f"{label}-{size}")
            for label in labels
            for size in SIZES
        ]
    )


@pytest.mark.parametrize("make", BARS)
def test_of_too_many_cells_those_of_one_size_are_drawn(many: Comparison, make) -> None:  # type: ignore[no-untyped-def]
    picture = make(many)
    assert isinstance(picture, Picture)
    (size,) = {row["ranks"] for row in rows_of(picture)}
    (other,) = {*SIZES} - {size}
    assert f">{other} ranks<" not in draw(picture).decode()
    assert f" cells, on {size} ranks" in picture.caption


@given(st.lists(st.floats(0, 300), max_size=20))
def test_names_at_line_ends_keep_their_order_and_distance(places: list[float]) -> None:
    found = spread(places, 0, 300)
    in_order = [found[index] for index in sorted(range(len(places)), key=lambda i: places[i])]
    assert all(above + LINE <= below + 1e-6 for above, below in pairwise(in_order))
    assert len(places) < 2 or max(found) <= max(300, LINE * (len(places) - 1)) + 1e-6


def test_names_of_near_points_cover_neither_each_other_nor_a_point_nor_a_line_nor_leave_the_panel() -> None:
    points = [(100.0, 100.0), (104.0, 101.0), (108.0, 99.0), (300.0, 40.0)]
    boxes = beside(points, ["first", "second", "third", "alone"], 600, 360)
    for index, box in enumerate(boxes):
        assert not any(box.covers(other) for other in boxes[:index])
        assert not any(box.holds(point) for point in points)
    (box,) = beside([(590.0, 5.0)], ["a long name at the edge"], 600, 360)
    assert box.left + box.width <= 600
    line = along([(0.0, 100.0), (600.0, 100.0)])
    (box,) = beside([(300.0, 100.0)], ["zero3"], 600, 360, line)
    assert not any(box.holds(point) for point in line)


def test_cells_that_agree_are_counted_and_those_that_diverged_are_named() -> None:
    agreeing = make_record(label="fsdp", steps=make_steps(NEAR))
    picture = made(plots.loss_picture(compared(agreeing, diverged("ddp"))))
    shown = texts(picture)
    assert [text for text in shown if text in "123"] == [*"123", *"123"], "each tick stands once"
    assert "1 cell agrees" in shown
    assert shown.count("ddp on 2 diverged") == 2
    assert "'nats per token, log beyond limit'" in str(picture.chart())


def test_of_many_outliers_the_furthest_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, plots.MOST_OUTLIERS + 4)]
    picture = made(plots.loss_picture(compared(*map(diverged, labels))))
    assert len(rows_of(picture)) == 1 + plots.MOST_OUTLIERS
    assert f"Drawn: {1 + plots.MOST_OUTLIERS} of {1 + len(labels)} cells" in picture.caption


def test_of_many_steps_some_are_drawn_first_and_last_among_them() -> None:
    losses = [5.0 - step / 1000 for step in range(1001)]
    steps = make_steps(losses, [1.0] * len(losses))
    (row,) = rows_of(plots.loss_picture(compared().of_rows(compared(make_record(steps=steps)).rows[1:])))
    assert (row["steps"][0], row["steps"][-1]) == (0, 1000)
    assert len(row["steps"]) <= plots.MOST_STEPS + 1


def test_each_job_has_panels_of_its_own() -> None:
    other = {"job_id": "f" * 12}
    jobs = compared(
        diverged("ddp"), make_record(run_id="b", **other), make_record(label="ddp", world_size=4, **other)
    )
    shown = texts(plots.loss_picture(jobs))
    assert "2 ranks, job 012345" in shown
    assert "4 ranks, job ffffff" in shown


def test_more_than_eight_curves_get_a_panel_for_each_family() -> None:
    labels = ["ddp", *(f"zero{n}" for n in range(4)), "fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op"]
    runs = [timed(label, 1 / size, size) for label in labels for size in (1, 2)]
    assert len(labels) > plots.MOST_IN_ONE
    shown = texts(plots.strong_picture(strong_scaling(compared(*runs))))
    assert [text for text in shown if text in ("DDP", "ZeRO", "FSDP2", "FSDP1")] == [
        "DDP", "ZeRO", "FSDP2", "FSDP1",
    ]  # fmt: skip
    assert all(any(text.startswith(f"{label} ") for text in shown) for label in labels)


def test_intervals_stand_beside_their_points() -> None:
    picture = DRAWN["strong"](compared(*COMPARISONS["more ranks"][1]))
    drawn = [row for row in rows_of(picture) if row["low"] is not None]
    assert len({row["beside"] for row in drawn}) == len(drawn) == 2


def test_of_many_cells_the_fastest_are_drawn_and_the_caption_says_so() -> None:
    runs = [timed(f"zero3:reduce_bucket_size={n}", 0.5 + n / 100) for n in range(1, plots.MOST_CELLS + 6)]
    picture = made(plots.trade_off_picture(compared(*runs)))
    assert len(rows_of(picture)) == plots.MOST_CELLS
    assert max(row["tokens_per_second"] for row in rows_of(picture)) == 1024 / 0.51
    assert f"Drawn: {plots.MOST_CELLS} of {plots.MOST_CELLS + 5} cells" in picture.caption


def test_jobs_are_named_only_where_one_number_of_ranks_has_several() -> None:
    groups = compared(timed("ddp", 0.5), timed("fsdp", 0.5, job_id="f" * 12)).groups
    places = [plots.cell_row(group, groups)["place"] for group in groups]
    assert places == ["1 rank", "2 ranks, job 012345", "2 ranks, job ffffff"]


def test_of_many_cells_those_of_one_world_size_are_drawn_and_the_caption_says_so() -> None:
    labels = [f"zero3:reduce_bucket_size={n}" for n in range(1, plots.MOST_CELLS)]
    groups = compared(*(timed(label, 0.5, size) for label in labels for size in (2, 4))).groups
    drawn = plots.drawable(groups)
    assert {group.world_size for group in drawn} == {4}
    assert "Drawn: 23 of 47 cells, on 4 ranks" in plots.caption("", drawn, groups)
