"""Runs what a diagnosis needs on this machine: a rerun of a record, or repetitions of the reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.backends import registry
from harness.backends.registry import REFERENCE
from harness.diagnose.tensors import Examined
from harness.errors import HarnessError
from harness.gpus.found import find_gpus
from harness.job.batch import BatchLayout, reference_layout
from harness.job.experiment import Experiment, MeasureSection, RuntimeSection
from harness.judge.rows import reason
from harness.launch.cells import make_cell, noise_labels, same_split_labels, samples_of_cuts
from harness.launch.launcher import LocalLauncher, run_cell, whole
from harness.record import Record
from harness.record.store import Store, run_folder
from harness.record.workload import is_another_computation, samples_at_once
from harness.run_directory.assemble import assemble
from harness.run_directory.events import ExaminedEvent, Tail
from harness.run_directory.request import RunRequest, rank_file
from harness.scratch import scratch_folder

RANKS_PER_CORE = 4
"""CPU ranks that share a core are slow, not wrong; with more of them a rerun would hardly end."""
NOTHING_MEASURED = MeasureSection(warmup_steps=10**9, probed_steps=0, traced_steps=0)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A recorded run, made again up to a step."""

    record: Record
    examined: dict[int, Examined]
    """By step."""


def require_room(record: Record) -> None:
    """Raise HarnessError if this machine cannot hold the ranks of a run, whatever nodes they were on."""
    world = record.world
    if world.device == "cuda":
        room, unit = find_gpus().count, "GPUs"
    else:
        room, unit = RANKS_PER_CORE * (os.cpu_count() or 1), "CPU ranks"
    if world.world_size <= room:
        return
    where = f" of {world.nodes} nodes" if world.nodes > 1 else ""
    instead = (
        f"repeat both runs on at most {room} ranks (harness compare --nproc {room}, same settings) and "
        "diagnose those"
        if room
        else "diagnose on a machine with GPUs, or repeat both runs with --set runtime.device=cpu"
    )
    raise HarnessError(
        f"{record.run_id} had {world.world_size} ranks{where} and this machine takes {room} {unit}: {instead}"
    )


def rerun(record: Record, steps: Sequence[int], launcher: LocalLauncher, say: Say) -> Rerun:
    """Repeat a run with the ranks that it had, up to the last of `steps`, and examine those.

    Raises HarnessError if the run does not get there.
    """
    world = record.world
    run_folder(Path(), record.run_id)  # refuses what is no name of a folder
    with scratch_folder("diagnose") as scratch:
        folder = Path(scratch)
        request = RunRequest(
            run_id=record.run_id, created_at=record.created_at, command=record.command,
            backend=label_on_one_machine(record), job=record.job, job_id=record.job_id,
            cell=record.cell, repeat=record.repeat,
            measure=NOTHING_MEASURED.model_copy(update={"weight_digests": False}),
            preset=world.preset, device=world.device, world_size=world.world_size,
            ranks_per_node=world.world_size, threads_per_rank=world.threads_per_rank,
            micro_batch_size=world.micro_batch_size, accumulation_steps=world.accumulation_steps,
            examine_steps=list(steps),
        )  # fmt: skip
        request.write(folder)
        say(f"rerunning {record.backend.label} up to step {max(steps)}")
        outcome = whole(launcher.running(folder, request, lambda _: None))
        events = Tail(rank_file(folder, 0)).read()
        again = assemble(folder, request, outcome)
    if outcome.stopped == "interrupted":
        raise KeyboardInterrupt
    examined = {event.step: Examined.read(event) for event in events if isinstance(event, ExaminedEvent)}
    if set(examined) != set(steps):
        raise HarnessError(
            f"{record.backend.label} could not be rerun up to step {max(steps)}: "
            f"{reason(again) or again.status}"
        )
    return Rerun(record=again, examined=examined)


def label_on_one_machine(record: Record) -> str:
    """The run's backend; hybrid sharding keeps the shard groups that it derived from several nodes."""
    label = record.backend.label
    _, options = registry.parse(label)
    if record.world.nodes > 1 and getattr(options, "shard_size", 0) is None:
        return registry.label_with(label, shard_size=record.world.ranks_per_node)
    return label


def experiment_of(record: Record) -> Experiment:
    """The job of a record with nothing measured, as this machine runs it."""
    world = record.world
    return Experiment(
        **dict(record.job),
        measure=NOTHING_MEASURED,
        runtime=RuntimeSection(
            threads_per_rank=world.threads_per_rank * world.ranks_per_node,
            preset=world.preset,  # type: ignore[arg-type]
        ),
    )


def reference_labels(reference: Record | None, records: Sequence[Record]) -> list[str]:
    """The reference that these runs are held to, and the repetitions of it that measure noise.

    `reference`: the plain one. Where the loss hangs on the split of a batch, theirs is taken. Raises
    HarnessError if they have several then, or draw random numbers for each part.
    """
    experiment = experiment_of(records[0])
    parts = {record.world.mesh.size("tensor") for record in records}
    if reference is None or not any(is_another_computation(record, reference) for record in records):
        if reference is not None and (cuts := samples_of_cuts(reference, records)):
            return [REFERENCE, *same_split_labels(cuts[0], experiment, parts)[1:]]
        return [REFERENCE, *noise_labels(_reference_layout(records[0]), experiment, parts)]
    samples = {samples_at_once(record) for record in records if record.backend.label != REFERENCE}
    if len(samples) > 1:
        taken = " and ".join(f"{samples_at_once(r)} in {r.run_id}" for r in records)
        raise HarnessError(
            f"the loss depends on how the batch is split, and these runs take other numbers of samples at "
            f"once: {taken}; give two runs with one"
        )
    if reference.split is not None and reference.split.varies:
        raise HarnessError(
            "the loss depends on how the batch is split and draws random numbers for each part, or keeps a "
            "state that each pass changes, so two runs differ by chance; fix the numbers, make them depend "
            "on the sample alone, or give runs with training.accumulation_steps passes a step"
        )
    return same_split_labels(samples.pop(), experiment, parts)


def run_references(record: Record, labels: Iterable[str], launcher: LocalLauncher, say: Say) -> list[Record]:
    """Run the reference of a run's job in these ways; records of those that finished.

    Raises HarnessError if the job can no longer be made as it was.
    """
    if launcher.device == "cuda" and not find_gpus().count:
        say("noise cannot be measured: these runs were on GPUs and this machine has none")
        return []
    experiment, layout = experiment_of(record), _reference_layout(record)
    done = []
    with scratch_folder("diagnose") as scratch:
        store = Store(Path(scratch))
        for label in labels:
            cell = make_cell(experiment, label, 1, layout, 0, launcher.device)
            if cell.job_id != record.job_id:
                raise HarnessError(
                    f"the job of {record.run_id} cannot be rebuilt: the files that it names or the "
                    "settings of this harness have changed since; repeat both runs"
                )
            say(f"measuring noise: {label}")
            made = run_cell(cell, store, launcher, command=["harness", "diagnose"])
            if made.status == "ok":
                done.append(made)
            else:
                say(f"{label} cannot measure noise: it is {made.status} ({reason(made)})")
    return done


def recorded_layout(record: Record) -> BatchLayout:
    """How a run cut its global batch."""
    world = record.world
    return BatchLayout(
        global_batch_size=world.data_size * world.micro_batch_size * world.accumulation_steps,
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
    )


def _reference_layout(record: Record) -> BatchLayout:
    return reference_layout(recorded_layout(record), experiment_of(record).training)
