from harness.report.pictures.trade_off import pareto


def test_front_holds_what_no_other_beats_in_both() -> None:
    points = [(3.0, 30.0), (1.0, 10.0), (2.0, 5.0), (2.5, 20.0), (4.0, 25.0)]
    assert pareto(points) == [1, 3, 0]


def test_of_equal_memory_only_the_faster_is_on_the_front() -> None:
    assert pareto([(1.0, 5.0), (1.0, 6.0)]) == [1]


def test_of_equal_points_one_stands_for_both() -> None:
    assert len(pareto([(1.0, 5.0), (1.0, 5.0)])) == 1
