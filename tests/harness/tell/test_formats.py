from collections.abc import Callable

import pytest

from harness.tell.formats import markdown_text, megabytes, milliseconds, number, scientific


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (0, "0"), (1234567, "1,234,567"), (100, "100"), (99.94, "99.9"), (12.34, "12.3"),
        (1.005, "1.00"), (9.876, "9.88"), (0.1234, "0.123"), (-12.34, "-12.3"), (0.00001, "1e-05"),
    ],
)  # fmt: skip
def test_numbers_keep_three_places(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (megabytes, 1_500_000, "1.50"), (megabytes, None, "n/a"), (milliseconds, 0.25, "250"),
        (milliseconds, None, "n/a"), (scientific, 1.234e-7, "1.2e-07"), (scientific, 0.0, "0"),
        (scientific, None, "n/a"),
    ],
)  # fmt: skip
def test_units_are_megabytes_milliseconds_and_two_places_with_exponent(
    show: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert show(value) == text


def test_markdown_is_made_harmless() -> None:
    assert markdown_text("a|b `c` <d> [e]\n*f* _g_ #h \\") == (
        "a\\|b \\`c\\` &lt;d&gt; \\[e\\] \\*f\\* \\_g\\_ \\#h \\\\"
    )
