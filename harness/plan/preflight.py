"""What memory a run will need, before it starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.registry import REFERENCE
from harness.errors import HarnessError
from harness.forms.layout import COMPUTE, DTYPE_BYTES
from harness.job.job import Job
from harness.judge.wording import CellName, name_cells
from harness.plan.hardware import Answer, MemoryLimits, MemoryVerdict
from harness.plan.prediction import MemoryPrediction, Prediction, Predictors, loading_bytes, predict
from harness.plan.profiles import Trace
from harness.plan.scenario import (
    Scenario,
    data_bytes,
    job_model,
    planned_model,
    scenario_of,
    why_unsupported,
)
from harness.plan.trust import trust_in
from harness.record import PredictionPart
from harness.run_directory.request import RunRequest
from harness.version import __version__

AT_LEAST = "at least"
"""In place of the moment, where a lower bound is all that is known."""


@dataclass(frozen=True, kw_only=True)
class Demand(MemoryVerdict):
    """Memory that is needed at one place, and what there is."""

    place: str
    on_device: bool = False
    """Of a rank's own; otherwise of the host."""

    @property
    def share(self) -> float:
        """Needed memory over what is available."""
        return self.needed_bytes / max(1, self.device_bytes)

    def __str__(self) -> str:
        """'131 GB of 80 GB per rank'."""
        return f"{size(self.needed_bytes)} of {size(self.device_bytes)} {self.place}"


def judged(
    scenario: Scenario, prediction: MemoryPrediction, limits: MemoryLimits, data_bytes: int = 0
) -> PredictionPart:
    """A prediction beside the memory that there is, as the record of a run keeps it.

    `data_bytes`: what samples hold besides (`harness.plan.scenario.data_bytes`).
    """
    trust = trust_in(scenario, speed=False)
    known = trust.memory
    kinds = {"data": data_bytes} if data_bytes else {}
    for kind, size in prediction.decisive.kinds.items():
        kinds[kind] = kinds.get(kind, 0) + size
    # While the ranks of a node load the initial weights, or in a step, whichever is more.
    on_host = prediction.host_bytes_per_node
    if scenario.torch_device == "cpu":
        on_host = prediction.peak_bytes * scenario.ranks_of_node
    return _part(
        limits, scenario.ranks_of_node,
        peak_bytes=prediction.peak_bytes + data_bytes, moment=prediction.decisive.name, kinds=kinds,
        device_bytes=prediction.device_bytes + data_bytes,
        host_bytes=max(on_host, loading_bytes(scenario)) + data_bytes * scenario.ranks_of_node,
        typical_error=known.typical if known else None, error_runs=known.runs if known else 0,
        assumption=trust.assumption,
    )  # fmt: skip


def _part(limits: MemoryLimits, ranks_per_node: int, **values: Any) -> PredictionPart:
    """With the limits, and the verdict that follows from them."""
    device = [limit for limit in (limits.device_bytes, limits.imposed_bytes) if limit is not None]
    part = PredictionPart(
        **values, device_limit_bytes=min(device, default=None), host_limit_bytes=limits.host_bytes,
        made_by=f"sharding-harness {__version__}",
    )  # fmt: skip
    tightest = tightest_demand(part, ranks_per_node)
    return part.model_copy(update={"verdict": tightest.answer if tightest else None})


def at_least(found: Prediction, limits: MemoryLimits) -> PredictionPart:
    """Demand of a job whose peak is not predicted: what its model states need, or the least of its bounds if
    the states alone would fit.
    """
    scenario = found.scenario
    assert scenario is not None
    on_cpu = scenario.torch_device == "cpu"
    kinds = scenario.held_states
    held = sum(kinds.values())
    on_host = held if on_cpu else sum(scenario.states.kinds(host=True).values())
    ranks = scenario.ranks_of_node
    part = _part(
        limits, ranks, peak_bytes=held, moment=AT_LEAST, kinds=kinds, device_bytes=held,
        host_bytes=max(on_host * ranks, loading_bytes(scenario)),
    )  # fmt: skip
    if part.verdict == DOES_NOT_FIT or found.memory_bounds is None:
        return part
    of_a_figure = {"typical_error": None, "error_runs": 0}
    least = judged(scenario, found.memory_bounds[0], limits)
    return least.model_copy(update={"moment": AT_LEAST, **of_a_figure})


def tightest_demand(part: PredictionPart, ranks_per_node: int) -> Demand | None:
    """Where least would be left, or most is missing; None: no limit is known."""
    return max(_demands(part, ranks_per_node), key=lambda demand: demand.share, default=None)


def telling_demand(part: PredictionPart, ranks_per_node: int, torch_device: str) -> Demand | None:
    """What a person wants to know: the device of a run on GPUs, unless the host decides against the run."""
    tightest = tightest_demand(part, ranks_per_node)
    if torch_device == "cpu" or tightest is None or tightest.answer != "fits":
        return tightest
    return next((demand for demand in _demands(part, ranks_per_node) if demand.on_device), None)


