"""The largest micro-batch that fits, predicted first and then found by real runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.options import parts_of
from harness.backends.pipeline.cut import not_whole
from harness.errors import HarnessError
from harness.gpus.found import find_gpus
from harness.job.batch import BatchLayout, batch_layout
from harness.job.experiment import Experiment, read_bytes
from harness.judge import quantities
from harness.judge.rows import reason
from harness.judge.wording import counted, listed, percent, ranks
from harness.launch.cells import make_cell, reusable
from harness.launch.launcher import EventHandler, LocalLauncher, run_cell
from harness.plan.alternatives import RELIEFS, changes_of
from harness.plan.hardware import MemoryLimits, load_hardware
from harness.plan.model import PlannedModel
from harness.plan.prediction import MemoryPrediction, Predictors, predict
from harness.plan.preflight import DOES_NOT_FIT, UNKNOWN_STRATEGY, is_reference, judged
from harness.plan.scenario import (
    Scenario,
    data_bytes,
    planned_model,
    scenario_of,
    why_memory_unknown,
    why_not_planned,
    with_settings,
)
from harness.plan.search import USUAL, divisors, largest_predicted
from harness.plan.trust import Trust, trust_in
from harness.record import Record
from harness.record.provenance import host_memory_bytes
from harness.record.store import Store
from harness.run_directory.request import RunRequest
from harness.tell.formats import NOT_AVAILABLE, fitted, gigabytes, megabytes

STRIDE = 32
"""The first step away from the first guess: this part of it. Predictions are right within some percent."""
GROWTH = 4
"""Each further step over the one before."""
MOST_ON_ONE_SIDE = 2
"""Estimates in a row; then the gap is halved once, should they be wrong."""
FRACTIONS = (2, 4)
"""Parts of the largest size that are tried as well: the largest is not always the fastest."""


class OutOfTrials(Exception):
    """The next trial would be one too many."""


def largest_fitting(
    sizes: Sequence[int],
    first: int,
    fits: Callable[[int], bool],
    estimate: Callable[[], int | None] = lambda: None,
) -> int | None:
    """The largest of `sizes` for which `fits` holds; None: not even the first.

    sizes: ascending; whatever is below one that fits fits too. first: the guess to begin with; a right one
    costs two trials. `estimate` says where the largest may be, from what was tried so far; None: it cannot.
    `fits` may raise OutOfTrials.
    """
    low, high = -1, len(sizes)  # fits, does not fit
    probe = min(max(_position(sizes, first), 0), high - 1)
    stride = max(1, probe // STRIDE)
    on_one_side = 0
    while high - low > 1:
        is_fitting = fits(sizes[probe])
        low, high = (probe, high) if is_fitting else (low, probe)
        guess = estimate() if low >= 0 and on_one_side < MOST_ON_ONE_SIDE else None
        if guess is not None:
            probe = _position(sizes, guess)
            on_one_side += 1
        elif low >= 0 and high < len(sizes):
            probe = (low + high) // 2
            on_one_side = 0
        else:
            probe = low + stride if is_fitting else high - stride
            stride *= GROWTH
            on_one_side = 0
        probe = min(max(probe, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _position(sizes: Sequence[int], size: int) -> int:
    """Index of the largest that is not above `size`; -1: there is none."""
    return bisect_right(sizes, size) - 1


def smaller_ones(sizes: Sequence[int], largest: int) -> list[int]:
    """Sizes near fixed fractions of the largest, in falling order."""
    found = (sizes[max(0, _position(sizes, largest // part))] for part in FRACTIONS)
    return list(dict.fromkeys(size for size in found if size < largest))


FITTING = ("ok", "diverged")
"""Statuses of runs whose memory sufficed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch and sequence, and the run that tried them."""

    micro_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    sequence_length: int
    predicted_bytes: int | None
    """Peak of the allocator; None: nothing is known of the backend's strategy."""
    status: str
    """Of the record."""
    peak_bytes: int | None
    """Largest peak of the allocator of any rank in the probed steps; None: not measured."""
    tokens_per_second: float | None
    """Over the timed steps, all ranks together."""
    slowest_tokens_per_second: float | None
    """Of the slowest timed step."""
    fastest_tokens_per_second: float | None
    num_alloc_retries: int | None
    """CUDA: of the rank with most of them, in the whole run."""
    run_id: str

    @property
    def fits(self) -> bool:
        return self.status in FITTING

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted_bytes is None or not self.peak_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"prediction_error": self.prediction_error}


