"""Figures of published traces of GPUs, which their README and another tool give too."""

from collections import Counter
from pathlib import Path

import pytest

from harness.tell.document import Table
from harness.tell.traces import trace_document
from harness.traces.analysis import RankTrace, read_traces, skew_of
from harness.traces.document import changes_of, collective_rows
from harness.traces.strategy import likeness_of

GPU = Path(__file__).parent / "gpu"
PUBLISHED = {
    "a100-resnet50-ddp-2ranks": (115_656, 46_876, 15.61, 2_654, 503_051, 660_551),
    "a100-16ranks-rank0": (210_998, 187_870, 1.36, 47_624, 793_037, 1_231_461),
    "128ranks-rank0": (210_320, 396_199, 14.95, 1_325, 675_191, 1_222_847),
    "128ranks-rank1": (271_973, 379_053, 19.93, 16_504, 651_136, 1_231_186),
    "h200-single": (4_362, 0, 0, 563, 126_106, 131_030),  # our own, by `unions.divided`
    "a100-8ranks": (281_336, 163_535, 46.24, 54_638, 76_007, 464_594),
}
"""Microseconds over all events of the device: compute, communication, overlap in %, copies, idle, span."""


def read(name: str) -> RankTrace:
    (rank,) = read_traces([GPU / f"{name}.json.gz"])
    return rank


@pytest.mark.parametrize("name", PUBLISHED)
def test_time_divides_as_published_to_the_microsecond(name: str) -> None:
    division = read(name).division
    figures = ("compute_seconds", "communication_seconds", "copy_seconds", "idle_seconds", "seconds")
    compute, communication, overlap, copies, idle, span = PUBLISHED[name]
    found = [round((getattr(division, figure) or 0) * 1e6, 1) for figure in figures]
    assert found == pytest.approx([compute, communication, copies, idle, span], abs=1)
    assert 100 * (division.overlap_share or 0) == pytest.approx(overlap, abs=0.005)


def test_buckets_of_ddp_are_every_parameter_of_the_model() -> None:
    rank = read("a100-resnet50-ddp-2ranks")
    rows = {(row["operation"], row["dtype"], row["elements"]): row for row in collective_rows(rank)}
    buckets = [row for row in rows.values() if row["operation"] == "all_reduce"]
    assert sorted(row["elements"] for row in buckets) == [
        2_049_000, 2_431_040, 6_563_840, 6_637_568, 7_875_584,
    ]  # fmt: skip
    assert {(row["calls"], row["group"], row["group_size"]) for row in buckets} == {(3, "0", 2)}
    assert rows["broadcast", "float32", 53_120]["calls"] == rows["broadcast", "int64", 53]["calls"] == 3
    like = likeness_of(rank)
    assert (like.strategy, like.parameters) == ("DDP", 25_557_032)
    assert like.unit_bytes == [4 * n for n in (2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040)]
    # All-reduce of two ranks: 2 (N - 1) / N = 1 times the bytes, over the time of its kernel.
    one = next(call for call in rank.calls if call.elements == 6_637_568)
    assert one.bus_bytes_per_second == pytest.approx(4 * 6_637_568 / (one.seconds or 0))


def test_names_of_kernels_are_no_operations() -> None:
    rank = read("a100-16ranks-rank0")
    counts = Counter(call.operation for call in rank.calls)
    # Five kernels were launched before the profiler began: nothing says for what.
    assert counts == {"all_to_all": 55, "reduce_scatter": 10, "all_gather": 10, "all_reduce": 10, None: 5}
    assert {call.group.name for call in rank.calls} == {None}
    assert {call.group.size for call in rank.calls if call.operation == "all_reduce"} == {None}
    assert {call.group.size for call in rank.calls if call.operation == "reduce_scatter"} == {8}


def test_ranks_that_come_late_are_found_without_clocks() -> None:
    ranks = read_traces([GPU / "128ranks-rank1.json.gz", GPU / "128ranks-rank0.json.gz"])
    assert [rank.rank for rank in ranks] == [0, 1]
    skew = skew_of(ranks)
    assert skew.matched == sum(rank.times_last for rank in skew.ranks) == 2
    assert skew.ranks[1].caused_seconds == pytest.approx(skew.ranks[0].waited_seconds)
    assert skew.ranks[0].waited_seconds == pytest.approx(0.02568, abs=1e-5)


NOT = "that it does not explain"
ANSWERS = {
    "h200-single": "1 rank, NVIDIA H200: computing 5 % of the steps; no communication found; idle 95 %, "
    "mostly host late",
    "a100-resnet50-ddp-2ranks": "1 of 2 ranks, NVIDIA A100-PG509-200, DDP: computing 17 % of the steps; "
    "communication 7 %, 16 % of it hidden, 100 % of its time in all_reduce; idle 76 %, mostly unknown",
    "128ranks-rank1": f"1 of 128 ranks, DDP, and all-gather and all-to-all {NOT}: computing 22 % of the "
    "steps; communication 31 %, 20 % of it hidden, 61 % of its time in all_to_all; idle 53 %, mostly unknown",
    "a100-16ranks-rank0": "1 of 16 ranks, NVIDIA A100-SXM4-80GB, DDP, and reduce-scatter and all-gather "
    f"{NOT}: computing 17 % of the steps; communication 15 %, 1 % of it hidden, 66 % of its time in "
    "all_reduce; idle 64 %, mostly unknown",
}
"""Their copies here have no launches, but the first's."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_first_line_is_the_answer(name: str) -> None:
    ranks = [read(name)]
    assert trace_document(ranks, None, [likeness_of(ranks[0])]).title == ANSWERS[name]


def test_collectives_are_summed_by_operation() -> None:
    rank = read("a100-16ranks-rank0")  # five of its kernels that communicate have no launch
    sections = trace_document([rank], None, [likeness_of(rank)]).sections
    sums = next(one.blocks[0] for one in sections if one.key == "trace_collectives")
    assert isinstance(sums, Table)
    assert sums.texts()[:3] == [
        ["all_reduce", "10", "8,966", "127", "66 %"],
        ["n/a", "5", "n/a", "25.0", "13 %"],
        ["all_gather", "10", "587", "4.78", "3 %"],
    ]


def test_a_trace_compared_with_itself_does_not_change() -> None:
    ranks = [read("a100-8ranks")]
    changes = changes_of(ranks, ranks)
    assert {figure["change"] for figure in changes["figures"]} == {0.0}
    assert changes["kernels"] == []
    said = trace_document(ranks, None, [likeness_of(ranks[0])], changes).title
    assert said.endswith("; median step 76.8 -> 76.8 ms")
