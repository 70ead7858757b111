"""The machines, versions and Slurm jobs behind the runs, and scripts that were observed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from harness.forms.flops import is_stub
from harness.judge.comparison import Comparison
from harness.judge.quantities.timings import disturbance
from harness.judge.run_conditions import accelerator_facts
from harness.judge.wording import listed
from harness.record import EnvironmentPart, ObservationPart, Record
from harness.tell.document import Block, Column, Folded, Items, Paragraph, Section, Table
from harness.tell.formats import number
from harness.tell.tables import LABELS, prose, table_columns

FACTS = table_columns("slurm")


def slurm_jobs(comparison: Comparison) -> Folded | None:
    """The jobs, with what at least one of them has; None where no run was a job of `harness slurm`."""
    jobs = [(row, slurm) for row in comparison.rows if (slurm := row.record.environment.slurm) is not None]
    if not jobs:
        return None
    body = [[*row.cell, row.record.repeat, *(getattr(job, c.key) for c in FACTS)] for row, job in jobs]
    columns = (*LABELS, Column("repeat", "repeat"), *FACTS)
    table = Table(key="slurm_jobs", columns=columns, rows=body)
    return Folded(f"Slurm jobs: {len(jobs)}", [table])


_OF_GPUS = re.compile(r"NCCL|RCCL|TF32|^CUDA_|^CUBLAS|ALLOC_CONF|_VISIBLE_DEVICES")


def machine_section(comparison: Comparison) -> Section:
    """Each distinct machine once, with the load that its runs found."""
    seen: dict[tuple[tuple[str, str], ...], list[Record]] = {}
    for row in comparison.rows:
        e = row.record.environment
        world = row.record.world
        facts = [
            ("CPU", f"{e.cpu}, {e.cores} cores, {e.memory_bytes / 2**30:.1f} GiB"),
            ("accelerators", "; ".join(e.gpus) or "none"),
            *_accelerator(e),
            ("system", f"{e.platform}, Python {e.python}"),
            ("packages", ", ".join(f"{name} {v}" for name, v in sorted(e.packages.items()))),
            ("harness code", e.code + commit_words(e)),
            ("device", f"{_device(row.record)}, collectives over {world.collectives}"),
        ]
        facts += _network(e)
        seen.setdefault(tuple(facts), []).append(row.record)
    blocks: list[Block] = [Items([*facts, *_time_and_load(runs)]) for facts, runs in seen.items()]
    jobs = slurm_jobs(comparison)
    return Section("machine", "Machine and versions", [*blocks, jobs] if jobs else blocks)


def _device(record: Record) -> str:
    """'cpu', 'cuda', 'cuda (CUDA stub)'."""
    names = sorted({rank.device_name for rank in record.ranks if is_stub(rank.device_name)})
    return f"{record.world.device} ({listed(names)})" if names else record.world.device


def _time_and_load(records: Sequence[Record]) -> list[tuple[str, str]]:
    """When the runs began, the runnable processes of the minute before (runs before leave some too), and
    what other work used meanwhile."""
    runs = sorted(records, key=lambda record: record.created_at)
    first, last = (run.created_at[:16].replace("T", " ") for run in (runs[0], runs[-1]))
    facts = [("runs began", f"from {first} to {last} UTC")]
    loads = [load for run in runs if (load := run.environment.load_average) is not None]
    if loads:
        extent = f"{loads[0]:.2f} before the first, {min(loads):.2f} to {max(loads):.2f} before all"
        facts.append(("load before the runs", f"{extent} (average of a minute)"))
    used = [one.other_cores for run in runs if (one := disturbance(run)) is not None]
    if used:
        facts.append(("other work during timed steps", f"{min(used):.2f} to {max(used):.2f} cores"))
    return facts


def _accelerator(environment: EnvironmentPart) -> list[tuple[str, str]]:
    """Driver, libraries and settings of the GPUs; nothing on the CPU and in older records."""
    own = environment.accelerator
    if own is None:
        return []
    facts = [("GPU software", ", ".join(accelerator_facts(environment).values()) or "not known")]
    if own.float32_matmul is not None:
        in_cudnn = {None: "", True: "; TF32 in cuDNN on", False: "; TF32 in cuDNN off"}[own.cudnn_tf32]
        facts.append(("fp32 matrix products", f"precision '{own.float32_matmul}'{in_cudnn}"))
    named = [f"{name}={value}" for name, value in environment.variables.items() if _OF_GPUS.search(name)]
    return [*facts, ("variables", ", ".join(named) or "none of NCCL, CUDA or TF32")]


def _network(environment: EnvironmentPart) -> list[tuple[str, str]]:
    """What a self-test before the run measured, where there was one."""
    fabric = environment.fabric
    if fabric is None or fabric.all_reduce_bus_bytes_per_second is None:
        return []
    bandwidth = number(fabric.all_reduce_bus_bytes_per_second / 1e9)
    text = (
        f"{fabric.transport} on {fabric.world_size} ranks, {fabric.nodes} nodes: all-reduce bus "
        f"bandwidth {bandwidth} GB/s at {fabric.all_reduce_bytes:,} bytes, "
        f"latency {number((fabric.all_reduce_latency_seconds or 0.0) * 1e6)} us"
    )
    return [("network", text)]


def commit_words(environment: EnvironmentPart) -> str:
    """The commit of the checkout that a run came from, to stand behind the code; empty outside of one."""
    git = environment.git
    if git is None:
        return ""
    commit = f", commit {git.commit[:12]}"
    if not git.modified:
        return commit
    return f"{commit} with local changes{f' to {listed(git.changed)}' if git.changed else ''}"


EVERY = "all"


def observed_section(comparison: Comparison) -> Section | None:
    """None where no row is of a script."""
    seen = {
        row.backend: row.record.observation for row in comparison.rows if row.record.observation is not None
    }
    if not seen:
        return None
    blocks: list[Block] = [Paragraph(prose("observed"))]
    blocks += [Paragraph(_summary(label, part)) for label, part in seen.items()]
    blocks.append(Table(key="observed", columns=table_columns("observed"), rows=_missing(seen)))
    return Section("observed", "Observed scripts", blocks)


def _summary(label: str, part: ObservationPart) -> str:
    """'observed-ddp: `torchrun train.py`. Driven by lightning. Loss: ... . 2 optimizers step...'."""
    drivers = f" Driven by {', '.join(part.frameworks)}." if part.frameworks else ""
    loss = f" Loss: {part.loss}." if part.loss else ""
    same = f" Backend of the same strategy: {part.base}." if part.base else ""
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in part.notes)
    return f"{label}: `{shlex.join(part.command)}`.{drivers}{same}{loss}{notes}"


def _missing(seen: dict[str, ObservationPart]) -> list[list[str]]:
    """What all rows lack in one line each, then what some do."""
    fields = {(field, reason): None for part in seen.values() for field, reason in part.unknown.items()}
    lines = []
    for field, reason in fields:
        rows = [label for label, part in seen.items() if part.unknown.get(field) == reason]
        shown = [EVERY] if len(rows) == len(seen) else rows
        lines += [[row, field, reason] for row in shown]
    return lines
