"""Questions about shipped models and GPUs, for tests of plans."""

from __future__ import annotations

from typing import Any

from harness.job.config import load_experiment
from harness.plan.answer import candidates, estimate
from harness.plan.hardware import load_hardware
from harness.plan.models import load_model
from harness.plan.prediction import Prediction, with_traffic
from harness.plan.question import Question
from harness.plan.question import ask as asked


def ask(
    *assignments: str, model: str = "bloom-560m", backends: str = "ddp", world_sizes: tuple[int, ...] = (8,),
    per_node: int = 8, gpu: str | None = None, fabric: str | None = None,
) -> Question:  # fmt: skip
    """A question as the command line asks it; `backends` separated by blanks."""
    hardware = load_hardware()
    return asked(
        load_model(model),
        load_experiment(None, assignments),
        backends=backends.split(),
        world_sizes=world_sizes,
        ranks_per_node=per_node,
        device=hardware.device(gpu) if gpu else None,
        fabric=hardware.fabric(fabric) if fabric else None,
    )


def rows(*assignments: str, **asked: Any) -> list[Prediction]:
    """The answers."""
    return estimate(ask(*assignments, **asked))


def row(*assignments: str, **asked: Any) -> Prediction:
    """The only answer."""
    (found,) = rows(*assignments, **asked)
    return found


def states(*assignments: str, **asked: Any) -> Prediction:
    """The only answer, with states and traffic alone: nothing is traced."""
    (found,) = candidates(ask(*assignments, **asked))
    return with_traffic(found)
