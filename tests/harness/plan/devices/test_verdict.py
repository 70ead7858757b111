"""Whether memory fits, in one word and in one line."""

import pytest

from harness.plan.devices.limits import MemoryVerdict

GB = 10**9


@pytest.mark.parametrize(
    ("needed", "answer", "text"),
    [
        (40 * GB, "fits", "fits, 40.0 GB left"),
        (72 * GB, "fits", "fits, 8.0 GB left"),
        (72 * GB + 1, "close", "close, 8.0 GB left"),
        (80 * GB, "close", "close, 0.0 GB left"),
        (80 * GB + 1, "does not fit", "cannot fit: 80.0 GB of 80.0"),
        (131 * GB, "does not fit", "cannot fit: 131 GB of 80.0"),
    ],
)
def test_the_answer_follows_from_the_margin(needed: int, answer: str, text: str) -> None:
    verdict = MemoryVerdict(needed_bytes=needed, device_bytes=80 * GB)
    assert (verdict.answer, verdict.text, verdict.fits) == (answer, text, answer != "does not fit")
