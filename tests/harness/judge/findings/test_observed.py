"""Observed scripts that train nothing, apart, or with an empty group; a sound one is not named."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import ObservationPart, ObservedPart, Record
from tests.records import make_communication, make_record

GROUP = {"tensors": 3, "learning_rate": 1e-3}


def script(
    *, base: str | None = "ddp", rates: list[list[float | None]] | None = None, bytes_moved: bool = True,
    **seen: Any,
) -> Record:  # fmt: skip
    observed: dict[str, Any] = {"updated_tensors": 3, "optimizer_steps": 4, "optimizer_groups": [GROUP]}
    part = ObservationPart(
        command=["torchrun", "train.py"], frameworks=[], base=base, learning_rates=rates or [[1e-3] * 4]
    )
    return make_record(label="observed-ddp").model_copy(
        update={
            "observation": part,
            "observed": ObservedPart(**observed | seen),
            "comm": make_communication(2) if bytes_moved else [],
        }
    )


def found(record: Record) -> dict[str, str]:
    kinds = ("nothing-updated", "empty-group", "ranks-alone")
    return {finding.id: finding.text for finding in Comparison([record]).findings if finding.id in kinds}


def test_a_sound_script_has_none_of_them() -> None:
    assert found(script()) == {}
    assert found(script(rates=[[0.0, 1e-3, 1e-3, 0.0]])) == {}
    assert found(script(updated_tensors=None, optimizer_steps=None)) == {}


def test_rates_of_zero_in_every_step_and_tensors_without_gradient_update_nothing() -> None:
    assert found(script(rates=[[0.0] * 4, [None] * 4])) == {
        "nothing-updated": "the optimizer updated nothing: its learning rate is 0 in all 4 steps"
    }
    assert found(script(updated_tensors=0, optimizer_steps=None)) == {
        "nothing-updated": "the optimizer updated nothing: none of its 3 tensors had a gradient; it was "
        "probably made before the model was wrapped"
    }


def test_empty_groups_are_named_by_their_places() -> None:
    groups = [GROUP, GROUP | {"tensors": 0}, GROUP | {"tensors": 0}]
    assert found(script(optimizer_groups=groups)) == {
        "empty-group": "groups 1, 2 of the optimizer's 3 are empty: no parameter trains with its rate and "
        "decay"
    }


def test_wrapped_ranks_that_move_nothing_are_alone_too() -> None:
    for base in ("ddp", None):
        text = found(script(base=base, bytes_moved=False))["ranks-alone"]
        assert text == "2 ranks train without exchanging gradients: each has a model of its own"
    assert found(script(base=None)) == {}