def _demands(part: PredictionPart, ranks_per_node: int) -> Iterator[Demand]:
    if (limit := part.device_limit_bytes) is not None:
        yield Demand(needed_bytes=part.device_bytes, device_bytes=limit, place="per rank", on_device=True)
    if (limit := part.host_limit_bytes) is not None:
        yield Demand(
            needed_bytes=part.host_bytes // ranks_per_node, device_bytes=limit // ranks_per_node,
            place="host memory per rank",
        )  # fmt: skip


def size(count: float) -> str:
    """Bytes in GB, or MB below one: '131 GB', '0.62 MB'."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    value = count / unit
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


DOES_NOT_FIT: Answer = "does not fit"
FORCE = "--force starts it anyway"
OTHER = "compare with training.micro_batch_size=1, a smaller model, or more memory"
UNKNOWN_STRATEGY = "the strategy of a third party's backend is not known"


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A run that may start."""

    cell: RunRequest
    scenario: Callable[[], Scenario | None]
    """None: nothing is known of the strategy. May raise."""
    facts: Mapping[str, Any] | None = None
    """What the check of the job returned (`rank.job_check`); None: it was not checked."""

    @property
    def named(self) -> CellName:
        return CellName(self.cell.backend, self.cell.world_size)

    @property
    def alike(self) -> Hashable:
        """Equal for runs that have one prediction."""
        cell = self.cell
        return (
            cell.job_id, cell.backend, cell.world_size, cell.ranks_per_node, cell.micro_batch_size,
            cell.accumulation_steps, cell.loading,
        )  # fmt: skip

    @property
    def ranks_of_node(self) -> int:
        return min(self.cell.ranks_per_node, self.cell.world_size)

    def held_to(self, limits: MemoryLimits) -> MemoryLimits:
        """The limits that hold for it: `runtime.memory_limit` does not for the reference."""
        return limits if self.cell.memory_limit_bytes is not None else replace(limits, imposed_bytes=None)


@dataclass(kw_only=True)
class CellPredictions:
    """Of each candidate, by its key."""

    parts: dict[str, PredictionPart] = field(default_factory=dict)
    unknown: dict[str, list[PlannedCell]] = field(default_factory=dict)
    """Why there is no prediction -> candidates."""
    candidates: dict[str, PlannedCell] = field(default_factory=dict)
    scenarios: list[Scenario] = field(default_factory=list)
    """Of those whose peak is predicted."""

    def refusal(self, key: str) -> str | None:
        """Why a run is not started; None: it is."""
        part = self.parts.get(key)
        if part is None or not part.refused:
            return None
        return f"{words(part, self.candidates[key])}; {FORCE}"

    def reason(self, key: str) -> str | None:
        """Why a run has no prediction; None: it has one, or was not asked about."""
        named = ((why, run.cell.key) for why, runs in self.unknown.items() for run in runs)
        return next((why for why, other in named if other == key), None)

    def lines(self) -> list[str]:
        """Runs that fit in one line, then each that is close or cannot fit, what follows where that is the
        reference, how wrong such predictions were, and what is not known.

        Repetitions of a reference that is refused are left out.
        """
        judged = [(self.candidates[key], part) for key, part in self.parts.items()]
        refused = next((run for run, part in judged if run.cell.backend == REFERENCE and part.refused), None)
        distinct = {
            run.named: (run, part)
            for run, part in judged
            # The reference with an option, which shows how much rounding changes.
            if not (refused and part.refused and run.named.label != REFERENCE and is_reference(run.cell))
        }.values()
        fitting = [(run, part) for run, part in distinct if part.verdict == "fits"]
        found = []
        if fitting:
            run, part = max(fitting, key=lambda pair: pair[1].peak_bytes)
            names = name_cells([run.named for run, _ in fitting])
            found.append(f"predicted memory: {names}: {words(part, run, most=len(fitting) > 1)}")
        found += [
            f"predicted memory: {run.named}: {words(part, run)}"
            for run, part in distinct
            if part.verdict != "fits"
        ]
        if refused is not None:
            found.append(f"parity cannot be judged: the reference, {refused.named}, cannot fit; {OTHER}")
        if self.scenarios:
            found.append("; ".join(trust_in(*self.scenarios, speed=False).lines()))
        unknown = ((name_cells([run.named for run in runs]), why) for why, runs in self.unknown.items())
        return found + [f"no prediction for {names}: {why}" for names, why in unknown]


