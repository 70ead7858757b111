"""Evidence of a diagnosis: the two runs, reruns here, gradients by parameter, repetitions that show noise."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, Literal

from harness.backends import registry
from harness.backends.refusals import suggestion
from harness.backends.registry import REFERENCE
from harness.errors import HarnessError
from harness.files import scratch_folder
from harness.gpus.found import find_gpus
from harness.job.batch import BatchLayout, reference_layout
from harness.job.experiment import Experiment, MeasureSection, RuntimeSection
from harness.judge.agreement import parity
from harness.judge.agreement.job_equivalence import first_step, job_differences
from harness.judge.distance import Sketch, estimate
from harness.judge.quantities import Run as JudgedRun
from harness.judge.rows import reason
from harness.judge.wording import CellName, a_few
from harness.launch.cells import canonical_label, make_cell, noise_labels, same_split_labels, samples_of_cuts
from harness.launch.launcher import LocalLauncher, run_cell, whole
from harness.record import Record
from harness.record.store import (
    RecordFiles,
    Store,
    archive_of,
    place_of_runs,
    read_record,
    read_runs,
    run_folder,
)
from harness.record.workload import depends_on_split, is_another_computation, samples_at_once
from harness.run_directory.assemble import assemble
from harness.run_directory.events import ExaminedEvent, Tail
from harness.run_directory.request import RunRequest, rank_file


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A finished run and where its record lies."""

    path: Path
    record: Record
    place: str = ""
    """Where the other run has the same label and ranks: what `observe --label` called it, else 'first' or
    'second' as given."""

    @property
    def name(self) -> str:
        """'ddp on 2 ranks', or 'ddp on 2 ranks (first)'."""
        return f"{CellName.of(self.record)}" + (f" ({self.place})" if self.place else "")

    @property
    def is_script(self) -> bool:
        """Whether it is an observed script, which nothing can run again from its record."""
        return self.record.observation is not None


def one_job(first: LoadedRun, second: LoadedRun) -> bool:
    """Whether both trained one job; of a script only a part is known, so it is taken as the other's."""
    return first.record.job_id == second.record.job_id or first.is_script or second.is_script


def read_pair(first: Path, second: Path) -> tuple[LoadedRun, LoadedRun]:
    """Read two runs.

    Raises HarnessError for a path without one record, a run that did not finish, a backend that is not
    installed, a script beside a run of another model, different devices, and dropout in runs of one job.
    """
    pair = _read(first), _read(second)
    for run in pair:
        if run.record.status not in ("ok", "diverged") or not run.record.steps:
            why = reason(run.record) or "no step was finished"
            raise HarnessError(
                f"{run.record.run_id} is {run.record.status} ({why}): only finished runs can be diagnosed"
            )
        if not run.is_script:
            canonical_label(run.record.backend.label)
        if parity.has_dropout(run.record) and one_job(*pair):
            apart = job_differences(*(each.record for each in pair))
            known = [f"{d.field} {d.reference} against {d.given}" for d in apart if d.field != "job_id"]
            raise HarnessError(
                f"{run.record.run_id} trained with dropout, so two runs differ by chance"
                f"{'; what else differs: ' if known else ''}{a_few(known)}; repeat both with dropout 0 "
                f"({'in the script' if run.is_script else '--set model.dropout=0'})"
            )
    left, right = (run.record for run in pair)
    shapes = [sorted(p.shape for p in r.layout.parameters) for r in (left, right) if r.layout is not None]
    # Of a script only a part of the job is known: what it trains must have the tensors of the other's.
    if any(run.is_script for run in pair) and len(shapes) == 2 and shapes[0] != shapes[1]:
        raise HarnessError(
            f"these are runs of different models: {len(shapes[0])} parameters in {left.run_id} and "
            f"{len(shapes[1])} in {right.run_id} have other shapes; give two runs that train one model"
        )
    begin, end = max(first_step(left), first_step(right)), min(r.steps[-1].step for r in (left, right))
    if begin > end:
        raise HarnessError(
            f"these runs have no step in common: {left.run_id} took steps {_span(left)}, {right.run_id} "
            f"{_span(right)}"
        )
    devices = [run.record.world.device for run in pair]
    if devices[0] != devices[1]:
        raise HarnessError(
            f"these runs were on {' and '.join(devices)}: kernels differ, not only backends; give two runs "
            "on one kind of device"
        )
    if pair[0].name == pair[1].name:
        given = [run.record.observation.label if run.record.observation else "" for run in pair]
        places = given if given[0] != given[1] else ("first", "second")
        pair = replace(pair[0], place=places[0]), replace(pair[1], place=places[1])
    return pair


