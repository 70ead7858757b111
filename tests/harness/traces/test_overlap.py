"""Interval arithmetic of traced steps, against a second method that looks at every nanosecond."""

import random

import pytest

from harness.traces.device import Interval, cut, division, subtract, union
from harness.traces.scanning import Communication, Operator, RankActivity, computing_stretches, divide


def talk(start: int, end: int, name: str = "all_reduce", phase: str = "backward") -> Communication:
    return Communication(name=name, phase=phase, start=start, end=end)


def test_the_ten_longest_waits_come_longest_first() -> None:
    # Collectives of 1 to 12 ns with a gap after each.
    starts = [sum(range(1, n)) + n for n in range(1, 13)]
    row = divide(0, (0, 200), RankActivity([], [talk(s, s + n, f"c{n}") for n, s in enumerate(starts, 1)]))
    assert [wait["name"] for wait in row["waits"]] == [f"c{n}" for n in range(12, 2, -1)]


def test_a_wait_is_named_for_the_collective_that_covers_most_of_it() -> None:
    row = divide(
        0, (0, 20), RankActivity([(0, 5)], [talk(0, 8, "short", "forward"), talk(4, 20, "long", "step")])
    )
    (wait,) = row["waits"]
    assert (wait["name"], wait["phase"]) == ("long", "step")
    assert wait["seconds"] * 1e9 == pytest.approx(15)


def points(intervals: list[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@pytest.mark.parametrize("seed", range(50))
def test_random_intervals_divide_as_counted_point_by_point(seed: int) -> None:
    draw = random.Random(seed)

    def some(most: int) -> list[Interval]:
        starts = [draw.randrange(-20, 120) for _ in range(draw.randrange(most))]
        return [(start, start + draw.randrange(0, 30)) for start in starts]

    busy, talking, copies = some(8), some(8), some(8)
    communications = [talk(*interval) for interval in talking]
    row = divide(0, (0, 100), RankActivity(busy, communications, copies))
    step = points([(0, 100)])
    computing, communicating, copying = (points(some) & step for some in (busy, talking, copies))
    expected = {
        "seconds": 100,
        "compute_seconds": len(computing),
        "communication_seconds": len(communicating),
        "exposed_seconds": len(communicating - computing),
        "copy_seconds": len(copying),
        "idle_seconds": len(step - communicating - computing - copying),
    }
    assert {key: row[key] * 1e9 for key in expected} == pytest.approx(expected)
    assert divide(0, (0, 100), RankActivity(busy, communications))["copy_seconds"] is None


def test_what_ends_or_begins_at_the_edge_of_a_window_is_not_in_it() -> None:
    every = union((at, at + 4) for at in range(0, 100_000, 10))
    assert division(every, every, every)((50_002, 50_034))["compute_seconds"] == pytest.approx(14e-9)
    assert cut(every, (50_004, 50_010)).tolist() == []
    assert cut(every, (50_002, 50_011)).tolist() == [[50_002, 50_004], [50_010, 50_011]]


@pytest.mark.parametrize(
    ("intervals", "removed", "left"),
    [
        ([], [(0, 5)], []), ([(0, 5)], [], [[0, 5]]), ([(0, 5), (5, 9)], [(9, 12)], [[0, 9]]),
        ([(0, 9)], [(2, 3), (3, 4)], [[0, 2], [4, 9]]), ([(0, 9)], [(0, 4), (8, 20)], [[4, 8]]),
        ([(0, 2), (4, 6)], [(0, 6)], []), ([(3, 3)], [(0, 1)], []),
    ],
)  # fmt: skip
def test_what_touches_or_is_empty_is_subtracted(
    intervals: list[Interval], removed: list[Interval], left: list[list[int]]
) -> None:
    assert subtract(union(intervals), union(removed)).tolist() == left


def operator(start: int, end: int, computes: bool, thread: int = 1) -> Operator:
    return Operator(thread=thread, start=start, end=end, computes=computes)


def test_only_the_innermost_operator_says_what_a_thread_does() -> None:
    # A hook that waits (20 to 40) within an operator, and an operator (25 to 30) within the hook.
    nested = [operator(0, 50, True), operator(20, 40, False), operator(25, 30, True)]
    assert computing_stretches(nested).tolist() == [[0, 20], [25, 30], [40, 50]]


def test_threads_compute_beside_each_other() -> None:
    both = [operator(0, 10, True), operator(5, 20, True, thread=2), operator(30, 40, False, thread=2)]
    assert computing_stretches(both).tolist() == [[0, 20]]


def test_nothing_within_a_transport_computes() -> None:
    within = [operator(0, 10, True), operator(30, 40, True), operator(70, 80, True)]
    within.append(Operator(1, 20, 60, False, transports=True))
    assert computing_stretches(within).tolist() == [[0, 10], [70, 80]]
