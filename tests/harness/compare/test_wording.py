import pytest

from harness.compare.effective import SETTINGS
from harness.compare.wording import both, differs, percent, words

SEVERAL = {
    "optimizer constants", "parameters without optimizer", "frozen parameters", "most bytes of a reduction",
    "wrap units",
}  # fmt: skip


def test_every_setting_has_the_verb_of_its_number() -> None:
    told = {setting.name: differs(setting.name).rpartition(" ")[2] for setting in SETTINGS}
    assert told == {name: "differ" if name in SEVERAL else "differs" for name in told}
    assert told.keys() >= SEVERAL


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("initial weights", "differ"),
        ("samples of step 3", "differ"),
        ("number of steps", "differs"),
        ("optimizer steps", "differ"),
        ("learning rate of step 2", "differs"),
        ("training.steps", "differs"),
        ("target_tokens of step 1", "differs"),
        ("loss", "differs"),
    ],
)
def test_fields_of_a_job_too(field: str, told: str) -> None:
    assert differs(field) == f"{field} {told}"


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
        ("a" * 64, "a" * 12),
    ],
)
def test_values_are_told_in_words(value: object, told: str) -> None:
    assert words(value) == told


def test_of_constants_only_those_that_differ_are_told() -> None:
    left = [
        "betas [0.9, 0.95], eps 1e-08, weight_decay 0.0",
        "betas [0.9, 0.95], eps 1e-08, weight_decay 0.1",
    ]
    right = [text.replace("0.95", "0.999") for text in left]
    assert both(right, left) == ("betas [0.9, 0.999]", "betas [0.9, 0.95]")
    everywhere = [left[1]]
    assert both(everywhere, left) == ("weight_decay 0.1", "weight_decay 0.0 and 0.1")


def test_values_that_would_read_alike_are_told_in_full() -> None:
    assert both(0.0010000001, 0.001) == ("0.0010000001", "0.001")
    assert both("a" * 12 + "b" * 52, "a" * 64) == ("a" * 12 + "b" * 52, "a" * 64)


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.19, "19 %"),
        (8.6e-5, "0.0086 %"),
        (1.2e-6, "0.00012 %"),
        (2e-4, "0.020 %"),
        (0.0996, "10 %"),
        (0.0999, "10 %"),
        (1.0, "100 %"),
        (12.34, "1,200 %"),
        (0.0, "0 %"),
        (1e6, "1e+08 %"),
        (float("inf"), "inf %"),
    ],
)
def test_a_relative_difference_is_percent_with_two_digits(share: float, told: str) -> None:
    assert percent(share) == told
