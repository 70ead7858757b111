"""Observed scripts that train nothing, apart, or with an empty group; a sound one is not named."""

from typing import Any

from harness.judge.comparison import Comparison
from harness.record import ObservationPart, ObservedPart, Record
from tests.records import make_communication, make_record

GROUP = {"tensors": 3, "learning_rate": 1e-3}


def script(
    *, base: str | None = "ddp", rates: list[list[float | None]] | None = None, bytes_moved: bool = True,
    fed: tuple[list[str], list[str]] = (["a"], ["b"]), forward: str | None = None, **seen: Any,
) -> Record:  # fmt: skip
    """fed: digests of each rank's samples in a step; forward: a collective of the forward pass."""
    observed: dict[str, Any] = {"updated_tensors": 3, "optimizer_steps": 4, "optimizer_groups": [GROUP]}
    part = ObservationPart(
        command=["torchrun", "train.py"], frameworks=[], base=base, learning_rates=rates or [[1e-3] * 4]
    )
    record = make_record(label="observed-ddp")
    moved = make_communication(2) if bytes_moved else []
    if forward:
        moved += [one.model_copy(update={"phase": "forward"}) for one in make_communication(2, forward)]
    return record.model_copy(
        update={
            "ranks": [
                rank.model_copy(update={"batch_digests": [given] * 3})
                for rank, given in zip(record.ranks, fed, strict=True)
            ],
            "observation": part,
            "observed": ObservedPart(**observed | seen),
            "comm": moved,
        }
    )


def found(record: Record) -> dict[str, str]:
    kinds = ("nothing-updated", "empty-group", "ranks-alone", "samples-repeated")
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
        "nothing-updated": "the optimizer updated nothing: no tensor of its 3 had a gradient; it was "
        "probably made before the model was wrapped"
    }


def test_empty_groups_are_named_by_their_places() -> None:
    groups = [GROUP, GROUP | {"tensors": 0}, GROUP | {"tensors": 0}]
    assert found(script(optimizer_groups=groups)) == {
        "empty-group": "empty groups of the optimizer's 3: 1, 2; no parameter trains with their rate and "
        "decay"
    }


def test_wrapped_ranks_that_move_nothing_are_alone_too() -> None:
    for base in ("ddp", None):
        text = found(script(base=base, bytes_moved=False))["ranks-alone"]
        assert text == "2 ranks train without exchanging gradients: each has a model of its own"
    assert found(script(base=None)) == {}


def test_answers_that_an_evaluation_gathers_do_not_hide_ranks_that_are_alone() -> None:
    for op, named in (("all_gather", {"ranks-alone"}), ("broadcast", {"ranks-alone"}), ("all_reduce", set())):
        for base in ("ddp", None):
            assert found(script(base=base, bytes_moved=False, forward=op)).keys() == named, op
            assert found(script(base=base, forward=op)) == {}


def test_ranks_that_are_fed_alike_are_named() -> None:
    text = (
        "all 2 ranks train on the same samples in the first steps (compared: 3): the data is not split over "
        "ranks"
    )
    alike = (["a", "b"], ["a", "b"])
    for forward in (None, "all_gather"):
        assert found(script(fed=alike, forward=forward)) == {"samples-repeated": text}
    alone = found(script(fed=alike, bytes_moved=False))
    assert alone.keys() == {"ranks-alone"}
    assert alone["ranks-alone"].endswith(", all on the same samples")


def test_ranks_that_share_samples_or_show_none_are_not() -> None:
    alike = (["a"], ["a"])
    assert found(script(fed=alike, forward="all_reduce")) == {}  # they cut layers or samples
    assert found(script(fed=([], []))) == {}
    assert not found(script(fed=([], []), bytes_moved=False))["ranks-alone"].endswith("same samples")
