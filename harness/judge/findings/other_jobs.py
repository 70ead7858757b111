"""Runs that trained another job than their reference, split its batch otherwise, or scale it unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from harness.backends.registry import REFERENCE
from harness.forms.flops import hardware_flops_per_token
from harness.judge.agreement.parity import has_dropout
from harness.judge.findings.execution import THE_MODEL
from harness.judge.findings.finding import Finding
from harness.judge.quantities import Run
from harness.judge.rows import JudgedRun, Runs
from harness.judge.speed import geometry, recomputation
from harness.judge.wording import both, listed, ranks
from harness.nested import differences, value_at
from harness.record import Record

CUT = {("training", name) for name in ("global_batch_size", "micro_batch_size", "accumulation_steps")}
"""Settings that weak scaling changes with the number of ranks."""


def find_other_jobs(runs: Runs) -> list[Finding]:
    """Jobs side by side, then for each run everything in which it is another job."""
    found = _several_jobs(runs.rows)
    for row in runs.rows:
        # `_several_jobs` reports once that a table holds several jobs.
        for difference in () if row.is_of_another_job else row.judgement.not_same_job:
            given, other = both(difference.given, difference.reference)
            whose = "the reference" if row.reference is row.same_job_as else _name(row.same_job_as)
            found.append(
                Finding(
                    id=difference.kind,
                    about=row.cell,
                    text=f"{difference.differs} from {whose}: {given} against {other}",
                    values={"reference": difference.reference, "given": difference.given},
                )
            )
        if row.record.status == "ok" and has_dropout(row.record):
            found.append(_not_deterministic(row))
    return found


def _not_deterministic(row: JudgedRun) -> Finding:
    """Dropout, whether layers were kept from it, and which ranks draw alike."""
    seen = row.record.observed
    idle = (seen.evaluating_in_training or []) if seen else []
    return Finding(
        id="not-deterministic",
        about=row.cell,
        text="dropout is active, so runs differ by chance and parity cannot be judged"
        + (
            f"; in evaluation mode in training passes: {listed([n or THE_MODEL for n in idle], 3)}"
            if idle
            else ""
        )
        + _draws(row.record),
        values={
            "job": row.record.job.model.dropout,
            "live": seen.dropout if seen else None,
            **({"evaluating": idle} if idle else {}),
        },
    )


def _draws(record: Record) -> str:
    """Which ranks of different samples draw alike, and which of the same samples do not."""
    mesh, states = record.world.mesh, {rank.rank: rank.random_state for rank in record.ranks}
    if len(states) < 2 or None in states.values():
        return ""
    peers = dict[int, set[str | None]]()
    for rank, state in states.items():
        peers.setdefault(mesh.data_rank(rank), set()).add(state)
    text = ""
    if len(peers) > 1 and len(set(states.values())) == 1:
        text = "; all ranks begin in the same random state, so each drops the same units of its own samples"
    if any(len(of_one) > 1 for of_one in peers.values()):
        text += "; ranks that share samples begin in different random states, so what each holds of one "
        text += "sample in full may be dropped otherwise"
    return text


def _several_jobs(rows: Sequence[JudgedRun]) -> list[Finding]:
    jobs = {row.record.job_id: row.record.job.model_dump() for row in rows}
    if len(jobs) < 2:
        return []
    first, *others = jobs.values()
    differing = dict.fromkeys(keys for other in others for keys, _, _ in differences(first, other))
    if differing.keys() <= CUT and _grows_with_ranks(rows):
        return []
    values = {".".join(keys): [value_at(job, keys) for job in jobs.values()] for keys in differing}
    named = "; ".join(f"{path}: {' / '.join(map(str, given))}" for path, given in values.items())
    return [
        Finding(
            id="several-jobs",
            about=tuple(sorted({row.label for row in rows})),
            text=f"not the same job: these rows belong to {len(jobs)} jobs, each compared with its own "
            f"reference only ({named or 'the contents of their files differ'})",
            values=values,
        )
    ]


def _grows_with_ranks(rows: Sequence[JudgedRun]) -> bool:
    """Whether every rank of every run has equally many samples: weak scaling, which is no mistake."""
    records = [row.record for row in rows if row.record.backend.name != REFERENCE]
    if len({record.world.world_size for record in records}) < 2:
        return False
    return len({(r.job.training.global_batch_size or 0) / r.world.world_size for r in records}) == 1


def _name(run: Run | None) -> str:
    """The run that replaces a reference without a result."""
    return "the others" if run is None else f"{run.label}, as the reference has no result"


def find_batch_split(runs: Runs) -> list[Finding]:
    """One finding per world size with different splits, and one per run that accumulates differently.

    Where ranks share samples the batch is cut over fewer data ranks: only runs with as many are alike.
    """
    layouts: dict[tuple[int, int], dict[str, list[str]]] = {}
    for row in runs.rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            split = f"{world.micro_batch_size} x {world.accumulation_steps}"
            layouts.setdefault((world.world_size, world.data_size), {}).setdefault(split, []).append(
                row.backend
            )
    return [*_splits(layouts), *(finding for row in runs.rows if (finding := _accumulation(row)) is not None)]


def _accumulation(row: JudgedRun) -> Finding | None:
    asked = row.record.world.accumulation_steps
    effective = row.record.backend.effective
    given = effective.accumulation_steps if effective else asked
    if given == asked:
        return None
    return Finding(
        id="accumulation-differs",
        about=row.cell,
        text=f"the library accumulates over {given} micro-steps, the loop over {asked}",
        values={"asked": asked, "given": given},
    )


def _splits(layouts: dict[tuple[int, int], dict[str, list[str]]]) -> list[Finding]:
    return [
        Finding(
            id="micro-batch-differs",
            about=tuple(sorted({label for labels in splits.values() for label in labels})),
            text=f"on {ranks(size)} micro-batch x accumulation differs: " + ", ".join(sorted(splits)),
            values=splits,
        )
        for (size, _), splits in layouts.items()
        if len(splits) > 1
    ]


LARGEST_RATIO = 1.1


def find_weak_scaling(runs: Runs) -> list[Finding]:
    """At most one finding: of the runs on each number of ranks, whose models grow with it."""
    records = [r.record for r in runs.rows if r.record.status == "ok" and r.record.backend.name != REFERENCE]
    sizes = sorted({record.world.world_size for record in records})
    models = [{r.job.model.model_dump_json() for r in records if r.world.world_size == n} for n in sizes]
    if len(sizes) < 2 or any(len(found) != 1 for found in models):
        return []
    first = [next(record for record in records if record.world.world_size == size) for size in sizes]
    parameters = [record.model.parameters if record.model else 0 for record in first]
    work = [work_per_rank(record) for record in first]
    known = [amount for amount in work if amount is not None]
    grows = all(one < other for one, other in pairwise(parameters))
    if not grows or len(known) < len(work) or max(known) <= LARGEST_RATIO * min(known):
        return []
    words = ", ".join(f"{flops:.2e} on {size}" for size, flops in zip(sizes, known, strict=True))
    return [
        Finding(
            id="uneven-weak-scaling",
            about=tuple(sorted({record.backend.label for record in records})),
            text=f"the model grows with the ranks, but a rank's work per step does not stay equal: {words} "
            "ranks, in FLOP",
            values={"world_sizes": sizes, "parameters": parameters, "flops_per_rank_and_step": known},
        )
    ]


def work_per_rank(record: Record) -> float | None:
    """FLOPs that a rank computes in a step; None where the geometry is not known."""
    shape, batch = geometry(record), record.job.training.global_batch_size
    if shape is None or batch is None or record.model is None:
        return None
    each = hardware_flops_per_token(shape, recomputation=recomputation(record))
    return each * shape.sequence_length * batch / record.world.world_size
