from harness.report.pictures.trade_off import label_shifts


def test_labels_of_near_points_do_not_cover_each_other() -> None:
    labels = [((0.0, 0.0), "9"), ((3.0, 2.0), "10"), ((6.0, 1.0), "11"), ((90.0, 50.0), "1")]
    shifts = label_shifts(labels)
    assert shifts[-1] == shifts[0]
    boxes = [(x + dx, y + dy, 4 * len(t)) for ((x, y), t), (dx, dy) in zip(labels, shifts, strict=True)]
    for i, (x, y, width) in enumerate(boxes):
        for left, low, other in boxes[:i]:
            assert x + width <= left or left + other <= x or abs(y - low) >= 8
