"""What FSDP holds between micro-steps, where that decides whether a job fits, and how programs avoid it."""

from __future__ import annotations

from dataclasses import replace

from harness.plan.prediction import Prediction, Predictors, predict
from harness.plan.scenario import Scenario
from harness.tell.formats import gigabytes

HOW = {
    "fsdp1": "no `no_sync()`, or Accelerate's sync_each_batch=True",
    "fsdp2": "no `set_requires_gradient_sync(False)`, or Accelerate's sync_each_batch=True",
}
"""Family -> how a program reduces in every micro-step (torch 2.13, accelerate 1.15)."""


def reduced_each_time(scenario: Scenario, by: Predictors) -> str | None:
    """What a step of these micro-batches takes if each of them reduces its gradients; None: as much, or it
    does not fit either.

    At most: as one micro-step, and with the shard of the gradients that add up.
    """
    how = HOW.get(scenario.strategy.family)
    if how is None or scenario.accumulation_steps == 1 or scenario.device is None:
        return None
    once = replace(scenario, accumulation_steps=1)
    found: Prediction = predict(once, by, timed=False)
    if found.memory is None:
        return None
    needed = found.memory.device_bytes + once.held_states.get("gradients", 0)
    if not found.held_against_limit(needed).is_roomy:
        return None
    return (
        f"gradients add up unsharded between micro-steps; reduced in each ({how}; the harness has no such "
        f"option) it takes at most {gigabytes(needed)} of {gigabytes(found.there_bytes)} GB, and they are "
        f"sent {scenario.accumulation_steps:,} times"
    )
