import pytest

from harness.judge.effective import SETTINGS
from harness.judge.wording import Digest, both, differs, percent, words

SEVERAL = {
    "optimizer constants", "parameters without optimizer", "frozen parameters", "most bytes of a reduction",
    "wrap units", "settings of NCCL", "dimensions of the ranks", "deterministic kernels",
}  # fmt: skip


def test_every_setting_has_the_verb_of_its_number() -> None:
    shown = {s.name: differs(s.name, plural=s.plural).rpartition(" ")[2] for s in SETTINGS}
    assert shown == {name: "differ" if name in SEVERAL else "differs" for name in shown}
    assert shown.keys() >= SEVERAL


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "none"),
        (True, "on"),
        (3, "3"),
        (26214400, "26,214,400"),
        (1e-8, "1e-08"),
        (["float32"], "float32"),
        ([], "none"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d, 2 more"),
        (["eps 1, decay 0", "eps 1, decay 1"], "eps 1, decay 0; eps 1, decay 1"),
        ({"0": 1.0, "1": 2.0}, "0 1, 1 2"),
        (Digest("a" * 64), "a" * 12),
        ("a" * 64, "a" * 64),
    ],
)
def test_values_are_told_in_words(value: object, told: str) -> None:
    assert words(value) == told


def test_values_that_would_read_alike_are_told_in_full() -> None:
    assert both(0.0010000001, 0.001) == ("0.0010000001", "0.001")
    assert both(Digest("a" * 12 + "b" * 52), Digest("a" * 64)) == ("a" * 12 + "b" * 52, "a" * 64)


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.19, "19 %"), (8.6e-5, "0.0086 %"), (1.2e-6, "0.00012 %"), (2e-4, "0.020 %"), (0.0996, "10 %"),
        (0.0999, "10 %"), (1.0, "100 %"), (12.34, "1,200 %"), (0.0, "0 %"), (1e6, "1e+08 %"),
        (float("inf"), "inf %"),
    ],
)  # fmt: skip
def test_a_relative_difference_is_percent_with_two_digits(share: float, told: str) -> None:
    assert percent(share) == told
