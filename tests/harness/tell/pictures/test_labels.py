"""Names next to points and line ends do not cover each other."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from harness.tell.pictures.curves import LINE, along, beside, spread


@given(st.lists(st.floats(0, 300), max_size=20))
def test_names_at_line_ends_keep_their_order_and_distance(places: list[float]) -> None:
    found = spread(places, 0, 300)
    in_order = [found[index] for index in sorted(range(len(places)), key=lambda i: places[i])]
    assert all(above + LINE <= below + 1e-6 for above, below in pairwise(in_order))
    assert len(places) < 2 or max(found) <= max(300, LINE * (len(places) - 1)) + 1e-6


def test_a_name_with_room_stays_where_its_line_ends() -> None:
    assert spread([10.0, 100.0, 200.0], 0, 300) == [10.0, 100.0, 200.0]


def test_two_names_at_one_place_share_the_way() -> None:
    assert spread([100.0, 100.0], 0, 300) == [100 - LINE / 2, 100 + LINE / 2]


def test_names_of_near_points_cover_neither_each_other_nor_a_point() -> None:
    points = [(100.0, 100.0), (104.0, 101.0), (108.0, 99.0), (300.0, 40.0)]
    boxes = beside(points, ["first", "second", "third", "alone"], 600, 360)
    for index, box in enumerate(boxes):
        assert not any(box.covers(other) for other in boxes[:index])
        assert not any(box.holds(point) for point in points)


def test_names_stay_within_the_panel() -> None:
    (box,) = beside([(590.0, 5.0)], ["a long name at the edge"], 600, 360)
    assert box.left + box.width <= 600


def test_a_name_leaves_a_line_free() -> None:
    line = along([(0.0, 100.0), (600.0, 100.0)])
    (box,) = beside([(300.0, 100.0)], ["zero3"], 600, 360, line)
    assert not any(box.holds(point) for point in line)
