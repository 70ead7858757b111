"""Records of a report with groups of ranks, every kind of parity, a failed cell and a finding."""

from harness.record import BackendPart, ErrorPart, Record
from tests.records import LOSSES, make_record, make_steps, make_weights

SIZES = (2, 4)


def records() -> list[Record]:
    """The reference, and on each number of ranks one cell of each parity."""
    return [make_record(), *(record for size in SIZES for record in _of(size))]


def _of(size: int) -> list[Record]:
    failed = make_record(
        label="fsdp", world_size=size, status="failed", steps=[], ranks=[], comm=[], windows=None,
        initial_weights=None, final_weights=None, run_id=f"fsdp-{size}",
        backend=BackendPart(label="fsdp", name="fsdp"),
        error=ErrorPart(kind="RuntimeError", message="no device", rank=1),
    )  # fmt: skip
    diverged = make_record(
        label="zero1", world_size=size, run_id=f"zero1-{size}", final_weights=make_weights("e" * 64),
        steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0), seconds=0.9),
    )  # fmt: skip
    tight = [
        make_record(
            label=label, world_size=size, run_id=f"{label}-{size}", final_weights=make_weights("c" * 64),
            steps=make_steps([loss + 1e-6 for loss in LOSSES], seconds=seconds / size),
        )
        for label, seconds in (("zero3", 2.4), ("fsdp1", 1.2), ("zero2", 0.8))
    ]  # fmt: skip
    exact = make_record(
        label="ddp", world_size=size, run_id=f"ddp-{size}", steps=make_steps(seconds=1 / size)
    )
    return [failed, diverged, *tight, exact]
