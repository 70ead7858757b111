"""Cells of a matrix: which runs a comparison needs, and what is asked of each."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.backends import registry
from harness.errors import HarnessError
from harness.files import require_plain_input
from harness.job import batch
from harness.job.config import require_existing
from harness.job.experiment import Experiment, Limits, MeasureSection, speeds_are_asked
from harness.job.job import FACTORIES, Job
from harness.record import GivenPart, Record, provenance
from harness.record.store import as_name
from harness.record.workload import depends_on_split, samples_at_once
from harness.run_directory.request import Resume, RunRequest, require_same_job

if TYPE_CHECKING:
    from harness.imported.rows import GivenRow


def tensor_sizes(labels: Iterable[str], world_size: int) -> set[int]:
    """Over how many ranks backends cut layers."""
    return {registry.mesh_of(label, world_size).size("tensor") for label in labels}


def noise_labels(layout: batch.BatchLayout, experiment: Experiment, parts: Iterable[int] = ()) -> list[str]:
    """Repetitions of the reference that measure rounding: other orders of adding, at low precision others.

    `parts`: over how many ranks layers are cut, of which each rounds its part of a sum.
    """
    other, roundings = batch.another_split(layout), _roundings(experiment, parts)
    if other is not None:
        options = [f"micro_batch_size={other.micro_batch_size},{REORDERED}"]
    else:  # one sample, which nothing splits
        options = [REORDERED, *([] if roundings else [DOUBLE])]
    return [f"{registry.REFERENCE}:{some}" for some in options + roundings]


def same_split_labels(samples: int, experiment: Experiment, parts: Iterable[int] = ()) -> list[str]:
    """The reference with the ranks' split, `samples` at once, and repetitions of it that measure rounding.

    For a loss that hangs on the split: none of them changes it, and one computes in double precision.
    """
    options = [""]
    if experiment.compare.noise_runs:
        roundings = _roundings(experiment, parts)
        options += [f",{some}" for some in (REORDERED, *([] if roundings else [DOUBLE]), *roundings)]
    return [f"{registry.REFERENCE}:micro_batch_size={samples}{some}" for some in options]


REORDERED, DOUBLE = "norm=fp32,backward=reordered", "precision=fp64"


def _roundings(experiment: Experiment, parts: Iterable[int]) -> list[str]:
    """Options of repetitions that round elsewhere."""
    options = []
    if experiment.training.precision != "fp32":
        options.append("precision=fp32")
    if experiment.training.precision.endswith("-mixed"):
        options += ["precision=cast", *(f"partial_sums={n}" for n in sorted(parts) if n > 1)]
    if experiment.optimizer.rounds_states:
        options.append("states=fp32")
    return options


def plan(
    experiment: Experiment,
    backends: Iterable[str],
    world_sizes: Iterable[int],
    repeats: int,
    device: str,
    *,
    nodes: int = 1,
    machine: str | None = None,
    resume: Resume | None = None,
    rows: Sequence[GivenRow] = (),
) -> list[RunRequest]:
    """The cells of a matrix in the order they run: in rounds, in each of them references first.

    A round holds one run of every cell, and every second round has them in reverse, so that a machine whose
    speed drifts treats all backends alike.
    Every world size decides its global batch; for each a reference of one process is added, and unless
    `compare.noise_runs` is off the repetitions of it that show how much rounding alone changes, which are
    neither timed nor probed. Ranks are spread over `nodes`; `machine` names machines other than this one.
    `resume`: the checkpoint that every backend but the references continues. `rows`: of files of other tools;
    one that is run exactly as given may train another job, and then brings the reference of that job.
    Raises HarnessError for an unknown backend or a batch that does not divide.
    """
    like = [row.label for row in rows if row.part.mode == "like-for-like"]
    own_jobs = [(row.experiment, [row.label]) for row in rows if row.part.mode == "exactly-as-given"]
    given = {row.label: row.part for row in rows}
    sizes, cells = list(world_sizes), dict[str, RunRequest]()
    for job, asked in ((experiment, [*backends, *like]), *own_jobs):
        if asked == ["all"]:
            asked = [name for name in registry.entries() if name != registry.REFERENCE]
        batch.require_plannable(len(asked), sizes, repeats)
        labels = [canonical_label(name) for name in asked]
        for world_size in sizes:
            layout = batch.job_layout(labels, world_size, job.training)
            one_process = batch.reference_layout(layout, job.training)
            parts = tensor_sizes(labels, world_size)
            noise_runs = noise_labels(one_process, job, parts) if job.compare.noise_runs else []
            for label in [registry.REFERENCE, *noise_runs, *labels]:
                alone = registry.parse(label)[0].name == registry.REFERENCE
                count = 1 if label in noise_runs else repeats
                for own, repeat in _runs(job, count, "cpu" if alone else device):
                    cell = make_cell(
                        own,
                        label,
                        1 if alone else world_size,
                        one_process if alone else layout,
                        repeat,
                        device,
                        nodes=1 if alone else nodes,
                        machine=machine,
                        measure=job.measure.losses_alone() if label in noise_runs else None,
                        resume=None if alone else resume,
                        given=given.get(label),
                    )
                    cells.setdefault(cell.key, cell)
    return in_rounds(cells.values())


def in_rounds(cells: Iterable[RunRequest]) -> list[RunRequest]:
    """In the order they run: that of the first round, in reverse in every second one, references first.

    Whoever always ran last would meet a machine that gets slower at its slowest, in every round.
    """
    places: dict[tuple[object, ...], int] = {}

    def place(cell: RunRequest) -> tuple[int, bool, int]:
        name = cell.job_id, cell.backend, cell.world_size, cell.job.training.deterministic
        number = places.setdefault(name, len(places))
        if cell.repeat % 2 == 0:
            return cell.repeat, False, number
        return cell.repeat, registry.parse(cell.backend)[0].name != registry.REFERENCE, -number

    return sorted(cells, key=place)


def _runs(experiment: Experiment, repeats: int, device: str) -> list[tuple[Experiment, int]]:
    """How and in which round a cell runs.

    Where speed is asked of GPUs, its timed runs have the kernels that jobs use; one more, in the first round,
    has deterministic ones and shows parity. On the CPU both are the same kernels, so one run does both.
    """
    asks_speed = experiment.measure.timed and speeds_are_asked(experiment.compare.question)
    if device != "cuda" or not (asks_speed and experiment.training.deterministic):
        return [(experiment, repeat) for repeat in range(repeats)]
    training = experiment.training.model_copy(update={"deterministic": False})
    usual = experiment.model_copy(update={"training": training})
    return [(experiment, 0), *((usual, repeat) for repeat in range(repeats))]


BOTH_KERNELS = (
    "each cell runs once with deterministic kernels, which show parity, and is timed with those that jobs use"
)
"""What a person is told where that is so."""


def have_both_kernels(cells: Iterable[RunRequest]) -> bool:
    """Whether cells of ranks run with deterministic kernels and with others."""
    ranked = [cell for cell in cells if registry.parse(cell.backend)[0].name != registry.REFERENCE]
    return len({cell.job.training.deterministic for cell in ranked}) > 1


def make_cell(
    experiment: Experiment,
    label: str,
    world_size: int,
    layout: batch.BatchLayout,
    repeat: int,
    device: str,
    *,
    nodes: int = 1,
    ranks_per_node: int | None = None,
    machine: str | None = None,
    measure: MeasureSection | None = None,
    limited: bool = True,
    resume: Resume | None = None,
    reads_files: bool = True,
    given: GivenPart | None = None,
) -> RunRequest:
    """One cell with its key: equal keys mean equal job, world, measurement, code and versions.

    `measure`: if not the experiment's. `limited`: its limit of memory holds, which on the CPU needs a probed
    step. `reads_files`: False leaves contents of files out of both ids, which then serve no comparison.
    `given`: the file of a row; where it, or what became of its keys, is another, the cell is another.
    `ranks_per_node`: where ranks do not spread evenly over nodes, or another program spread them.
    """
    limit, measure = experiment.runtime.memory_limit if limited else None, measure or experiment.measure
    layout = batch.cell_layout(label, world_size, layout, experiment.training)
    job = batch.with_global_batch(experiment.job(), layout)
    job_id = job.job_id(_content_digests(job, reads_files, elsewhere=machine is not None))
    if resume is not None:
        require_same_job(resume, job, job_id)
    entry, _ = registry.parse(label)
    turns = experiment.compare.turns if measure.timed and entry.name != registry.REFERENCE else None
    turns = None if turns == "auto" else turns  # then either way of running stands for the other
    parts = {
        "job_id": job_id,
        "backend": label,
        "world_size": world_size,
        "layout": [layout.micro_batch_size, layout.accumulation_steps],
        "repeat": repeat,
        "measure": measure.model_dump(),
        "preset": (preset := registry.preset_of(label, experiment.runtime.preset)),
        "threads": experiment.runtime.threads_per_rank,
        "device": device,
        "code": provenance.code_fingerprint(),
        "packages": provenance.package_versions(entry.packages),
        "machine": machine or provenance.machine_name(),
        "nodes": nodes,
        "memory_limit": limit,
        "loading": experiment.runtime.loading,
        "optimizer_implementation": job.optimizer.implementation,
        **({} if job.training.deterministic else {"deterministic": False}),
        "third_party": provenance.module_fingerprint(entry.target) if entry.is_third_party else None,
        **({"resume": resume.saved.model_dump(mode="json", exclude={"job"})} if resume is not None else {}),
        **({"turns": turns} if turns is not None else {}),
    }
    key = cell_key(json.dumps(parts, sort_keys=True))
    runtime, per_node = experiment.runtime, ranks_per_node or max(1, world_size // nodes)
    return RunRequest(
        backend=label, job=job, job_id=job_id, repeat=repeat, measure=measure, preset=preset, device=device,
        key=key if given is None else cell_key(key + given.model_dump_json()), given=given, resume=resume,
        question=experiment.compare.question, price_per_gpu_hour=experiment.compare.price_per_gpu_hour,
        world_size=world_size, ranks_per_node=per_node,
        threads_per_rank=runtime.threads_per_rank or max(1, (os.cpu_count() or 1) // per_node),
        micro_batch_size=layout.micro_batch_size, accumulation_steps=layout.accumulation_steps,
        loading=runtime.loading, limits=Limits.of(runtime),
        # On the CPU a limit holds only where allocations are counted.
        memory_limit_bytes=limit if device == "cuda" or measure.probed_steps else None,
    )  # fmt: skip


def cell_key(text: str) -> str:
    """Key of what makes a cell: equal for equal texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_same_split(
    cells: Sequence[RunRequest], records: Mapping[str, Record], experiment: Experiment, device: str
) -> list[RunRequest]:
    """The cells, with runs of the reference in the ranks' split where the loss was found to hang on it."""
    added: dict[str, RunRequest] = {}
    for cell in cells:
        record = records.get(cell.key)
        if cell.backend != registry.REFERENCE or record is None or record.status != "ok":
            continue
        own = experiment.model_copy(update=dict(cell.job))
        of_job = [other for other in cells if other.job_id == cell.job_id]
        runs = [records[other.key] for other in of_job if other.key in records]
        for samples in samples_of_cuts(record, runs):
            parts = {run.world.mesh.size("tensor") for run in runs}
            for label in same_split_labels(samples, own, parts):
                made = make_cell(own, label, 1, cell.layout, 0, device, measure=own.measure.losses_alone())
                added.setdefault(made.key, made)
    present = {cell.key for cell in cells}
    return [*cells, *(cell for key, cell in added.items() if key not in present)]


