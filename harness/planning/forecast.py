"""Predictions for the cells that are about to run, and why there is none for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.backends import registry
from harness.backends.base import World
from harness.backends.hybrid import unmet_hybrid
from harness.cells import Cell
from harness.compare.cell import Cell as NamedCell
from harness.compare.cell import name_cells
from harness.errors import HarnessError
from harness.planning.job import data_bytes, planned_model, scenario_of
from harness.planning.limits import Limits
from harness.planning.preflight import predict_run, size, tightest_demand
from harness.planning.profiles import Trace
from harness.planning.verdict import Answer
from harness.record import PredictionPart

DOES_NOT_FIT: Answer = "does not fit"
FORCE = "--force starts it all the same"
UNKNOWN_STRATEGY = "nothing is known of the strategy of a third party's backend"


@dataclass(kw_only=True)
class Forecast:
    """Of each cell, by its key."""

    parts: dict[str, PredictionPart] = field(default_factory=dict)
    unknown: dict[str, list[Cell]] = field(default_factory=dict)
    """Why there is no prediction -> cells."""
    cells: list[Cell] = field(default_factory=list)

    def refusal(self, cell: Cell) -> str | None:
        """Why a cell is not started; None: it is."""
        part = self.parts.get(cell.key)
        if part is None or not part.refused:
            return None
        return f"{words(part, cell)}; {FORCE}"

    def lines(self) -> list[str]:
        """Cells that fit in one line, then each that is tight or cannot fit, then what is not known."""
        judged = [(cell, part) for cell in self.cells if (part := self.parts.get(cell.key)) is not None]
        distinct = {(cell.backend, cell.world_size): (cell, part) for cell, part in judged}.values()
        fitting = [(cell, part) for cell, part in distinct if part.verdict == "fits"]
        found = []
        if fitting:
            most = max(fitting, key=lambda pair: pair[1].peak_bytes)
            names = _names(cell for cell, _ in fitting)
            found.append(f"predicted memory: {names}: {words(most[1], most[0], most=len(fitting) > 1)}")
        found += [
            f"predicted memory: {_names([cell])}: {words(part, cell)}"
            for cell, part in distinct
            if part.verdict != "fits"
        ]
        return found + [f"no prediction for {_names(cells)}: {why}" for why, cells in self.unknown.items()]


def forecast(
    cells: Iterable[Cell],
    facts: Mapping[str, Mapping[str, Any]],
    torch_device: str,
    limits: Limits,
    *,
    preset: str,
    force: bool = False,
    trace: Trace | None = None,
) -> Forecast:
    """Predict each cell. A cell that cannot fit is refused unless `force`.

    `facts`: by job id, what the check of the job returned (`worker.check`).
    """
    found = Forecast()
    known: dict[tuple[object, ...], PredictionPart | str | None] = {}
    for cell in cells:
        found.cells.append(cell)
        alike = (cell.job_id, cell.backend, cell.world_size, cell.nodes, cell.layout)
        if alike not in known:
            known[alike] = _predict(cell, facts[cell.job_id], torch_device, limits, preset, force, trace)
        outcome = known[alike]
        if outcome is None:
            continue
        if isinstance(outcome, str):
            found.unknown.setdefault(outcome, []).append(cell)
        else:
            found.parts[cell.key] = outcome
    return found


def _predict(
    cell: Cell,
    facts: Mapping[str, Any],
    torch_device: str,
    limits: Limits,
    preset: str,
    force: bool,
    trace: Trace | None,
) -> PredictionPart | str | None:
    """The prediction, or why there is none; None: the backend will refuse by itself.

    Errors of any kind are reasons, since no run may depend on its prediction.
    """
    try:
        if _is_unmet(cell, torch_device):
            return None
        model = planned_model(facts, cell.job)
        scenario = scenario_of(cell, model, torch_device, preset=preset, device=limits.device)
        if scenario is None:
            return UNKNOWN_STRATEGY
        part = predict_run(scenario, limits, data_bytes=data_bytes(facts, cell.job), trace=trace)
    except HarnessError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return part.model_copy(update={"refused": part.verdict == DOES_NOT_FIT and not force})


def _is_unmet(cell: Cell, torch_device: str) -> bool:
    entry, options = registry.parse(cell.backend)
    if entry.strategy is None or not entry.strategy.facts.has_replicas:
        return False
    world = World(
        rank=0, world_size=cell.world_size, local_rank=0, ranks_per_node=cell.world_size // cell.nodes,
        device=torch_device,
    )  # fmt: skip
    return bool(unmet_hybrid(world, getattr(options, "shard_size", None)))


def words(part: PredictionPart, cell: Cell, *, most: bool = False) -> str:
    """'fits: 1.2 MB of 3.9 GB per rank', 'cannot fit: 131 GB of 80 GB per rank'."""
    demand = tightest_demand(part, cell.world_size // cell.nodes)
    if demand is None:
        return f"{size(part.peak_bytes)} per rank, with a limit that is not known"
    verdict = "cannot fit" if part.verdict == DOES_NOT_FIT else part.verdict
    return f"{verdict}: {'at most ' if most else ''}{demand}"


def _names(cells: Iterable[Cell]) -> str:
    return name_cells([NamedCell(cell.backend, cell.world_size) for cell in cells])
