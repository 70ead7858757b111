"""What memory a run will need, before it starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.registry import REFERENCE
from harness.errors import HarnessError
from harness.forms.layout import COMPUTE, DTYPE_BYTES
from harness.judge.wording import CellName, name_cells
from harness.nested import totals
from harness.plan.hardware import Answer, MemoryLimits, MemoryVerdict
from harness.plan.model import PlannedModel
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
    of_data = [("data", data_bytes)] if data_bytes else []
    kinds = totals([*of_data, *prediction.decisive.kinds.items()])
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


@dataclass(kw_only=True)
class CellPredictions:
    """Of each candidate, by its key."""

    parts: dict[str, PredictionPart] = field(default_factory=dict)
    unknown: dict[str, list[RunRequest]] = field(default_factory=dict)
    """Why there is no prediction -> candidates."""
    candidates: dict[str, RunRequest] = field(default_factory=dict)
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
        return next((why for why, runs in self.unknown.items() if key in (run.key for run in runs)), None)

    def lines(self) -> list[str]:
        """Runs that fit in one line, then each that is close or cannot fit, what follows where that is the
        reference, how wrong such predictions were, and what is not known.

        Repetitions of a reference that is refused are left out.
        """
        judged = [(self.candidates[key], part) for key, part in self.parts.items()]
        refused = next((run for run, part in judged if run.backend == REFERENCE and part.refused), None)
        distinct = {
            named(run): (run, part)
            for run, part in judged
            # The reference with an option, which shows how much rounding changes.
            if not (refused and part.refused and run.backend != REFERENCE and is_reference(run))
        }.values()
        fitting = [(run, part) for run, part in distinct if part.verdict == "fits"]
        found = []
        if fitting:
            run, part = max(fitting, key=lambda pair: pair[1].peak_bytes)
            names = name_cells([named(run) for run, _ in fitting])
            found.append(f"predicted memory: {names}: {words(part, run, most=len(fitting) > 1)}")
        found += [
            f"predicted memory: {named(run)}: {words(part, run)}"
            for run, part in distinct
            if part.verdict != "fits"
        ]
        if refused is not None:
            found.append(f"parity cannot be judged: the reference, {named(refused)}, cannot fit; {OTHER}")
        if self.scenarios:
            found.append("; ".join(trust_in(*self.scenarios, speed=False).lines()))
        unknown = ((name_cells([named(run) for run in runs]), why) for why, runs in self.unknown.items())
        return found + [f"no prediction for {names}: {why}" for names, why in unknown]


def named(cell: RunRequest) -> CellName:
    return CellName(cell.backend, cell.world_size)


def is_reference(cell: RunRequest) -> bool:
    """Whether it is the reference, with an option or without."""
    return registry.parse(cell.backend)[0].name == REFERENCE


Facts = Mapping[str, Any]
"""What the check of a job returned (`rank.job_check`)."""
OfCell = Callable[[RunRequest], Scenario | None]
"""The scenario of a run; None: nothing is known of its strategy. May raise."""


def of_cell(limits: MemoryLimits, facts: Mapping[str, Facts]) -> OfCell:
    """Scenarios of runs. Of a job that was not checked its configuration says what the model is."""
    models: dict[str, PlannedModel] = {}

    def scenario(cell: RunRequest) -> Scenario | None:
        if cell.job_id not in models:
            known = facts.get(cell.job_id)
            models[cell.job_id] = planned_model(known, cell.job) if known else job_model(cell.job)
        return scenario_of(cell, models[cell.job_id], device=limits.device)

    return scenario


def predict_runs(
    candidates: Iterable[RunRequest],
    limits: MemoryLimits,
    facts: Mapping[str, Facts] | None = None,
    *,
    force: bool = False,
    trace: Trace | None = None,
    scenario: OfCell | None = None,
) -> CellPredictions:
    """Predict each run. One that cannot fit is refused unless `force`.

    `facts`: by job id; the samples of a job that was not checked do not count. `scenario`: others in tests.
    """
    checked = facts or {}
    found, by, scenario = CellPredictions(), Predictors.traced_by(trace), scenario or of_cell(limits, checked)
    known: dict[Hashable, PredictionPart | str | None] = {}
    for cell in candidates:
        found.candidates[cell.key] = cell
        alike = (
            cell.job_id, cell.backend, cell.world_size, cell.ranks_per_node, cell.micro_batch_size,
            cell.accumulation_steps, cell.loading,
        )  # fmt: skip
        if alike not in known:
            # `runtime.memory_limit` does not hold for the reference.
            own = limits if cell.memory_limit_bytes is not None else replace(limits, imposed_bytes=None)
            known[alike] = _predict(cell, own, checked.get(cell.job_id), scenario, by, found.scenarios)
        outcome = known[alike]
        if isinstance(outcome, str):
            found.unknown.setdefault(outcome, []).append(cell)
        elif outcome is not None:
            refused = outcome.verdict == DOES_NOT_FIT and not force
            found.parts[cell.key] = outcome.model_copy(update={"refused": refused})
    return found


def _predict(
    cell: RunRequest,
    limits: MemoryLimits,
    facts: Facts | None,
    scenario_of: OfCell,
    by: Predictors,
    predicted: list[Scenario],
) -> PredictionPart | str | None:
    """The prediction, or why there is none; None: the backend will refuse by itself.

    `predicted`: gets the scenario of one that is made. Errors of any kind are reasons, since no run may
    depend on its prediction.
    """
    try:
        entry, options = registry.parse(cell.backend)
        world = World.planned(cell.world_size, cell.ranks_per_node, cell.device)
        precision = cell.job.training.held_precision
        if entry.strategy and why_unsupported(entry.strategy, options, precision, world):
            return None
        if (scenario := scenario_of(cell)) is None:
            raise HarnessError(UNKNOWN_STRATEGY)
        found = predict(scenario, by, timed=False)
        if found.memory is not None:
            predicted.append(scenario)
            samples = data_bytes(facts, cell.job, cell.device) if facts else 0
            return judged(scenario, found.memory, limits, samples)
        if (part := at_least(found, limits)).verdict == DOES_NOT_FIT:
            return part
        unknown = str(found.memory_unknown)
    except Exception as error:
        unknown = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
    return _at_least_of_all(cell, limits, facts or {}) or unknown


def _at_least_of_all(cell: RunRequest, limits: MemoryLimits, facts: Facts) -> PredictionPart | None:
    """Where nothing better is known, as of a third party's backend: what ranks on the CPU hold under any
    strategy, each weight and its optimizer states once among all; None: it may fit."""
    if (parameters := facts.get("parameters")) is None or cell.device != "cpu":
        return None
    trained = facts.get("trained_parameters")
    kinds = {"weights": parameters, "optimizer": 2 * (parameters if trained is None else trained)}
    width = DTYPE_BYTES[COMPUTE["bf16" if cell.job.training.held_precision == "bf16" else "fp32"]]
    shares = {kind: count * width // cell.world_size for kind, count in kinds.items()}
    held, ranks = sum(shares.values()), ranks_of_node(cell)
    part = _part(
        limits, ranks, peak_bytes=held, moment=AT_LEAST, kinds=shares, device_bytes=held,
        host_bytes=held * ranks,
    )  # fmt: skip
    return part if part.verdict == DOES_NOT_FIT else None


def ranks_of_node(cell: RunRequest) -> int:
    """Ranks on a full node."""
    return min(cell.ranks_per_node, cell.world_size)


def words(part: PredictionPart, cell: RunRequest, *, most: bool = False) -> str:
    """'fits: 1.2 MB of 3.9 GB per rank', 'cannot fit: 131 GB of 80 GB per rank'."""
    demand = telling_demand(part, ranks_of_node(cell), cell.device)
    if demand is None:
        return f"{size(part.peak_bytes)} per rank; the memory of the device is not known"
    verdict = "cannot fit" if part.verdict == DOES_NOT_FIT else part.verdict
    bound = "at most " if most else "at least " if part.moment == AT_LEAST else ""
    return f"{verdict}: {bound}{demand}"