def trial_of(record: Record, predicted_bytes: int | None) -> Trial:
    """What a run says of the size that it tried."""
    world = record.world
    rates = [step.tokens / step.seconds for step in quantities.timed_steps(record) if step.tokens is not None]
    retries = [rank.num_alloc_retries for rank in record.ranks if rank.num_alloc_retries is not None]
    return Trial(
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
        global_batch_size=world.micro_batch_size * world.accumulation_steps * world.data_size,
        sequence_length=record.job.data.sequence_length,
        predicted_bytes=predicted_bytes,
        status=record.status,
        peak_bytes=max(quantities.Run.of(record).rank_peaks, default=None),
        tokens_per_second=quantities.rate(record, "tokens"),
        slowest_tokens_per_second=min(rates, default=None),
        fastest_tokens_per_second=max(rates, default=None),
        num_alloc_retries=max(retries, default=None),
        run_id=record.run_id,
    )


def fastest(trials: list[Trial]) -> Trial | None:
    """The trial with most tokens per second; of equals the smaller, which leaves more memory free."""
    timed = [trial for trial in trials if trial.fits and trial.tokens_per_second is not None]
    return min(timed, key=lambda t: (-(t.tokens_per_second or 0.0), t.micro_batch_size), default=None)


def tied_with(best: Trial, trials: list[Trial]) -> list[Trial]:
    """Trials whose timed steps overlap with those of the fastest: these runs do not tell them apart."""
    return [
        trial
        for trial in trials
        if trial is not best
        and trial.fits
        and trial.fastest_tokens_per_second is not None
        and best.slowest_tokens_per_second is not None
        and trial.fastest_tokens_per_second >= best.slowest_tokens_per_second
    ]


LARGEST_MICRO_BATCH = 2**16
WARMUP_STEPS = 2
"""From the third step on every step does as all later ones (`harness.forms.workload.ORDINARY_STEP`)."""
PROBED_STEPS = 1
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Ascending sizes to try."""

    sizes: Sequence[int]
    bound: str
    """Why there are no larger ones."""
    remark: str | None = None
    """What trying them does to the job; None: nothing."""


def micro_batches(experiment: Experiment, world_size: int, *, parts: int = 1) -> Sizes:
    """Micro-batches to try: those that leave the global batch as it is, or all if the job has none.

    parts: a pipeline's, which a micro-batch must be a multiple of. Raises HarnessError where the job leaves
    no choice.
    """
    training = experiment.training
    total = training.global_batch_size
    if total is None:
        times = training.accumulation_steps or 1
        return Sizes(
            sizes=range(parts, LARGEST_MICRO_BATCH + 1, parts),
            bound=f"no larger micro-batch than {LARGEST_MICRO_BATCH} is tried",
            remark="the job gives no training.global_batch_size, so the global batch grows with the "
            f"micro-batch ({ranks(world_size)} x micro-batch x {times})",
        )
    if training.accumulation_steps is not None:
        raise HarnessError(
            f"training.global_batch_size {total} and accumulation_steps {training.accumulation_steps} leave "
            "no choice of the micro-batch; leave one of them out"
        )
    if total % world_size:
        raise HarnessError(
            f"training.global_batch_size {total} does not divide among {world_size} ranks; change one of them"
        )
    own = total // world_size
    if own % parts:
        raise HarnessError(not_whole(own, parts))
    return Sizes(
        sizes=divisors(own, parts),
        bound=f"the global batch of {total} has {own} samples for each of {world_size} ranks",
    )


def trial_experiment(
    experiment: Experiment,
    *,
    micro_batch_size: int,
    limit_bytes: int | None = None,
) -> Experiment:
    """The job for one trial: few steps, memory probed in one of them, nothing else measured."""
    document: dict[str, Any] = experiment.model_dump(mode="python")
    document["training"] |= {
        "micro_batch_size": micro_batch_size,
        "steps": WARMUP_STEPS + PROBED_STEPS + TIMED_STEPS,
        "epochs": None,
    }
    document["evaluation"] |= {"every_steps": None, "answer_tokens": None}
    document["measure"] = {
        "warmup_steps": WARMUP_STEPS,
        "probed_steps": PROBED_STEPS,
        "traced_steps": 0,
        "cooldown_steps": 0,
        "weight_digests": False,
    }
    if limit_bytes is not None:
        document["runtime"] |= {"memory_limit": limit_bytes}
    return Experiment.model_validate(document)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a rank's allocator may serve."""

    limit_bytes: int
    origin: str
    """What was typed, or what was asked."""
    imposed: bool
    """Whether runs must be told to stay below it; a device does so by itself."""