def _span(record: Record) -> str:
    return f"{record.steps[0].step} to {record.steps[-1].step}"


def _read(path: Path) -> LoadedRun:
    if not path.exists() and archive_of(path) is None:
        siblings = [sibling.name for sibling in path.parent.glob("*") if sibling.is_dir()]
        hint = suggestion(path.name, siblings) or "Give the folder of a run or its record.json"
        raise HarnessError(f"there is no '{path}'. {hint}")
    found, unreadable = read_runs([path])
    if len(found) == 1 and not unreadable:
        return LoadedRun(path=found[0][0], record=found[0][1])
    runs = place_of_runs(path)
    one = runs / found[0][0].parent.relative_to(runs.resolve())
    raise HarnessError(
        f"'{path}' holds {len(found) + len(unreadable)} records; give the folder of one run, such as {one}"
    )


Sketches = Mapping[str, Sketch]


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What one step of one run did to each parameter."""

    gradients: Sketches | None
    """Of the global batch, before clipping; None: the engine cannot gather them."""
    updates: Sketches
    weight_norms: Mapping[str, float]
    """L2, before the update."""

    @classmethod
    def read(cls, event: ExaminedEvent) -> Examined:
        """From what a rank wrote, where numbers that are not finite are null."""
        return cls(
            gradients=None if event.gradients is None else _numbers(event.gradients),
            updates=_numbers(event.updates),
            weight_norms={k: math.inf if v is None else v for k, v in event.weight_norms.items()},
        )


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One parameter whose gradient or update differs by more than noise."""

    name: str
    difference: float
    """Estimated L2 distance, relative to the baseline's size."""
    allowed: float
    """The largest that rounding explains."""
    ratio: float | None
    """Size in the other run over that in the baseline, negative where it points the other way; None: the
    baseline's is 0."""


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """One kind of tensors of one step in two runs."""

    beyond: tuple[TensorDifference, ...]
    """Farthest first."""
    compared: int
    common_factor: float | None
    """Where something differs and one factor over all tensors explains all of it."""


@dataclass(frozen=True, kw_only=True)
class TensorNoise:
    """The reference's step and its repetitions, which say what noise is for each parameter."""

    reference: Examined
    splits: Sequence[Examined]
    """Same precision, another order of sums."""
    others: Sequence[Examined]
    """Other precisions."""
    precision: str
    factor: float
    """1 between the reference and a run, 2 between two runs."""

    def limits(self, kind: Literal["gradients", "updates"]) -> dict[str, float]:
        """An update is rounded to the spacing of the weight that it is added to."""
        unit, norms = parity.UNIT_ROUNDOFF["fp32"], self.reference.weight_norms
        units = {
            name: unit * max(1.0, norms[name] / sketch[0] if kind == "updates" and sketch[0] else 1.0)
            for name, sketch in (getattr(self.reference, kind) or {}).items()
        }
        tight = self._level(
            kind, self.splits, parity.TIGHT_FACTOR if self.splits else parity.UNMEASURED_FACTOR, units
        )
        if self.precision == "fp32":
            return tight
        if not self.others:
            units = dict.fromkeys(units, parity.UNIT_ROUNDOFF[self.precision])
        band = self._level(kind, self.others, parity.BAND_FACTOR, units)
        return {name: max(tight[name], band[name]) for name in tight}

    def _level(
        self, kind: str, repeats: Sequence[Examined], factor: float, units: Mapping[str, float]
    ) -> dict[str, float]:
        reference = getattr(self.reference, kind)
        distances = [_distances(reference, getattr(repeat, kind)) for repeat in repeats]
        # Each tensor may be off by as much as the entire gradient: a small one is no more precise.
        overall = max((_overall(reference, getattr(repeat, kind)) for repeat in repeats), default=0.0)
        return {
            name: self.factor * factor * max([unit, overall, *(of_repeat[name] for of_repeat in distances)])
            for name, unit in units.items()
        }


