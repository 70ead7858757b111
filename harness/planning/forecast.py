"""Predictions for the runs that are about to start, and why there is none for others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.hybrid import unmet_hybrid, unmet_second_copy
from harness.backends.unsupported import Unsupported
from harness.cells import Cell
from harness.errors import HarnessError
from harness.judge.cell import Cell as NamedCell
from harness.judge.cell import name_cells
from harness.planning.coverage import why_memory_unknown
from harness.planning.job import data_bytes, planned_model, scenario_of, scenario_of_request
from harness.planning.job_model import job_model
from harness.planning.limits import Limits
from harness.planning.preflight import AT_LEAST, at_least, least_on_host, predict_run, size, telling_demand
from harness.planning.scenario import Scenario
from harness.planning.traced import Trace
from harness.planning.verdict import Answer
from harness.record import PredictionPart
from harness.run_directory.request import RunRequest

DOES_NOT_FIT: Answer = "does not fit"
FORCE = "--force starts it all the same"
UNKNOWN_STRATEGY = "nothing is known of the strategy of a third party's backend"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that may start."""

    key: str
    label: str
    world_size: int
    ranks_per_node: int
    torch_device: str
    alike: Hashable
    """Equal for runs that have one prediction."""
    scenario: Callable[[], Scenario | None]
    """None: nothing is known of the strategy. May raise."""
    data_bytes: Callable[[], int] = lambda: 0
    parameters: int | None = None
    """Of the model; None: not known."""
    trained: int | None = None
    """Those that get gradients; None: all."""
    precision: str = "fp32"
    limited: bool = True
    """Whether `runtime.memory_limit` holds for it."""

    @property
    def named(self) -> NamedCell:
        return NamedCell(self.label, self.world_size)


@dataclass(kw_only=True)
class Forecast:
    """Of each candidate, by its key."""

    parts: dict[str, PredictionPart] = field(default_factory=dict)
    unknown: dict[str, list[Candidate]] = field(default_factory=dict)
    """Why there is no prediction -> candidates."""
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def refusal(self, key: str) -> str | None:
        """Why a run is not started; None: it is."""
        part = self.parts.get(key)
        if part is None or not part.refused:
            return None
        return f"{words(part, self.candidates[key])}; {FORCE}"

    def lines(self) -> list[str]:
        """Runs that fit in one line, then each that is tight or cannot fit, then what is not known."""
        judged = [(self.candidates[key], part) for key, part in self.parts.items()]
        distinct = {run.named: (run, part) for run, part in judged}.values()
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
        unknown = ((name_cells([run.named for run in runs]), why) for why, runs in self.unknown.items())
        return found + [f"no prediction for {names}: {why}" for names, why in unknown]


def of_cells(
    cells: Iterable[Cell],
    facts: Mapping[str, Mapping[str, Any]],
    torch_device: str,
    limits: Limits,
) -> list[Candidate]:
    """Cells of this machine. `facts`: by job id, what the check of the job returned (`worker.check`)."""
    return [
        Candidate(
            key=cell.key,
            label=cell.backend,
            world_size=cell.world_size,
            ranks_per_node=cell.world_size // cell.nodes,
            torch_device=torch_device,
            alike=(cell.job_id, cell.backend, cell.world_size, cell.nodes, cell.layout),
            scenario=lambda cell=cell: scenario_of(  # type: ignore[misc]
                cell, planned_model(facts[cell.job_id], cell.job), torch_device,
                device=limits.device,
            ),
            data_bytes=lambda cell=cell: data_bytes(facts[cell.job_id], cell.job),  # type: ignore[misc]
            parameters=facts[cell.job_id].get("parameters"),
            trained=facts[cell.job_id].get("trained_parameters"),
            precision=cell.job.training.precision,
            limited=cell.memory_limit_bytes is not None,
        )
        for cell in cells
    ]  # fmt: skip


