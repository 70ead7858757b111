"""What a sound GPU machine would show, made of published runs on the CPU, to be doctored by tests."""

from functools import cache
from pathlib import Path
from typing import Any

from harness.doctor.gpu_runs import (
    AGAIN,
    FULL,
    ON_CPU,
    SHARDED,
    SINGLE,
    ZERO,
    Evidence,
    collectives_per_step,
)
from harness.fabric.result import FabricResult, FabricRow
from harness.record import ErrorPart, RankPart, Record
from harness.record.store import read_runs
from harness.run_directory.rank_state import DeviceNote
from tests.gpus import gpus_of
from tests.records import changed

PUBLISHED = Path(__file__).resolve().parents[3] / "reports" / "default"
DEVICE = "NVIDIA A100-SXM4-80GB"
RESERVED_BYTES = 2**30
DRIVER_BYTES = 2**29


@cache
def published(label: str) -> Record:
    """The first published run of a backend."""
    records = _published()
    return next(record for record in records if record.backend.label == label and record.status == "ok")


@cache
def _published() -> tuple[Record, ...]:
    return tuple(record for _, record in read_runs([PUBLISHED])[0])


def on_gpus(record: Record) -> Record:
    """The same run as GPUs would have made it."""
    ranks = [_rank(part, record) for part in record.ranks]
    return changed(record, ranks=ranks, world={"device": "cuda", "collectives": "nccl"})


def _rank(part: RankPart, record: Record) -> RankPart:
    seconds, data = part.step_seconds, part.data_seconds
    left = [step - fetch for step, fetch in zip(seconds, data, strict=True)]
    phases = {"forward": [0.3 * s for s in left], "backward": [0.5 * s for s in left],
              "step": [0.2 * s for s in left]}  # fmt: skip
    driver = {"reserved_bytes": RESERVED_BYTES, "device_used_bytes": RESERVED_BYTES + DRIVER_BYTES}
    return part.model_copy(
        update={
            "device_name": DEVICE,
            "phase_seconds": phases,
            "memory": [moment.model_copy(update=driver) for moment in part.memory],
            "matmul_flops_per_second": {"float32": 15e12},
        }
    )


def note(part: RankPart, **changes: Any) -> DeviceNote:
    values: dict[str, Any] = {
        "rank": part.rank,
        "index": part.rank,
        "uuid": f"GPU-{part.rank}",
        "name": DEVICE,
        "event_step_seconds": [0.999 * seconds for seconds in part.step_seconds],
        "synchronisations": [0] * len(part.step_seconds),
        "micro_steps": 2,
        "gradient_bytes": 64_000_000,
        "norm_peak_bytes": 20_000,
    }
    return DeviceNote(**(values | changes))


def notes_of(record: Record, **changes: Any) -> tuple[DeviceNote, ...]:
    return tuple(note(part, **changes) for part in record.ranks)


def kernels_of(record: Record) -> dict[int, dict[int, int]]:
    return {rank: {5: int(count)} for rank, count in collectives_per_step(record).items()}


def fabric_of(*, seconds: float = 1e-3, latency: float = 2e-5) -> FabricResult:
    rows = [
        FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=size, repeats=10, seconds=[took])
        for size, took in ((1024, latency), (2**26, seconds))
    ]
    return FabricResult(
        created_at="2026-01-02T03:04:05+00:00", transport="nccl", device="cuda", hosts=["a", "a"],
        interface=None, rows=rows,
    )  # fmt: skip


def sound() -> Evidence:
    """Two GPUs without a fault."""
    single, zero, sharded = (on_gpus(published(label)) for label in (SINGLE, ZERO, SHARDED))
    full = zero.model_copy(
        update={"status": "oom", "error": ErrorPart(kind="OutOfMemoryError", message="out of memory")}
    )
    records = {
        ON_CPU: published(SINGLE), SINGLE: single, AGAIN: single, ZERO: zero, FULL: full, SHARDED: sharded,
    }  # fmt: skip
    return Evidence(
        gpus=gpus_of(80 * 2**30, 80 * 2**30),
        ranks=2,
        records=records,
        notes={name: notes_of(records[name]) for name in (ZERO, SHARDED)},
        kernels={SHARDED: kernels_of(sharded)},
        fabric=fabric_of(),
        seconds_to_notice=10.5,
    )