def of_cells(
    cells: Iterable[RunRequest], limits: MemoryLimits, facts: Mapping[str, Mapping[str, Any]] | None = None
) -> list[PlannedCell]:
    """Cells of this machine, or runs of others. `facts`: by job id, what the check of the job returned.

    Of a job that was not checked its configuration says what the model is, and its samples do not count.
    """
    checked = facts or {}
    jobs: dict[str, Job] = {}
    unchecked = cache(lambda job_id: job_model(jobs[job_id]))

    def scenario(cell: RunRequest) -> Scenario | None:
        known = checked.get(cell.job_id)
        model = unchecked(cell.job_id) if known is None else planned_model(known, cell.job)
        return scenario_of(cell, model, device=limits.device)

    found = []
    for cell in cells:
        jobs[cell.job_id] = cell.job
        one = PlannedCell(cell=cell, scenario=partial(scenario, cell), facts=checked.get(cell.job_id))
        found.append(one)
    return found


def is_reference(cell: RunRequest) -> bool:
    """Whether it is the reference, with an option or without."""
    return registry.parse(cell.backend)[0].name == REFERENCE


def predict_runs(
    candidates: Iterable[PlannedCell],
    limits: MemoryLimits,
    *,
    force: bool = False,
    trace: Trace | None = None,
) -> CellPredictions:
    """Predict each run. One that cannot fit is refused unless `force`."""
    found, by = CellPredictions(), Predictors.traced_by(trace)
    known: dict[Hashable, PredictionPart | str | None] = {}
    for run in candidates:
        found.candidates[run.cell.key] = run
        if run.alike not in known:
            known[run.alike] = _predict(run, limits, force, by, found.scenarios)
        outcome = known[run.alike]
        if isinstance(outcome, str):
            found.unknown.setdefault(outcome, []).append(run)
        elif outcome is not None:
            found.parts[run.cell.key] = outcome
    return found


def _predict(
    run: PlannedCell, limits: MemoryLimits, force: bool, by: Predictors, predicted: list[Scenario]
) -> PredictionPart | str | None:
    """The prediction, or why there is none; None: the backend will refuse by itself.

    `predicted`: gets the scenario of one that is made. Errors of any kind are reasons, since no run may
    depend on its prediction.
    """
    cell = run.cell
    try:
        entry, options = registry.parse(cell.backend)
        world = World.planned(cell.world_size, cell.ranks_per_node, cell.device)
        precision = cell.job.training.held_precision
        if entry.strategy and why_unsupported(entry.strategy, options, precision, world):
            return None
        scenario = run.scenario()
        if scenario is None:
            return _at_least(run, limits, force) or UNKNOWN_STRATEGY
        own = run.held_to(limits)
        found = predict(scenario, by, timed=False)
        if found.memory is not None:
            samples = data_bytes(run.facts, cell.job, cell.device) if run.facts else 0
            part = judged(scenario, found.memory, own, samples)
            predicted.append(scenario)
        elif (part := at_least(found, own)).verdict != DOES_NOT_FIT:
            return _at_least(run, limits, force) or str(found.memory_unknown)
    except HarnessError as error:
        return _at_least(run, limits, force) or str(error)
    except Exception as error:
        return _at_least(run, limits, force) or f"{type(error).__name__}: {error}"
    return part.model_copy(update={"refused": part.verdict == DOES_NOT_FIT and not force})


def _at_least(run: PlannedCell, limits: MemoryLimits, force: bool) -> PredictionPart | None:
    """Where nothing better is known, as of a third party's backend: what ranks on the CPU hold under any
    strategy, each weight and its optimizer states once among all; None: it may fit."""
    cell, facts = run.cell, run.facts or {}
    if (parameters := facts.get("parameters")) is None or cell.device != "cpu":
        return None
    trained = facts.get("trained_parameters")
    kinds = {"weights": parameters, "optimizer": 2 * (parameters if trained is None else trained)}
    width = DTYPE_BYTES[COMPUTE["bf16" if cell.job.training.held_precision == "bf16" else "fp32"]]
    shares = {kind: count * width // cell.world_size for kind, count in kinds.items()}
    held = sum(shares.values())
    part = _part(
        limits, run.ranks_of_node, peak_bytes=held, moment=AT_LEAST, kinds=shares, device_bytes=held,
        host_bytes=held * run.ranks_of_node,
    )  # fmt: skip
    return part.model_copy(update={"refused": not force}) if part.verdict == DOES_NOT_FIT else None


def words(part: PredictionPart, run: PlannedCell, *, most: bool = False) -> str:
    """'fits: 1.2 MB of 3.9 GB per rank', 'cannot fit: 131 GB of 80 GB per rank'."""
    demand = telling_demand(part, run.ranks_of_node, run.cell.device)
    if demand is None:
        return f"{size(part.peak_bytes)} per rank; the memory of the device is not known"
    verdict = "cannot fit" if part.verdict == DOES_NOT_FIT else part.verdict
    bound = "at most " if most else "at least " if part.moment == AT_LEAST else ""
    return f"{verdict}: {bound}{demand}"
