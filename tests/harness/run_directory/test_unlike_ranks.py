"""Ranks are held to rank 0 in what they should have alike."""

from typing import Any

import pytest

from harness.record import ObservedPart
from harness.run_directory.assemble import otherwise
from harness.run_directory.events import (
    AppliedGradients,
    FinalEvent,
    RankEvents,
    SetupEvent,
    StepEvent,
    steps_of,
)
from tests.records import make_effective


def rank(rates: tuple[float | None, ...] = (), scale: float | None = None, **seen: Any) -> RankEvents:
    effective = make_effective(**seen.pop("effective", {}))
    steps = [
        StepEvent(
            step=step, window="timed", loss_sum=1.0, gradient_norm=1.0, learning_rate=0.1,
            applied_learning_rate=rate, global_target_tokens=1, samples=1, tokens=1, target_tokens=1,
            sample_hashes=None, seconds=1.0, data_seconds=0.0, phase_seconds={},
        )
        for step, rate in enumerate(rates)
    ]  # fmt: skip
    setup = SetupEvent(
        rank=0,
        effective=effective, native_config={}, versions={}, initial_weights=None, collectives="gloo",
        host="host", device_name="cpu", data=None, steps=None, setup_seconds=1.0,
    )  # fmt: skip
    in_force = seen.pop("in_force", {})
    final = FinalEvent(
        weights=None, observed=ObservedPart(**seen), probe_loss=None, loss_scale=scale, in_force=in_force
    )
    return RankEvents(setup=setup, steps=steps, final=final)


@pytest.mark.parametrize(
    ("mine", "first", "found"),
    [
        ({"rates": (0.1, 0.2)}, {"rates": (0.1, 0.1)}, {"learning rate of step 1": [0.2, 0.1]}),
        ({"rates": (0.1, None)}, {"rates": (0.1, 0.1)}, {}),
        ({"scale": 2.0}, {"scale": 4.0}, {"loss scale after the training": [2.0, 4.0]}),
        ({"tf32": True}, {"tf32": False}, {"tf32": [True, False]}),
        ({"optimizer_steps": 5}, {"optimizer_steps": 6}, {"optimizer steps": [5, 6]}),
        ({"optimizer_steps": None}, {"optimizer_steps": 6}, {}),
        ({"master_dtypes": []}, {"master_dtypes": ["float32"]}, {}),
        (
            {"optimizer_groups": [{"eps": 2}], "constants_by_step": {0: [{"eps": 1}], 3: [{"eps": 2}]}},
            {"optimizer_groups": [{"eps": 1}]},
            {"eps of optimizer group 0, changed in step 3": [2, 1]},
        ),
        (
            {"in_force": {"gradient_clipping": 0.5, "optimizer": "a"}},
            {"in_force": {"gradient_clipping": 1.0, "optimizer": "a"}},
            {"gradient clipping after the training": [0.5, 1.0]},
        ),
        (
            {"effective": {"gradient_clipping": None}},
            {"effective": {"gradient_clipping": 1.0}},
            {"gradient clipping": [None, 1.0]},
        ),
        (
            {"effective": {"gradient_clipping": 0.5}},
            {"effective": {"gradient_clipping": 1.0}},
            {"gradient clipping": [0.5, 1.0]},
        ),
        (
            {"optimizer_groups": [{"weight_decay": 0.1, "parameters": ["a"]}]},
            {"optimizer_groups": [{"weight_decay": 0.0, "parameters": ["a", "b"]}]},
            {
                "weight_decay of optimizer group 0": [0.1, 0.0],
                "parameters of optimizer group 0": [[], ["b"]],
            },
        ),
        (
            {"optimizer_groups": [{"eps": 1}, {"eps": 1}]},
            {"optimizer_groups": [{"eps": 1}]},
            {"groups of the optimizer": [2, 1]},
        ),
        ({"training_in_evaluation": ["drop"]}, {"training_in_evaluation": []},
         {"training in evaluation": [["drop"], []]}),
    ],
)  # fmt: skip
def test_a_difference_is_told_with_both_values(mine: Any, first: Any, found: Any) -> None:
    assert otherwise(rank(**mine), rank(**first), whole_model=True) == found


def test_stages_of_a_pipeline_agree_in_what_a_process_has_alone() -> None:
    mine, first = rank(tf32=True, optimizer_steps=5), rank(tf32=False, optimizer_steps=6)
    assert otherwise(mine, first, whole_model=False) == {"tf32": [True, False]}


def test_rank_0_has_nothing_otherwise_and_a_rank_that_ended_early_what_is_known() -> None:
    first = rank((0.1, 0.1))
    assert otherwise(first, first, whole_model=True) == {}
    ended = RankEvents(steps=rank((0.2,)).steps)
    assert otherwise(ended, first, whole_model=True) == {"learning rate of step 0": [0.2, 0.1]}


def clipped(squares: float, share: float, norm: float = 2.0) -> RankEvents:
    rank_events = rank((0.1,))
    applied = AppliedGradients(squares=squares, share=share)
    steps = [row.model_copy(update={"applied": applied, "gradient_norm": norm}) for row in rank_events.steps]
    return RankEvents(setup=rank_events.setup, steps=steps, final=rank_events.final)


def test_a_rank_that_clips_otherwise_is_told_and_is_no_norm_of_all() -> None:
    mine, first = clipped(0.01, 1.0), clipped(1.0, 1.0)
    told = {"norm of the clipped gradient of step 0": [0.1, 1.0]}
    assert otherwise(mine, first, whole_model=True) == told
    (step,) = steps_of({0: first, 1: mine})
    assert step.applied_gradient_norm is None


def test_parts_of_a_gradient_and_gradients_that_were_never_reduced_are_not_clipped_otherwise() -> None:
    for mine, first in (
        (clipped(0.64, 0.5), clipped(0.36, 0.5)),
        (clipped(0.01, 1.0, 0.1), clipped(1.0, 1.0)),
    ):
        assert otherwise(mine, first, whole_model=True) == {}
    (step,) = steps_of({0: clipped(0.36, 0.5), 1: clipped(0.64, 0.5)})
    assert step.applied_gradient_norm == 1.0


def test_of_a_gradient_that_was_seen_in_part_no_norm_is_known() -> None:
    (step,) = steps_of({0: clipped(0.36, 0.5), 1: clipped(0.4, 0.3)})
    assert step.applied_gradient_norm is None
