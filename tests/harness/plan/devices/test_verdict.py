"""Whether memory fits, in one word."""

import pytest

from harness.plan.limits import MemoryVerdict

GB = 10**9


@pytest.mark.parametrize(
    ("needed", "answer", "said"),
    [
        (40 * GB, "fits", "fits"),
        (72 * GB, "fits", "fits"),
        (72 * GB + 1, "close", "close"),
        (8 * 98 * GB // 10 + 1, "close", "barely fits"),
        (80 * GB, "close", "barely fits"),
        (80 * GB + 1, "does not fit", "does not fit"),
    ],
)
def test_the_answer_follows_from_the_margin(needed: int, answer: str, said: str) -> None:
    verdict = MemoryVerdict(needed_bytes=needed, device_bytes=80 * GB)
    assert (verdict.answer, verdict.said, verdict.fits) == (answer, said, answer != "does not fit")
    assert verdict.is_roomy == (said in ("fits", "close"))
