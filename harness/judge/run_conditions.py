"""What makes runs of one job, backend and number of ranks different measurements: no repeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction

from harness.judge.wording import counted
from harness.record import EnvironmentPart, Record, WorldPart

Facts = Mapping[str, str]


def facts(record: Record) -> Facts:
    """Each in words: '2 nodes x 2', 'torch 2.11.0'."""
    world, environment = record.world, record.environment
    gpus = environment.gpus or ["no GPU"]
    measure = record.measure.model_dump() if record.measure else {}
    # A preset that the label names was asked for row by row: it is compared, and not a condition of the runs.
    preset = {} if record.backend.own_preset else {"preset": world.preset}
    return {
        "job": f"job {record.job_id}",
        "start": _start(record),
        "nodes": f"{counted(world.nodes, 'node')} x {world.ranks_per_node}",
        **preset,
        "device": f"{world.device} over {world.collectives}",
        "threads": counted(world.threads_per_rank, "thread"),
        "micro-batch": f"micro-batch {_micro_batch(world)}",
        "optimizer": f"{record.job.optimizer.implementation or 'unknown'} optimizer",
        "kernels": "deterministic" if is_deterministic(record) else "not deterministic",
        **{name: f"{name} {version}" for name, version in environment.packages.items()},
        **accelerator_facts(environment),
        "python": f"python {environment.python}",
        "code": f"code {environment.code}",
        "cpu": environment.cpu,
        "cores": f"{environment.cores} cores",
        "gpus": f"{len(gpus)} x {gpus[0]}" if len(set(gpus)) == 1 else "; ".join(gpus),
        **{(key := f"measure.{name}"): f"{key}={_typed(value)}" for name, value in measure.items()},
    }


def is_deterministic(record: Record) -> bool:
    """Whether its kernels were asked to add in a fixed order; of an observed script, whether they did."""
    return record.job.training.deterministic is not False


def _micro_batch(world: WorldPart) -> Fraction:
    """Samples of a micro-step for each rank: ranks that share samples have one batch between them."""
    return Fraction(world.micro_batch_size * world.data_size, world.world_size)


def accelerator_facts(environment: EnvironmentPart) -> Facts:
    """Driver and libraries of the GPUs: {'nccl': 'NCCL 2.29.7', ...}; those that are known."""
    own = environment.accelerator
    if own is None:
        return {}
    collectives, convolutions = ("RCCL", "MIOpen") if own.hip else ("NCCL", "cuDNN")
    known = {
        "driver": ("driver", own.driver),
        "driver_cuda": ("driver for CUDA", own.driver_cuda),
        "cuda": ("CUDA", own.cuda),
        "hip": ("HIP", own.hip),
        "nccl": (collectives, own.nccl),
        "cudnn": (convolutions, own.cudnn),
    }
    return {key: f"{name} {version}" for key, (name, version) in known.items() if version is not None}


def _typed(value: object) -> str:
    """A setting as a person types it."""
    return value if isinstance(value, str) else json.dumps(value)


def _start(record: Record) -> str:
    """Where the run began."""
    if record.resumed is None:
        return "from the start"
    saved = record.resumed
    return f"from step {saved.step} of {saved.backend} on {counted(saved.world_size, 'rank')}"


def varying(records: Iterable[Record]) -> list[str]:
    """Names of the facts in which any of the records differ; one that a record lacks is none."""
    distinct: list[Facts] = []
    for own in map(facts, records):
        if own not in distinct:
            distinct.append(own)
    found: dict[str, set[str]] = {}
    for own in distinct:
        for name, words in own.items():
            found.setdefault(name, set()).add(words)
    return [name for name, words in found.items() if len(words) > 1]


def words(record: Record, names: Iterable[str]) -> str:
    """The named facts of a record, joined by commas; empty without names."""
    own = facts(record)
    return ", ".join(own[name] for name in names if name in own)


def labelled(backend: str, suffix: str) -> str:
    """A backend, and the suffix in brackets unless it is empty."""
    return f"{backend} ({suffix})" if suffix else backend