def find_limit(
    given: str | None, configured: int | None, device: str, world_size: int, hardware: Path | None = None
) -> Limit:
    """The limit of each rank: as typed, else as configured, else the smallest memory of this machine's GPUs.

    hardware: a file with GPUs of the user.

    Raises HarnessError where there is none, or the ranks together could outgrow the machine.
    """
    if given is not None:
        limit = _typed_limit(given, hardware)
    elif configured is not None:
        limit = Limit(limit_bytes=configured, origin="runtime.memory_limit", imposed=True)
    elif device == "cuda":
        gpus = find_gpus()
        if gpus.smallest_bytes is None:
            raise HarnessError(f"no GPU can be used: {gpus.why_none}; give the memory of a rank with --limit")
        return Limit(limit_bytes=gpus.smallest_bytes, origin="memory of the GPU", imposed=False)
    else:
        raise HarnessError(
            "ranks on the CPU share the memory of the machine; give each a limit, such as --limit 2GB"
        )
    together, there = limit.limit_bytes * world_size, host_memory_bytes()
    if device == "cpu" and together > there:
        raise HarnessError(
            f"--limit {limit.origin} on {world_size} ranks is {gigabytes(together)} GB, but this machine has "
            f"{gigabytes(there)} GB; lower --limit or --nproc, or plan for GPUs that are not here with "
            "`harness estimate --gpu NAME`"
        )
    return limit


def _typed_limit(text: str, hardware: Path | None) -> Limit:
    """Bytes, or a GPU, of which an allocator can serve all but the context."""
    if text.strip()[:1].isdigit() or text.strip().startswith("-"):
        try:
            if text.strip().isdigit() and int(text) < 1_000_000:
                raise ValueError(f"no run fits in {text} bytes; for gigabytes write {text.strip()}GB")
            return Limit(limit_bytes=read_bytes(text), origin=text, imposed=True)
        except ValueError as error:
            raise HarnessError(f"--limit was given '{text}': {error}") from error
    try:
        device = load_hardware(hardware).device(text)
    except HarnessError as error:
        raise HarnessError(f"--limit takes bytes such as 2GB, or a GPU: {error}") from error
    return Limit(limit_bytes=device.usable_bytes, origin=device.name, imposed=True)