def of_requests(requests: Iterable[RunRequest], limits: Limits) -> list[Candidate]:
    """Runs of machines that are not here; their data is not known."""
    return [
        Candidate(
            key=request.run_id,
            label=request.backend,
            world_size=request.world_size,
            ranks_per_node=request.ranks_per_node,
            torch_device=request.device,
            alike=(
                request.job_id, request.backend, request.world_size, request.ranks_per_node,
                request.micro_batch_size, request.accumulation_steps,
            ),
            scenario=lambda request=request: scenario_of_request(  # type: ignore[misc]
                request, job_model(request.job), device=limits.device
            ),
        )
        for request in requests
    ]  # fmt: skip


def forecast(
    candidates: Iterable[Candidate], limits: Limits, *, force: bool = False, trace: Trace | None = None
) -> Forecast:
    """Predict each run. One that cannot fit is refused unless `force`."""
    found = Forecast()
    known: dict[Hashable, PredictionPart | str | None] = {}
    for run in candidates:
        found.candidates[run.key] = run
        if run.alike not in known:
            known[run.alike] = _predict(run, limits, force, trace)
        outcome = known[run.alike]
        if isinstance(outcome, str):
            found.unknown.setdefault(outcome, []).append(run)
        elif outcome is not None:
            found.parts[run.key] = outcome
    return found


def _predict(run: Candidate, limits: Limits, force: bool, trace: Trace | None) -> PredictionPart | str | None:
    """The prediction, or why there is none; None: the backend will refuse by itself.

    Errors of any kind are reasons, since no run may depend on its prediction.
    """
    try:
        if _is_unmet(run):
            return None
        scenario = run.scenario()
        if scenario is None:
            return _at_least(run, limits, force) or UNKNOWN_STRATEGY
        own = limits if run.limited else replace(limits, imposed_bytes=None)
        if (unknown := why_memory_unknown(scenario)) is not None:
            return _of_states(scenario, own, unknown, force)
        part = predict_run(scenario, own, data_bytes=run.data_bytes(), trace=trace)
    except HarnessError as error:
        return _at_least(run, limits, force) or str(error)
    except Exception as error:
        return _at_least(run, limits, force) or f"{type(error).__name__}: {error}"
    return part.model_copy(update={"refused": part.verdict == DOES_NOT_FIT and not force})


def _of_states(scenario: Scenario, limits: Limits, unknown: str, force: bool) -> PredictionPart | str:
    """A run whose model states alone do not fit is refused; of another one, that nothing more is known."""
    part = at_least(scenario, limits)
    if part.verdict == DOES_NOT_FIT:
        return part.model_copy(update={"refused": not force})
    return unknown


def _at_least(run: Candidate, limits: Limits, force: bool) -> PredictionPart | None:
    """Where nothing else is known: what cannot fit under any strategy is refused; None: it may fit."""
    if run.parameters is None or run.torch_device != "cpu":
        return None
    part = least_on_host(
        run.parameters, run.precision, run.world_size, run.ranks_per_node, limits, trained=run.trained
    )
    return part.model_copy(update={"refused": not force}) if part.verdict == DOES_NOT_FIT else None


def _is_unmet(run: Candidate) -> bool:
    entry, options = registry.parse(run.label)
    if entry.strategy is None:
        return False
    world = World(
        rank=0, world_size=run.world_size, local_rank=0, ranks_per_node=run.ranks_per_node,
        device=run.torch_device,
    )  # fmt: skip
    try:
        options.mesh(run.world_size)
    except Unsupported:
        return True
    if unmet_second_copy(world, options):
        return True
    of_replicas = entry.strategy.facts.has_replicas
    return of_replicas and bool(unmet_hybrid(world, getattr(options, "shard_size", None)))


def words(part: PredictionPart, run: Candidate, *, most: bool = False) -> str:
    """'fits: 1.2 MB of 3.9 GB per rank', 'cannot fit: 131 GB of 80 GB per rank'."""
    demand = telling_demand(part, min(run.ranks_per_node, run.world_size), run.torch_device)
    if demand is None:
        return f"{size(part.peak_bytes)} per rank, of a device whose memory is not known"
    verdict = "cannot fit" if part.verdict == DOES_NOT_FIT else part.verdict
    bound = "at most " if most else "at least " if part.moment == AT_LEAST else ""
    return f"{verdict}: {bound}{demand}"