def samples_of_cuts(reference: Record, runs: Iterable[Record]) -> list[int]:
    """How many samples at once repetitions of the reference take where the loss hangs on that: as many as
    ranks do, or its own where the count of passes decides it. Empty where it does not, or chance decides."""
    if not depends_on_split(reference) or (reference.split is not None and reference.split.is_random):
        return []
    if reference.split is not None and reference.split.counts_passes:
        return [samples_at_once(reference)]
    return sorted({samples_at_once(run) for run in runs if run.backend.name != registry.REFERENCE})


def begin_run(cell: RunRequest, command: list[str]) -> RunRequest:
    """What the ranks of a cell are asked to do, under a fresh run id.

    Raises HarnessError for a measurement that the device does not have.
    """
    if cell.measure.memory_snapshot and cell.device != "cuda":
        raise HarnessError(
            f"measure.memory_snapshot: true needs CUDA, this run is on {cell.device}; remove it, or set "
            "runtime.device=cuda where there is a GPU"
        )
    now = datetime.now(UTC)
    name, _, _ = cell.backend.partition(":")
    run = f"{as_name(name)}-n{cell.world_size}-r{cell.repeat}-{secrets.token_hex(3)}"
    named = {
        "run_id": f"{now.strftime('%Y%m%d-%H%M%S')}-{run}",
        "created_at": now.isoformat(timespec="milliseconds"),
        "command": command,
    }
    return RunRequest(**(dict(cell) | named))


