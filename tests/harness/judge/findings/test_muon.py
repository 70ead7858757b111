import pytest

from harness.judge.comparison import Comparison
from harness.record import ObservedPart
from tests.records import make_record


def messages(parts: int | None) -> list[str]:
    records = [
        make_record(label=label, observed=ObservedPart(matrices_in_parts=parts if label == "fsdp" else 0))
        for label in ("single", "fsdp")
    ]
    return [f.message for f in Comparison(records).findings if f.id == "muon-on-parts"]


def test_matrices_in_parts_are_named() -> None:
    (message,) = messages(14)
    assert message.startswith("fsdp on 2 ranks: no optimizer keeps the complete momentum of 14 matrices")


@pytest.mark.parametrize("parts", [0, None])
def test_whole_matrices_are_not(parts: int | None) -> None:
    assert messages(parts) == []