def compare_tensors(first: Sketches, second: Sketches, limits: Mapping[str, float]) -> TensorComparison:
    """Tensors that differ by more than their limit; a tensor that is missing is one of zeros."""
    shape = {name: len(sketch) for name, sketch in {**first, **second}.items()}
    first = {name: first.get(name, [0.0] * length) for name, length in shape.items()}
    second = {name: second.get(name, [0.0] * length) for name, length in shape.items()}
    distances = _distances(first, second)
    beyond = [
        TensorDifference(
            name=name,
            difference=distances[name],
            allowed=limits.get(name, 0.0),
            ratio=(-1 if _is_opposite(sketch, second[name]) else 1) * second[name][0] / sketch[0]
            if sketch[0]
            else None,
        )
        for name, sketch in first.items()
        if not distances[name] <= limits.get(name, 0.0)
    ]
    return TensorComparison(
        beyond=tuple(sorted(beyond, key=lambda tensor: -tensor.difference)),
        compared=len(first),
        common_factor=_common_factor(first, second, limits) if beyond else None,
    )


def _common_factor(first: Sketches, second: Sketches, limits: Mapping[str, float]) -> float | None:
    size = _norm(first.values())
    largest = _norm(second.values()) / size if size else 0.0
    if not largest or not math.isfinite(largest):
        return None
    for factor in (largest, -largest):
        scaled = {n: [largest * norm, *(factor * v for v in rest)] for n, (norm, *rest) in first.items()}
        left = _distances(scaled, second)
        if all(left[name] <= limits.get(name, 0.0) for name in first):
            return factor
    return None


def _is_opposite(sketch: Sketch, other: Sketch) -> bool:
    """Whether the one less the other is more than twice as large as their sum."""
    return 2 * estimate([-value for value in sketch], other) < estimate(sketch, other)


def _distances(first: Sketches, second: Sketches) -> dict[str, float]:
    """Distance of each tensor, relative to its size in the first, or to that of all if it is zero there."""
    overall = _norm(first.values())
    return {
        name: estimate(sketch, second.get(name, [0.0] * len(sketch))) / (sketch[0] or overall or 1.0)
        for name, sketch in first.items()
    }


def _overall(first: Sketches, second: Sketches) -> float:
    """Distance of all tensors together, relative to their size in the first."""
    distances = [estimate(sketch, second[name]) for name, sketch in first.items() if name in second]
    return math.hypot(*distances) / (_norm(first.values()) or 1.0)


def _norm(sketches: Any) -> float:
    return math.hypot(*(sketch[0] for sketch in sketches))


def _numbers(sketches: Mapping[str, Sequence[float | None]]) -> Sketches:
    return {
        name: [math.inf if value is None else value for value in sketch] for name, sketch in sketches.items()
    }


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


