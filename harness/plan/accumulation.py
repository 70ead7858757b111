"""What FSDP holds between micro-steps, where that decides whether a job fits, and how programs avoid it."""

from __future__ import annotations

from dataclasses import replace

from harness.backends import registry
from harness.plan.leading import figures
from harness.plan.prediction import Predictors, predict
from harness.plan.scenario import Scenario

ACCELERATE = "sync_each_batch=True of Accelerate's GradientAccumulationPlugin"
OF_FSDP2 = f"a loop without `set_requires_gradient_sync(False)`, or {ACCELERATE}"
HOW = {
    "fsdp1": f"a loop without `no_sync()`, or {ACCELERATE}", "fsdp2": OF_FSDP2, "fsdp2-tensor": OF_FSDP2,
}  # fmt: skip
"""Family -> how a program reduces in every micro-step (torch 2.13, accelerate 1.15)."""
OPTION = "sync_each_batch"


def reducing_each(label: str) -> str | None:
    """The label of the same strategy that reduces in every micro-step, so that no whole gradients add up;
    None: FSDP has no such option there, or takes it already."""
    entry, options = registry.parse(label)
    given = options.model_dump()
    strategy = entry.strategy
    if strategy is None or strategy.family not in HOW or strategy.stage < 2 or given.get(OPTION) is not False:
        return None
    return registry.label_with(label, **{OPTION: "true"})


def each_reduced(scenario: Scenario) -> Scenario | None:
    """The same step with its gradients reduced in every micro-step; None: FSDP has no such option there, it
    is taken already, or there is a single micro-step."""
    label = reducing_each(scenario.label) if scenario.accumulation_steps > 1 else None
    if label is None:
        return None
    return replace(scenario, label=label, options={**scenario.options, OPTION: True})


def reduced_each_time(scenario: Scenario, by: Predictors) -> str | None:
    """What a step of these micro-batches takes if each of them reduces its gradients; None: it does, or does
    not fit either, or cannot be predicted."""
    each = each_reduced(scenario)
    if each is None or scenario.device is None:
        return None
    found = predict(each, by)
    if found.memory is None or not found.held_against_limit(found.memory.device_bytes).is_roomy:
        return None
    return (
        f"gradients add up unsharded between micro-steps; {each.label} reduces them in each "
        f"({HOW[scenario.strategy.family]}): {figures(found)}, and they are sent "
        f"{scenario.accumulation_steps:,} times"
    )
