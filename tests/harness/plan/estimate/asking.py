"""Questions for tests of estimates."""

from __future__ import annotations

from typing import Any

from harness.job.config import load_experiment
from harness.plan.estimate import question
from harness.plan.estimate.question import EstimateRequest
from harness.plan.estimate.row import EstimateRow, candidates, estimate, step_traffic
from harness.plan.hardware import load_hardware
from harness.plan.models import load_model


def ask(
    *assignments: str, model: str = "bloom-560m", backends: str = "ddp", world_sizes: tuple[int, ...] = (8,),
    per_node: int = 8, gpu: str | None = None, fabric: str | None = None,
) -> EstimateRequest:  # fmt: skip
    """A question as the command line asks it; `backends` separated by blanks."""
    hardware = load_hardware()
    return question(
        load_model(model),
        load_experiment(None, assignments),
        backends=backends.split(),
        world_sizes=world_sizes,
        ranks_per_node=per_node,
        device=hardware.device(gpu) if gpu else None,
        fabric=hardware.fabric(fabric) if fabric else None,
    )


def rows(*assignments: str, **asked: Any) -> list[EstimateRow]:
    """The answers."""
    return estimate(ask(*assignments, **asked))


def states(*assignments: str, **asked: Any) -> EstimateRow:
    """The only answer, with states and traffic alone: nothing is traced."""
    ((label, size, scenario),) = (
        (c.label, c.world_size, c.scenario) for c in candidates(ask(*assignments, **asked))
    )
    assert scenario is not None
    traffic = tuple(step_traffic(scenario))
    return EstimateRow(label=label, world_size=size, scenario=scenario, traffic=traffic)


def row(*assignments: str, **asked: Any) -> EstimateRow:
    """The only answer."""
    (found,) = rows(*assignments, **asked)
    return found
