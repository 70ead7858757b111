"""What makes runs of one job, backend and number of ranks different measurements, and their sessions.

Runs of one session were made in one go on one machine; they share what changes between days: neighbours on
the host, temperature, caches, drivers. An interval of runs of one session holds none of that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from math import isfinite
from statistics import median
from typing import TypeAlias

from harness.judge.wording import counted
from harness.nested import grouped
from harness.record import EnvironmentPart, Record

Facts = Mapping[str, str]


def facts(record: Record) -> Facts:
    """Each in words: '2 nodes x 2', 'torch 2.11.0'."""
    world, environment = record.world, record.environment
    gpus = environment.gpus or ["no GPU"]
    measure = record.measure.model_dump() if record.measure else {}
    # A preset that the label names was asked for row by row: it is compared, and not a condition of the runs.
    # Of scripts that are compared only DeepSpeed's file has one.
    is_row = record.observation is not None and record.observation.judged_by is not None
    preset = {} if record.backend.own_preset or is_row else {"preset": world.preset}
    return {
        "job": f"job {record.job_id}",
        "start": "from the start"
        if (saved := record.resumed) is None
        else f"from step {saved.step} of {saved.backend} on {counted(saved.world_size, 'rank')}",
        "nodes": f"{counted(world.nodes, 'node')} x {world.ranks_per_node}",
        **preset,
        "device": f"{world.device} over {world.collectives}",
        "threads": counted(world.threads_per_rank, "thread"),
        # Ranks that share samples have one batch between them.
        "micro-batch": f"micro-batch {Fraction(world.micro_batch_size * world.data_size, world.world_size)}",
        "optimizer": f"{record.job.optimizer.implementation or 'unknown'} optimizer",
        "kernels": "deterministic" if is_deterministic(record) else "not deterministic",
        **{name: f"{name} {version}" for name, version in environment.packages.items()},
        **accelerator_facts(environment),
        "python": f"python {environment.python}",
        "code": f"code {environment.code}",
        "cpu": environment.cpu,
        "cores": f"{environment.cores} cores",
        "gpus": f"{len(gpus)} x {gpus[0]}" if len(set(gpus)) == 1 else "; ".join(gpus),
        **{
            (key := f"measure.{name}"): f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in measure.items()
        },
    }


def is_deterministic(record: Record) -> bool:
    """Whether its kernels were asked to add in a fixed order; of an observed script, whether they did."""
    return record.job.training.deterministic is not False


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


def script_names(records: Sequence[Record]) -> dict[int, str]:
    """What tells observed scripts of one strategy and size apart, by id of the record; '' where nothing must.

    The names that they were given, or the words of their commands, else their files, what they update, their
    rates or samples. Records that are alike in all are repeats.
    """
    alike = grouped(
        ((record.backend.label, record.world.world_size), record)
        for record in records
        if record.observation is not None
    )
    found: dict[int, str] = {}
    for group in alike.values():
        names = [record.observation.label if record.observation else "" for record in group]
        for fact in zip(*(_of_script(record, group) for record in group), strict=True):
            given: dict[str, set[str]] = {}
            for name, text in zip(names, fact, strict=True):
                given.setdefault(name, set()).add(text)
            names = [
                ", ".join(filter(None, (name, text if len(given[name]) > 1 else "")))
                for name, text in zip(names, fact, strict=True)
            ]
        found |= dict(zip(map(id, group), names, strict=True))
    return found


MOST_LETTERS = 60
"""Of the words of a command in a row's name."""


def own_words(command: Sequence[str], commands: Sequence[Sequence[str]]) -> str:
    """What a command has that another lacks, paths by their names."""
    own = [word for word in command if not all(word in other for other in commands)]
    return " ".join(word.rpartition("/")[2] for word in own)


def _of_script(record: Record, group: Sequence[Record]) -> Iterator[str]:
    """Facts of an observed script in words, the same number for each."""
    seen, updated = record.observation, record.observed.updated_tensors if record.observed else None
    named = seen is None or bool(seen.label)
    commands = [other.observation.command for other in group if other.observation]
    text = "" if seen is None or named else own_words(seen.command, commands)
    yield text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}... {_short(text)}"
    yield "" if seen is None or named or not seen.files else f"files {_short(repr(seen.files))}"
    if seen is not None and seen.judged_by is not None:  # its runs are told to be repeats
        yield from [""] * 4
        return
    yield "" if updated is None else f"gradients of {counted(updated, 'tensor')}"
    rates = [step.learning_rate for step in record.steps]
    yield f"learning rate {max(rates, default=0.0):g}"
    yield f"rates {_short(repr(rates))}"
    yield f"samples {_short(repr([step.sample_hashes for step in record.steps]))}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def words(record: Record, names: Iterable[str]) -> str:
    """The named facts of a record, joined by commas; empty without names."""
    own = facts(record)
    return ", ".join(own[name] for name in names if name in own)


