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


def test_bytes_are_shown_as_decimal_megabytes() -> None:
    assert megabytes(1_500_000) == "1.50"
    assert megabytes(None) == "n/a"


def test_seconds_are_shown_as_milliseconds() -> None:
    assert milliseconds(0.25) == "250"
    assert milliseconds(None) == "n/a"


def test_differences_have_two_places_and_an_exponent() -> None:
    assert scientific(1.234e-7) == "1.2e-07"
    assert scientific(0.0) == "0"
    assert scientific(None) == "n/a"


def test_markdown_is_made_harmless() -> None:
    assert markdown_text("a|b `c` <d> [e]\n*f* _g_ #h \\") == (
        "a\\|b \\`c\\` &lt;d&gt; \\[e\\] \\*f\\* \\_g\\_ \\#h \\\\"
    )