@dataclass(kw_only=True)
class Runner:
    """Tries sizes under one backend and remembers each trial."""

    experiment: Experiment
    label: str
    world_size: int
    limit: Limit
    launcher: LocalLauncher
    store: Store
    command: list[str]
    most_runs: int
    fresh: bool
    on_event: Callable[[RunRequest], EventHandler]
    """Given a cell, returns what follows the events of its run."""
    on_trial: Callable[[Trial], None]
    on_prediction: Callable[[], object] = lambda: None
    trials: list[Trial] = field(default_factory=list)
    _runs: int = 0

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return self.launcher.check(self._cell(1).job.model_dump_json())

    @cached_property
    def model(self) -> PlannedModel:
        """The model of the job. Raises JobError if no backend could run it."""
        return planned_model(self._facts, self.experiment.job())

    def peaks(
        self, micro_batch_size: int, label: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> Sequence[int]:
        """Predicted peak of the allocator; its least and its most where activations are not predicted;
        nothing where the strategy or these are not known, or other settings cannot run."""
        cell = self._cell(micro_batch_size, label)
        asked = scenario_of(cell, self.model)
        scenario = asked and with_settings(asked, settings or {})
        world = World.planned(self.world_size, self.world_size, cell.device)
        if not scenario or why_not_planned(cell.backend, scenario.job, world, micro_batch_size, self.model):
            return []
        data = data_bytes(self._facts, cell.job, self.launcher.device)
        found = predict(scenario, self._predictors, timed=False)
        known = [found.memory] if found.memory else found.memory_bounds or ()
        if not known and why_memory_unknown(scenario) is None:
            raise HarnessError(str(found.memory_unknown))
        return [memory.peak_bytes + data for memory in known]

    def ways_out(self, size: int) -> list[dict[str, Any]]:
        """Changes with which a size is predicted to fit: each alone or, if none does, with all of `RELIEFS`,
        which leave the training as it is."""
        others = [label for label in USUAL if label != self.label and self.world_size > 1]
        changes = changes_of(self.experiment.job(), is_mixture=False)  # of which no peak is known
        ways = {**RELIEFS, **{label: {} for label in others}, **changes}
        found: list[dict[str, Any]] = []
        for more in ({}, {key: value for given in RELIEFS.values() for key, value in given.items()}):
            for name, given in ways.items() if not found else ():
                settings, label = {**more, **given}, name if name in others else self.label
                peak = self.limit.limit_bytes + 1
                with suppress(HarnessError):  # LoRA of a model that peft does not know
                    peak = max(self.peaks(size, label, settings), default=peak)
                if peak <= self.limit.limit_bytes:
                    name += f", with {listed([*RELIEFS])}" if more else ""
                    found.append({"name": name, "backend": label, "settings": settings, "peak_bytes": peak})
        return found

    @cached_property
    def _predictors(self) -> Predictors:
        traced = Predictors.traced_by(self.launcher.trace)

        def memory(scenario: Scenario) -> MemoryPrediction:
            self.on_prediction()
            return traced.memory(scenario)

        return replace(traced, memory=memory)

    def why_unpredicted(self) -> str | None:
        """Why no size has a prediction; None: they have."""
        return UNKNOWN_STRATEGY if self._smallest is None else why_memory_unknown(self._smallest)

    def trust(self) -> Trust | None:
        """How wrong such predictions have been; None: nothing is predicted."""
        if self._smallest is None or why_memory_unknown(self._smallest):
            return None
        return trust_in(self._smallest, speed=False)

    @cached_property
    def _smallest(self) -> Scenario | None:
        """Scenario of one sample; None: nothing is known of the backend's strategy."""
        return scenario_of(self._cell(1), self.model)

    def run(self, micro_batch_size: int) -> Trial:
        """Try one size, or return the trial of it. Raises OutOfTrials, and HarnessError if a run fails."""
        if self._runs >= self.most_runs:
            raise OutOfTrials
        cell = self._cell(micro_batch_size)
        known = {} if self.fresh else reusable(self.store.records()[0], cell.key.__eq__)
        if (record := known.get(cell.key)) is None:
            self._runs += 1
            on_event = self.on_event(cell)
            record = run_cell(cell, self.store, self.launcher, command=self.command, on_event=on_event)
        if record.status not in (*FITTING, "oom"):
            raise HarnessError(
                f"the trial of micro-batch {micro_batch_size} ended as {record.status}: {reason(record)} "
                f"(record and logs: {self.store.root / record.run_id})"
            )
        peaks = self.peaks(micro_batch_size)
        trial = trial_of(record, peaks[0] if len(peaks) == 1 else None)
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def _cell(self, micro_batch_size: int, label: str | None = None) -> RunRequest:
        experiment = trial_experiment(
            self.experiment,
            micro_batch_size=micro_batch_size,
            limit_bytes=self.limit.limit_bytes if self.limit.imposed else None,
        )
        layout = batch_layout(experiment.training, self.world_size)
        return make_cell(experiment, label or self.label, self.world_size, layout, 0, self.launcher.device)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of the search."""

    sizes: Sizes
    predicted: int | None
    """The largest size that the prediction lets fit; None: not even the smallest, or nothing is predicted."""
    unpredicted: str | None
    """Why nothing is."""
    predicted_between: tuple[int | None, int | None] | None = None
    """Then what fits if it needs the most that it can, and the least; None: neither is known."""
    trials: list[Trial]
    """Of sizes that ran."""
    complete: bool
    """False: the search ended for want of runs."""

    @property
    def largest(self) -> Trial | None:
        """None: not even the smallest size fits."""
        fitting = (trial for trial in self.trials if trial.fits)
        return max(fitting, key=lambda one: one.micro_batch_size, default=None)

    @property
    def fastest(self) -> Trial | None:
        return fastest(self.trials)

    @property
    def tied(self) -> list[Trial]:
        """Trials that the timed steps do not tell from the fastest."""
        return tied_with(self.fastest, self.trials) if self.fastest else []

    @property
    def too_large(self) -> int | None:
        return _too_large(self.trials)

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted": self.predicted,
            "unpredicted": self.unpredicted,
            "predicted_between": self.predicted_between,
            "largest": self.largest.as_json() if self.largest else None,
            "fastest": self.fastest.as_json() if self.fastest else None,
            "tied_with_fastest": [trial.run_id for trial in self.tied],
            "too_large": self.too_large,
            "complete": self.complete,
            "bound": self.sizes.bound,
            "remark": self.sizes.remark,
        }


def find(runner: Runner, sizes: Sizes, asked: int | None) -> Found:
    """Search the micro-batch. `asked`: the job's own, the first guess where nothing is predicted."""
    peaks = runner.peaks
    limit, smallest = runner.limit.limit_bytes, sizes.sizes[0]
    known = len(peaks(smallest))
    is_predicted = known == 1
    guess: int | None = None
    ends: tuple[int | None, int | None] | None = None

    def largest_of(bound: int) -> int | None:
        return largest_predicted(sizes.sizes, lambda size: (*peaks(size), 0, 0)[bound] <= limit)

    if is_predicted:
        guess = largest_of(0)
    elif known:
        ends = largest_of(1), largest_of(0)
        asked = ends[0] or smallest
    tried: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = runner.run(size)
        return tried[size].fits

    def estimate() -> int | None:
        return _estimate(list(tried.values()), sizes.sizes, limit, peaks)

    complete = True
    try:
        largest = largest_fitting(
            sizes.sizes, guess or (smallest if is_predicted else asked or smallest), fits, estimate
        )
        for size in smaller_ones(sizes.sizes, largest) if largest is not None else ():
            fits(size)
    except OutOfTrials:
        complete = False
    return Found(
        sizes=sizes, predicted=guess, unpredicted=None if is_predicted else runner.why_unpredicted(),
        predicted_between=ends, trials=list(tried.values()), complete=complete,
    )  # fmt: skip


def _estimate(
    tried: Sequence[Trial],
    sizes: Sequence[int],
    limit: int,
    peaks: Callable[[int], Sequence[int]],
) -> int | None:
    """Where the limit lies on the line through the two largest measured peaks. With one peak: where the
    prediction scaled to that peak reaches it, or a peak in proportion to the size if runs disprove that."""
    measured = sorted(
        (trial.micro_batch_size, trial.peak_bytes) for trial in tried if trial.peak_bytes is not None
    )
    if len(measured) > 1:
        (size, peak), (larger, larger_peak) = measured[-2:]
        slope = (larger_peak - peak) / (larger - size)
        return int(larger + (limit - larger_peak) / slope) if slope > 0 else None
    if not measured:
        return None
    size, peak = measured[0]
    predicted, too_large = peaks(size), _too_large(tried)
    if len(predicted) == 1 and predicted[0]:
        guess = largest_predicted(sizes, lambda o: (*peaks(o), 0)[0] * peak / predicted[0] <= limit)
        if guess is not None and (too_large is None or guess < too_large):
            return guess
    return size * limit // peak


def _too_large(tried: Sequence[Trial]) -> int | None:
    """The smallest size that ran out of memory."""
    return min((trial.micro_batch_size for trial in tried if not trial.fits), default=None)


HEADERS = (
    "micro-batch", "accumulation", "predicted MB", "measured MB", "error", "status", "tokens/s",
    "retries",
)  # fmt: skip

LEAST_ERROR = 1e-4
"""Smaller errors of a prediction are only said to be smaller."""


def answer_lines(found: Found, limit: Limit) -> list[str]:
    """The largest, that of highest throughput, how good the prediction was, and what limits the answer."""
    lines = [_largest(found, limit)]
    timed = [trial for trial in found.trials if trial.tokens_per_second is not None]
    if found.fastest is not None and len(timed) > 1:
        lines.append(_fastest(found, found.fastest))
    lines.append(_predicted(found))
    if not found.complete:
        lines.append("not finished: raise --most-runs, which ended the search")
    if found.sizes.remark is not None:
        lines.append(f"note: {found.sizes.remark}")
    return lines


def trial_line(trial: Trial) -> str:
    """One trial as it ends."""
    measured = (
        f"peak {megabytes(trial.peak_bytes)} MB" if trial.peak_bytes is not None else "no peak measured"
    )
    rate = f", {trial.tokens_per_second:,.0f} tokens/s" if trial.tokens_per_second is not None else ""
    return (
        f"micro-batch {trial.micro_batch_size}: {trial.status}, "
        f"{measured} (predicted {megabytes(trial.predicted_bytes)} MB){rate}"
    )


def trial_table(trials: Sequence[Trial]) -> str:
    """All trials, by micro-batch."""
    ordered = sorted(trials, key=lambda trial: trial.micro_batch_size)
    rows = [
        [
            str(trial.micro_batch_size), str(trial.accumulation_steps),
            megabytes(trial.predicted_bytes), megabytes(trial.peak_bytes),
            NOT_AVAILABLE if (error := trial.prediction_error) is None else f"{error * 100:+.1f} %",
            trial.status,
            NOT_AVAILABLE if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
            NOT_AVAILABLE if trial.num_alloc_retries is None else str(trial.num_alloc_retries),
        ]
        for trial in ordered
    ]  # fmt: skip
    return fitted(rows, HEADERS, alignments=dict.fromkeys(HEADERS, "right"))


def error_line(trials: Sequence[Trial]) -> str | None:
    """How far predicted peaks were from measured ones; None where nothing can be compared."""
    errors = [abs(error) for trial in trials if (error := trial.prediction_error) is not None]
    if not errors:
        return None
    return (
        f"error of the predicted peaks: mean {_small(mean(errors))}, worst {_small(max(errors))} "
        f"({counted(len(errors), 'run')})"
    )


def _largest(found: Found, limit: Limit) -> str:
    if found.largest is None:
        smallest = found.sizes.sizes[0]
        return (
            f"largest micro-batch: none. Even {smallest} runs out of memory with "
            f"{megabytes(limit.limit_bytes)} MB ({limit.origin})"
        )
    size = found.largest.micro_batch_size
    peak = found.largest.peak_bytes
    used = ""
    if peak is not None:
        share = percent(peak / limit.limit_bytes)
        used = f": peak {megabytes(peak)} MB of {megabytes(limit.limit_bytes)} MB ({share})"
    above = [larger for larger in found.sizes.sizes if larger > size][:1]
    if not found.complete and above and above[0] != found.too_large:
        text = f"largest micro-batch: at least {size} (ended after {counted(len(found.trials), 'run')}){used}"
        return text if found.too_large is None else f"{text}; {found.too_large} runs out of memory"
    because, too_large = found.sizes.bound, found.too_large
    if too_large is not None:
        has_gap = too_large - size > 1 and not isinstance(found.sizes.sizes, range)
        because = f"{too_large} runs out of memory{f' ({because})' if has_gap else ''}"
    return f"largest micro-batch: {size}{used}; {because}"


def _fastest(found: Found, best: Trial) -> str:
    rate = f"{best.tokens_per_second or 0:,.0f} tokens/s"
    text = (
        f"highest throughput: micro-batch {best.micro_batch_size}, {rate} "
        "(one run of each size, not tested against noise)"
    )
    others = [str(trial.micro_batch_size) for trial in found.tied]
    if others:
        text += f"; timed steps overlap with those of {listed(others)}, so these are not ranked"
    if best.num_alloc_retries:
        text += f"; {counted(best.num_alloc_retries, 'allocator retry')}"
    return text


def _predicted(found: Found) -> str:
    largest = found.largest.micro_batch_size if found.largest else None
    if found.predicted_between is not None:
        most, least = (end or "none" for end in found.predicted_between)
        return f"predicted: between {most} and {least}, measured: {largest or 'none'}; {found.unpredicted}"
    if found.unpredicted is not None:
        return f"predicted: {NOT_AVAILABLE}: {found.unpredicted}"
    if found.predicted is None:
        return "predicted: nothing fits" + ("" if largest is None else f", measured: {largest}")
    if found.predicted == largest:
        return f"predicted: {found.predicted}, as measured"
    return f"predicted: {found.predicted}, measured: {largest or 'none'}"


def _small(error: float) -> str:
    return percent(error) if error >= LEAST_ERROR else f"below {percent(LEAST_ERROR)}"


@dataclass(frozen=True, kw_only=True)
class LargestBatches:
    """Cuts the global batch for each backend; what is computed stays the same.

    `facts`: by job id, what the check of the job returned (`rank.job_check`).
    """

    experiment: Experiment
    limits: MemoryLimits
    facts: Mapping[str, Mapping[str, Any]]
    by: Predictors

    def enlarged(self, cells: Iterable[RunRequest]) -> list[RunRequest]:
        """Cells with the largest micro-batch that is predicted to fit, the smallest if none is.

        The reference and its repetitions keep theirs, and so do backends of which nothing can be predicted.
        The limit of memory does not hold for the reference, without which nothing could be judged.
        """
        return [
            self._made(cell, cell.layout, limited=False)
            if is_reference(cell)
            else self._cut(cell, self._largest(cell))
            for cell in cells
        ]

    def after(self, cells: Sequence[RunRequest], done: Mapping[str, Record]) -> list[RunRequest]:
        """Cells with the next smaller micro-batch where a run was out of memory."""
        found = []
        for cell in cells:
            below = [size for size in _sizes(cell) if size < cell.layout.micro_batch_size]
            is_oom = cell.key in done and done[cell.key].status == "oom"
            found.append(self._cut(cell, below[-1]) if is_oom and below and not is_reference(cell) else cell)
        return found

    def lines(self, cells: Iterable[RunRequest]) -> list[str]:
        """What was chosen, a line for each backend and world."""
        chosen = {
            f"{cell.backend} on {cell.world_size} ranks: micro-batch {cell.layout.micro_batch_size}, "
            f"accumulation {cell.layout.accumulation_steps}"
            for cell in cells
            if not is_reference(cell)
        }
        return sorted(chosen)

    def _largest(self, cell: RunRequest) -> int:
        if self._fits(cell, cell.layout.micro_batch_size) is None:
            return cell.layout.micro_batch_size
        sizes = _sizes(cell)
        return largest_predicted(sizes, lambda size: bool(self._fits(cell, size))) or sizes[0]

    def _fits(self, cell: RunRequest, micro_batch_size: int) -> bool | None:
        """None: nothing can be predicted of this backend."""
        facts, other = self.facts[cell.job_id], self._cut(cell, micro_batch_size)
        try:
            model = planned_model(facts, cell.job)
            scenario = scenario_of(other, model, device=self.limits.device)
            if scenario is None:
                return None
            needed = predict(scenario, self.by, timed=False).most_memory
            if needed is None:
                return None
            data = data_bytes(facts, cell.job, cell.device)
            return judged(scenario, needed, self.limits, data).verdict != DOES_NOT_FIT
        except HarnessError:
            return None

    def _cut(self, cell: RunRequest, micro_batch_size: int) -> RunRequest:
        if micro_batch_size == cell.layout.micro_batch_size:
            return cell
        total = cell.layout.global_batch_size
        layout = BatchLayout(
            global_batch_size=total,
            micro_batch_size=micro_batch_size,
            accumulation_steps=total // cell.data_size // micro_batch_size,
        )
        return self._made(cell, layout)

    def _made(self, cell: RunRequest, layout: BatchLayout, *, limited: bool = True) -> RunRequest:
        own = self.experiment.model_copy(update=dict(cell.job))  # whose kernels may be others
        return make_cell(
            own, cell.backend, cell.world_size, layout, cell.repeat, cell.device,
            nodes=cell.nodes, measure=cell.measure, limited=limited,
        )  # fmt: skip


def require_limit(limits: MemoryLimits) -> None:
    """Raise HarnessError where nothing says how much memory a rank may use."""
    if limits.imposed_bytes is None and limits.device_bytes is None:
        raise HarnessError(
            "--batch largest needs a limit of memory for each rank: on the CPU give one with "
            "--set runtime.memory_limit=2GB"
        )


def _sizes(cell: RunRequest) -> list[int]:
    """A pipeline cuts micro-batches into parts; one that has no such size keeps the job's."""
    parts = parts_of(registry.parse(cell.backend)[1], cell.world_size)
    samples = cell.layout.global_batch_size // cell.data_size
    return divisors(samples, parts) or [cell.layout.micro_batch_size]
