"""What to take for a mixture of experts, of which only model states are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.backends import registry
from harness.forms.terms import STATE_KINDS
from harness.plan.alternatives import Alternative, alternatives
from harness.plan.leading import USUAL, pointless
from harness.plan.limits import STATES_SHARE
from harness.plan.models import why_uneven
from harness.plan.prediction import Prediction, Predictors
from harness.plan.recommend.guide import Advice, Remedy
from harness.plan.recommend.predict import scenario_of
from harness.plan.recommend.question import RecommendRequest
from harness.plan.scenario import Scenario
from harness.tell.formats import gigabytes


@dataclass(frozen=True, kw_only=True)
class OfExperts:
    """The usual strategies, each with its states."""

    roomy: tuple[Prediction, ...]
    """Whose states leave room for activations, the one with the fewest moving parts first."""
    others: tuple[Prediction, ...]
    """What holds least first."""
    instead: tuple[Alternative, ...]
    """Ways out where none leaves room, and adapters."""
    uneven: str | None
    """Why strategies that shard alike hold unlike states; None: they do not."""

    @property
    def shown(self) -> tuple[Prediction, ...]:
        """In the order in which they are recommended."""
        return (*self.roomy, *self.others)

    def reasons(self) -> list[tuple[Prediction, str]]:
        """Why each of the others is not taken."""
        return [(one, _why_not(one)) for one in self.others]


def of_experts(question: RecommendRequest, by: Predictors) -> OfExperts:
    """States of the usual strategies at micro-batches of one sample, and what leaves room if none does."""
    checkpointing = question.checkpointing[0]
    labels = USUAL if question.gpus > 1 else (registry.REFERENCE, *USUAL)
    tried = [scenario_of(question, label, 1, checkpointing=checkpointing) for label in labels]
    found = [Prediction(scenario=one) for one in tried if not pointless(one.label, question.gpus)]
    roomy = sorted(
        (one for one in found if one.states_leave_room), key=lambda one: registry.moving_parts(_label(one))
    )
    others = [one for one in found if not one.states_leave_room]
    held = {_label(one): one.state_bytes(*STATE_KINDS) or 0 for one in found}
    return OfExperts(
        roomy=tuple(roomy),
        others=tuple(sorted(others, key=lambda one: one.held_beside_activations)),
        instead=() if roomy else tuple(alternatives(tried, by=by, keeps_batch=True)),
        uneven=why_uneven(held, question.model.config),
    )


def _why_not(one: Prediction) -> str:
    held, there = one.held_beside_activations, one.there_bytes
    size = f"model states take {gigabytes(held)} of {gigabytes(there)} GB"
    if held > there:
        return f"does not fit: {size}"
    return f"{size}, and above {STATES_SHARE:.0%} activations have little room".replace("%", " %")


def advice_of_experts() -> Advice:
    """What is called for, and what of it is not here."""
    return Advice(
        case="mixture of experts",
        figures="activations and speed are not predicted: they depend on which tokens go to which expert",
        remedies=(
            Remedy(
                tool="expert",
                degree=None,
                reason="called for; it puts experts on different GPUs, and no strategy here does",
            ),
        ),
    )


NOT_PREDICTED = (
    "peak_bytes", "peak_bytes_between", "device_bytes", "margin_bytes", "tight", "decisive_moment",
    "step_seconds", "exposed_seconds", "tokens_per_second_per_gpu", "model_flops_utilization",
    "gpu_hours_per_billion_tokens", "kilowatt_hours_per_billion_tokens",
)  # fmt: skip


def states_as_json(one: Prediction) -> dict[str, Any]:
    """The keys of a configuration, of which only states are known."""
    scenario = scenario_in(one)
    return {
        **dict.fromkeys(NOT_PREDICTED),
        "backend": scenario.label,
        "micro_batch_size": scenario.micro_batch_size,
        "accumulation_steps": scenario.accumulation_steps,
        "activation_checkpointing": scenario.job.training.activation_checkpointing,
        "offload": str(scenario.options.get("offload", "none")),
        "shard_size": scenario.options.get("shard_size"),
        "state_bytes": one.held_beside_activations,
        "host_bytes_per_node": one.host_bytes_per_node,
    }


def scenario_in(one: Prediction) -> Scenario:
    """Its scenario, which it has."""
    assert one.scenario is not None
    return one.scenario


def _label(one: Prediction) -> str:
    return scenario_in(one).label


def scenarios_in(found: Sequence[Prediction]) -> list[Scenario]:
    """Theirs."""
    return [scenario_in(one) for one in found]
