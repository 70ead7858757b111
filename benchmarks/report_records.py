"""Writes synthetic records for the report benchmark: several jobs, backends, world sizes and repeats."""

from __future__ import annotations

import random
from pathlib import Path

from harness.backends.base import Effective
from harness.job.job import Job, TrainingSection
from harness.record import (
    BackendPart,
    CommunicationPart,
    MemoryPart,
    OverlapPart,
    RankPart,
    Record,
    StepPart,
    WeightsPart,
    WindowsPart,
    WorldPart,
)
from harness.record.store import write_record

BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp1", "accelerate-ddp", "zero0")
SIZES = (2, 4)
REPEATS = 5
PER_JOB = 1 + len(BACKENDS) * len(SIZES) * REPEATS
"""The reference once, every other cell `REPEATS` times."""
PARAMETERS = 1_000_000


def write_records(folder: Path, count: int, steps: int) -> None:
    """Write `count` records; all jobs have the same shape, so more records mean more jobs."""
    chance = random.Random(0)
    for number in range(count):
        job, within = divmod(number, PER_JOB)
        if within == 0:
            record = _record(chance, job, "single", 1, 0, steps)
        else:
            cell, repeat = divmod(within - 1, REPEATS)
            backend, size = divmod(cell, len(SIZES))
            record = _record(chance, job, BACKENDS[backend], SIZES[size], repeat, steps)
        directory = folder / record.run_id
        directory.mkdir(parents=True)
        write_record(directory, record)


def _record(chance: random.Random, job: int, backend: str, size: int, repeat: int, steps: int) -> Record:
    training = TrainingSection(steps=steps, global_batch_size=8, seed=job)
    windows = ["warmup"] * 3 + ["probed"] * 2 + ["traced"] + ["timed"] * (steps - 6)
    seconds = [chance.uniform(0.1, 0.12) * (1 + 1 / size) for _ in range(steps)]
    parts = [
        StepPart(
            step=step, window=windows[step], loss=5.5 / (1 + step / 100) + chance.gauss(0, 1e-7),  # type: ignore[arg-type]
            gradient_norm=2.0 / (1 + step / 50), learning_rate=1e-3 / (1 + step), tokens=1024,
            target_tokens=1016, samples=8, seconds=seconds[step], sample_hashes=f"{step * 7919:016x}",
        )
        for step in range(steps)
    ]  # fmt: skip
    return Record(
        run_id=f"run-{job:03d}-{backend}-n{size}-r{repeat}",
        created_at="2026-01-02T03:04:05+00:00",
        status="ok",
        command=["harness", "compare"],
        job=Job(training=training).model_dump(mode="json"),
        job_id=f"{job:012x}",
        cell=f"{job}-{backend}-{size}-{repeat}",
        repeat=repeat,
        backend=BackendPart(label=backend, name=backend, effective=_effective(), native_config={"a": 1}),
        world=WorldPart(
            nodes=1, ranks_per_node=size, world_size=size, device="cpu", collectives="gloo",
            threads_per_rank=1, micro_batch_size=8 // size, accumulation_steps=1, preset="like-for-like",
        ),
        environment=_environment(),
        initial_weights=WeightsPart(digest="a" * 64, l2_norm=1.0, parameter_count=PARAMETERS),
        final_weights=WeightsPart(digest="b" * 64, l2_norm=1.0, parameter_count=PARAMETERS),
        steps=parts,
        ranks=[_rank(rank, size, seconds) for rank in range(size)],
        comm=[
            CommunicationPart(
                rank=rank, phase="backward", op=op, dtype="float32", group="0",
                group_ranks=list(range(size)), group_size=size, calls=8, payload_bytes=8 * PARAMETERS,
            )
            for rank in range(size)
            for op in ("all_gather", "reduce_scatter")
            if size > 1
        ],
        windows=WindowsPart(warmup=3, probed=2, traced=1, timed=steps - 6),
    )  # fmt: skip


def _rank(rank: int, size: int, seconds: list[float]) -> RankPart:
    kinds = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 4 * PARAMETERS // size)
    held = sum(kinds.values())
    return RankPart(
        rank=rank, host="host", device_name="cpu", setup_seconds=1.0, step_seconds=seconds,
        data_seconds=[value * 0.02 for value in seconds],
        phase_seconds={
            phase: [value * share for value in seconds]
            for phase, share in (("forward", 0.3), ("backward", 0.5), ("step", 0.15))
        },
        sample_hashes=[f"{step * 104729 + rank:016x}" for step in range(len(seconds))],
        samples=[8 // size] * len(seconds),
        memory=[
            MemoryPart(step=step, moment=moment, allocated_bytes=held, peak_bytes=held * 2, kinds=kinds)
            for step in (3, 4)
            for moment in ("after_forward", "after_backward", "after_step")
        ],
        overlap=[
            OverlapPart(
                step=5, seconds=0.2, compute_seconds=0.1, communication_seconds=0.08, exposed_seconds=0.06,
                idle_seconds=0.04,
            )
        ],
    )  # type: ignore[arg-type]  # fmt: skip


def _effective() -> Effective:
    return Effective(
        strategy="synthetic", wrap_units=[""], parameter_dtype="float32", autocast_dtype=None,
        master_dtype="float32", gradient_dtype="float32", reduce_dtype="float32", optimizer="synthetic",
        optimizer_groups=[{"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}], gradient_clipping=1.0,
        accumulation_steps=1, gradient_synchronisation="last micro-step", loss_scale=None, offload=[],
        parameter_count=PARAMETERS,
    )  # fmt: skip


def _environment() -> dict[str, object]:
    return {
        "python": "3.12.0", "platform": "Linux", "cpu": "synthetic", "cores": 8, "memory_bytes": 2**34,
        "gpus": [], "packages": {"torch": "2.13.0"}, "code": "synthetic", "git": None, "variables": {},
    }  # fmt: skip