def reusable(records: Iterable[Record], wanted: Callable[[str], bool]) -> dict[str, Record]:
    """Newest record of each wanted cell that says something lasting: not failed, not stopped, not refused."""
    lasting = ("ok", "oom", "diverged", "unsupported")
    return {r.cell: r for r in records if wanted(r.cell) and r.status in lasting and not is_refused(r)}


def is_refused(record: Record) -> bool:
    """Whether the ranks were not started, since they would not have had the memory."""
    return record.prediction is not None and record.prediction.refused


def canonical_label(given: str) -> str:
    """The one spelling of a backend's label. Raises HarnessError if no backend has it."""
    try:
        return registry.canonical_label(given)
    except registry.UnknownBackend as error:
        raise HarnessError(str(error)) from error


def _content_digests(job: Job, reads_files: bool, *, elsewhere: bool) -> dict[str, str]:
    """Digests of the local files that the job names, so that a copy elsewhere is the same job.

    `elsewhere`: it runs on other machines, which may have files that this one lacks. Raises HarnessError for
    those that are missing, also where none is read.
    """
    tokenizer = None if job.data.tokenizer == "bytes" else job.data.tokenizer
    named = [name for name in (job.model.name, job.data.path, tokenizer) if name]
    require_existing(job, elsewhere=elsewhere)
    for name in named:
        require_plain_input(Path(name), "the job's file")
    if not reads_files:
        return {}
    found = {name: provenance.content_digest(Path(name)) for name in named if os.path.exists(name)}
    factories = (getattr(getattr(job, section), key) for section, key in FACTORIES)
    return found | {given: provenance.factory_digest(given) for given in factories if given}