def rerun(
    record: Record, steps: Sequence[int], launcher: LocalLauncher, say: Say, *, weights: bool = False
) -> Rerun:
    """Repeat a run with the ranks that it had, up to the last of `steps`, and examine those.

    weights: record those that it ends with. Raises HarnessError if the run does not get there.
    """
    world = record.world
    run_folder(Path(), record.run_id)  # refuses what is no name of a folder
    with scratch_folder("diagnose") as scratch:
        folder = Path(scratch)
        request = RunRequest(
            run_id=record.run_id, created_at=record.created_at, command=record.command,
            backend=label_on_one_machine(record), job=record.job, job_id=record.job_id,
            key=record.cell, repeat=record.repeat,
            measure=NOTHING_MEASURED.model_copy(update={"weight_digests": weights}),
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
            f"the loss depends on how the batch is split, and these runs take different numbers of samples "
            f"at once: {taken}; give two runs that take the same"
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
    world = record.world
    return BatchLayout(
        global_batch_size=world.data_size * world.micro_batch_size * world.accumulation_steps,
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
    )


def _reference_layout(record: Record) -> BatchLayout:
    return reference_layout(recorded_layout(record), experiment_of(record).training)


@dataclass(frozen=True, kw_only=True)
class NoiseRuns:
    """The reference of a job and its repetitions."""

    reference: Record | None
    """None: it could not be run here."""
    repeats: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Label of the run that others are compared with."""
        return self.reference.backend.label if self.reference is not None else REFERENCE

    def noise(self, fallback: Record) -> parity.Noise:
        """The limits of the job; without a reference the lower bounds, in the size of `fallback`."""
        return parity.measure_noise(self.reference or fallback, self.repeats)

    def baseline(self, pair: tuple[LoadedRun, LoadedRun]) -> tuple[LoadedRun, LoadedRun]:
        """The pair with the run first that is the reference, else the only one that agrees with it."""
        for run, other in (pair, pair[::-1]):
            if run.record.backend.label == self.label:
                return run, other
        agrees = [self.vouch_for(run.record) for run in pair]
        return (pair[1], pair[0]) if agrees == [False, True] else pair

    def vouch_for(self, record: Record) -> bool:
        if self.reference is None or record.backend.label == self.label:
            return record.backend.label == self.label
        judged = parity.judge(JudgedRun.of(self.reference), JudgedRun.of(record), self.noise(record))
        return judged.parity in _AGREES

    def derivation(self, baseline: Record) -> tuple[str, ...]:
        """Where the limits come from, one sentence each."""
        sentences = self.noise(baseline).derivation
        if baseline.backend.label == self.label:
            return sentences
        return (*sentences, "twice as much between two runs: each may differ that much from the reference")

    def limits(self, baseline: Record, other: Record) -> parity.Tolerance:
        """What rounding explains between the baseline and another run.

        Each of two runs may lie as far from the reference as `compare` allows, so as far as both together
        from each other.
        """
        noise = self.noise(baseline)
        if baseline.backend.label == self.label:
            return noise.widest(other)
        return noise.widest(baseline).joined(noise.widest(other), add)


_AGREES = ("exact", "tight", "band")


def find_noise_runs(
    pair: tuple[LoadedRun, LoadedRun],
    labels: Callable[[Record | None], Sequence[str]],
    run_missing: Callable[[list[str]], list[Record]],
) -> NoiseRuns:
    """The reference and its repetitions: of the pair, of the folders around it, and the rest run now.

    `labels`: which, by the plain reference; the first is what the pair is held to.
    """
    known = _records_nearby(pair)

    def add(wanted: Sequence[str]) -> None:
        missing = [label for label in wanted if label not in {record.backend.label for record in known}]
        if missing:
            known.extend(run_missing(missing))

    def labelled(label: str) -> Record | None:
        return next((record for record in known if record.backend.label == label), None)

    add([REFERENCE])
    plain = labelled(REFERENCE)
    wanted = labels(plain)
    add(wanted)
    reference = labelled(wanted[0])
    repeats = [record for record in known if record is not reference] if reference is not None else []
    if reference is not None and reference is not plain and plain is not None:
        reference = reference.model_copy(update={"split": plain.split})
        repeats = [record for record in repeats if not is_another_computation(record, reference)]
    return NoiseRuns(reference=reference, repeats=tuple(repeats))


def recorded_noise(pair: tuple[LoadedRun, LoadedRun]) -> NoiseRuns:
    """The reference of the first run's job, and its repeats, where they lie next to the pair.

    Raises HarnessError if the loss depends on the split of the batch and the runs split it differently.
    """

    def labels(plain: Record | None) -> Sequence[str]:
        if plain is None or not depends_on_split(plain):
            return [REFERENCE]
        return reference_labels(plain, [run.record for run in pair])

    return find_noise_runs(pair, labels, lambda _: [])


def in_one_split(
    pair: tuple[LoadedRun, LoadedRun], noise_runs: NoiseRuns, say: Say
) -> tuple[LoadedRun, LoadedRun]:
    """The pair, with the plain reference replaced by the one that takes as many samples at once."""
    reference = noise_runs.reference
    if reference is None or reference.backend.label == REFERENCE:
        return pair
    found: list[LoadedRun] = []
    for run in pair:
        if run.record.backend.label == REFERENCE:
            instead = f"{reference.backend.label} stands for {REFERENCE}"
            say(f"the loss depends on how the batch is split: {instead}")
            run = LoadedRun(path=run.path, record=reference)
        found.append(run)
    return found[0], found[1]


def _records_nearby(pair: tuple[LoadedRun, LoadedRun]) -> list[Record]:
    """Runs of the reference of this job by the same code on the same kind of device, the pair's own first."""
    found = {run.path: run.record for run in pair}
    files = RecordFiles()
    for run in pair:
        for path in files.of_runs(run.path.parent.parent):
            if f"-{REFERENCE}-n1-" not in path.parent.name:
                continue
            try:
                found.setdefault(path.resolve(), read_record(path, files))
            except HarnessError:
                continue  # a damaged record of another run does not concern this pair
    job_id, device = pair[0].record.job_id, pair[0].record.world.device
    codes = {run.record.environment.code for run in pair}
    return [
        record
        for record in found.values()
        if record.backend.name == REFERENCE
        and record.status == "ok"
        and record.resumed is None
        and record.job_id == job_id
        and record.world.device == device
        and record.environment.code in codes
    ]