def labelled(backend: str, suffix: str) -> str:
    """A backend, and the suffix in brackets unless it is empty."""
    return f"{backend} ({suffix})" if suffix else backend


PAUSE_SECONDS = 3600.0
"""A longer time in which no run of the comparison trains begins a new session."""
LEAST_CELLS_OF_HOST = 2
"""A host that ran fewer cells has nothing to compare on it, so its runs are no session of their own."""

BySession: TypeAlias = Mapping[int, Sequence[float]]
"""Figures of the runs of one cell by the number of their session."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the runs of one cell lie apart, relative to their median; None: too few to say."""

    sessions: int
    within: float | None
    """Largest less smallest run of the session where that is most; None: one run on each."""
    between: float | None
    """Largest less smallest median of a session; None: one session."""


def sessions(records: Sequence[Record]) -> list[int]:
    """The number of each record's session, counted from 0 in order of time.

    Runs after a pause belong to another session, and so do runs on another host, if no scheduler
    chose it and each host ran several cells. Records whose time cannot be read belong to the first.
    """
    began = [began_at(record) for record in records]
    dated = sorted((start, index) for index, start in enumerate(began) if start is not None)
    stretches = [[index for index, start in enumerate(began) if start is None]]
    ended: float | None = None
    for start, index in dated:
        if ended is not None and start - ended > PAUSE_SECONDS:
            stretches.append([])
        stretches[-1].append(index)
        ended = max(start + _least_seconds(records[index]), ended if ended is not None else start)
    numbers = [0] * len(records)
    for number, members in enumerate(part for stretch in stretches for part in _by_host(records, stretch)):
        for index in members:
            numbers[index] = number
    return numbers


def spread(values: BySession) -> Spread:
    """Spread of the runs of one cell within and between its sessions; `values` are positive."""
    known = [list(of_session) for of_session in values.values() if of_session]
    if not known:
        return Spread(sessions=0, within=None, between=None)
    middle = median([value for of_session in known for value in of_session])
    repeated = [max(of) - min(of) for of in known if len(of) > 1]
    medians = [median(of) for of in known]
    return Spread(
        sessions=len(known),
        within=max(repeated) / middle if repeated and middle else None,
        between=(max(medians) - min(medians)) / middle if len(known) > 1 and middle else None,
    )


def began_at(record: Record) -> float | None:
    """Seconds since 1970 at which the run began or, where that is not known, was asked for."""
    try:
        began = datetime.fromisoformat(record.environment.started_at or record.created_at)
    except ValueError:
        return None
    return (began if began.tzinfo is not None else began.replace(tzinfo=UTC)).timestamp()


def _least_seconds(record: Record) -> float:
    """How long the run lasted at the least: set-up, steps and evaluations, and what it waited for turns."""
    setup = max((rank.setup_seconds for rank in record.ranks), default=0.0)
    evaluations = sum(part.seconds or 0.0 for part in record.eval)
    seconds = setup + sum(step.seconds for step in record.steps) + evaluations
    seconds += record.turns.waited_seconds if record.turns else 0.0
    return seconds if isfinite(seconds) else 0.0


def _by_host(records: Sequence[Record], stretch: Sequence[int]) -> list[Sequence[int]]:
    """The runs of each host, the whole stretch where hosts say nothing."""
    found = grouped((tuple(sorted({rank.host for rank in records[index].ranks})), index) for index in stretch)
    # A run that never started names no host: it stays with the first.
    lost = found.pop((), [])
    chosen = any(records[index].environment.slurm is not None for index in stretch)
    cells = [{(records[i].backend.label, records[i].world.world_size) for i in of} for of in found.values()]
    if chosen or len(found) < 2 or min(map(len, cells)) < LEAST_CELLS_OF_HOST:
        return [stretch]
    first, *others = found.values()
    return [[*lost, *first], *others]


def node_threads(record: Record) -> int:
    """That compute on one node; nodes which share a machine's processors count as one."""
    return record.world.ranks_per_node * record.world.threads_per_rank


def shares_cores(record: Record) -> bool:
    """Whether the ranks of a node compute on the CPU with more threads than it has cores."""
    cores = record.environment.cores or 0
    return record.world.device == "cpu" and 0 < cores < node_threads(record)
