"""What is read back from a run goes before what its backend says."""

import math
from typing import Any

import pytest

from harness.judge.effective import (
    altered_gradients,
    clipping,
    clips_by_part,
    decay_explains,
    decay_norm,
    left_by_parts,
    reduce_dtypes,
    setting_differences,
    synchronisation,
)
from harness.record import CommunicationPart, ObservationPart, ObservedPart, Record
from tests.records import (
    LOSSES,
    NORMS,
    changed,
    make_effective,
    make_ranks,
    make_record,
    make_steps,
    make_weights,
    told,
)


def clipped(told: float | None, *applied: float) -> Record:
    changes = {step: {"applied_gradient_norm": norm} for step, norm in enumerate(applied)}
    steps = make_steps(LOSSES, NORMS, changes=changes)
    return make_record(label="ddp", steps=steps, effective={"gradient_clipping": told})


@pytest.mark.parametrize(
    ("told", "applied", "value"),
    [
        (1.0, (), "1"), (1.0, (1.0, 0.9999993), "1"), (1.0, (2.0, 1.5), "none"), (None, (2.0, 1.5), "none"),
        (None, (1.0, 1.0), "1"), (1.0, (0.25, 0.25), "0.25"), (5.0, (2.0, 1.5), "5"),
        (1.0, (1.03, 1.06), "1"), (None, (2.1, 1.6), "none"),
    ],
)  # fmt: skip
def test_clipping_is_read_from_the_gradients_that_the_optimizer_was_given(
    told: float | None, applied: tuple[float, ...], value: str
) -> None:
    assert clipping(clipped(told, *applied)) == value


def decaying(record: Record, norm: float = 3.4) -> Record:
    """Weights of this norm, of which a tenth decays."""
    groups = [{"weight_decay": 0.1, "parameters": ["a"]}, {"weight_decay": 0.0, "parameters": ["b"]}]
    weights = make_weights(sketch={"a": [norm, *[norm] * 8], "b": [9.0, *[9.0] * 8]})
    seen = ObservedPart(optimizer_groups=groups)
    return record.model_copy(update={"observed": seen, "initial_weights": weights})


@pytest.mark.parametrize(
    ("applied", "value"),
    [
        ((1.0645, 1.0585), "1"),  # the root of 1 + 0.34^2, with some of the gradient along the weights
        ((1.06, 1.06), "1.06"),  # what clips leaves one norm
        ((0.6, 0.6005), "0.601"),
        ((1.21, 1.2095), "1.21"),
    ],
)
def test_weight_decay_that_is_added_after_clipping_is_no_other_clipping(
    applied: tuple[float, ...], value: str
) -> None:
    record = decaying(clipped(1.0, *applied))
    assert clipping(record) == value
    assert decay_explains(record, 1.0) == (value == "1")
    assert not decay_explains(clipped(1.0, *applied), 1.0), "weights that were not sketched say nothing"
    assert decay_norm(record) == pytest.approx(0.34)


def test_what_leaves_other_norms_is_no_clipping_by_one() -> None:
    by_parameter = clipped(1.0, 0.2518, 0.2524)
    assert (clipping(by_parameter), altered_gradients(by_parameter)) == ("1", (0, 0.2518, 1.0))
    low = by_parameter.job.training.model_copy(update={"precision": "bf16-mixed"})
    rounded = changed(by_parameter, job={"training": low})
    assert clipping(rounded) == "0.252", "norms that are told in low precision are rounded by more"


def test_decay_that_is_added_to_what_was_not_clipped() -> None:
    norms = (2.0, 1.5)
    applied = [math.hypot(norm, 0.34) for norm in norms]
    assert decay_explains(decaying(clipped(None, *applied)), None)
    assert not decay_explains(decaying(clipped(None, *norms)), None)


@pytest.mark.parametrize(
    ("applied", "by_part"),
    [((1.41421, 1.3), True), ((1.0, 1.0), False), ((1.3, 1.3), False), ((0.7,), False)],
)
def test_parts_that_ranks_clip_each_have_the_root_of_their_number(
    applied: tuple[float, ...], by_part: bool
) -> None:
    record = clipped(1.0, *applied)
    assert clips_by_part(record, 1.0) == by_part
    assert not clips_by_part(record, None)
    if by_part:
        assert clipping(record) == "1"


def test_gradients_that_no_clipping_explains_were_altered() -> None:
    assert altered_gradients(clipped(1.0, 1.0, 1.06)) == (1, 1.06, 1.0)
    assert altered_gradients(clipped(None, 2.0, 1.8)) == (1, 1.8, NORMS[1])
    assert altered_gradients(clipped(1.0, 0.25, 0.25)) is None
    assert altered_gradients(clipped(1.0)) is None
    since_the_first = clipped(1.0, 0.9996, 0.998, 0.98)
    assert altered_gradients(since_the_first) == (0, 0.9996, 1.0), "once seen, the first that is not exact"
    assert altered_gradients(clipped(1.0, 1.000001, 0.998)) is None
    ranks = make_ranks(2, otherwise=[{}, {"optimizer steps": [3, 4]}])
    alone = since_the_first.model_copy(update={"ranks": ranks})
    assert altered_gradients(alone) is None, "the norm is that of the ranks that update"
    assert clipping(clipped(1.0, 0.7, 0.7).model_copy(update={"ranks": ranks})) == "1"


@pytest.mark.parametrize(
    ("applied", "by_parts"),
    [((1.197, 1.119), True), ((1.197, 1.0), False), ((1.45, 1.2), False), ((0.9, 1.2), False), ((), False)],
)
def test_parts_that_are_clipped_by_their_own_norms_leave_more_than_the_limit(
    applied: tuple[float, ...], by_parts: bool
) -> None:
    assert left_by_parts(clipped(1.0, *applied), 1.0) == by_parts
    assert not left_by_parts(clipped(1.0, *applied), None)


def synchronised(early: int, told: str, label: str = "third-party", **effective: str) -> Record:
    parts = make_ranks(2, early_reduced_bytes=early)
    comm = [
        CommunicationPart(
            rank=rank, phase="backward", op="all_reduce", dtype="float32", group="0", group_ranks=[0, 1],
            group_size=2, calls=4, payload_bytes=16_000,
        )
        for rank in range(2)
    ]  # fmt: skip
    return make_record(
        label=label, ranks=parts, comm=comm, effective={"gradient_synchronisation": told, **effective}
    )


def test_synchronisation_is_counted() -> None:
    assert synchronisation(synchronised(12_000, "last micro-step")) == "every micro-step"
    assert synchronisation(synchronised(4, "last micro-step")) == "last micro-step"


def test_a_third_party_that_reduces_in_every_micro_step_is_found() -> None:
    (found,) = told([synchronised(12_000, "last micro-step")], "synchronised-early")
    assert found.id == "synchronised-early"
    assert "12,000 of 16,000 reduced bytes" in found.message
    (without_the_last,) = told([synchronised(16_000, "last micro-step")], "synchronised-early")
    assert "reduced in every micro-step but the last: 16,000 of 16,000" in without_the_last.message
    assert told([synchronised(0, "last micro-step")], "synchronised-early") == []
    seen = ObservationPart(command=["torchrun", "train.py"], frameworks=["deepspeed"], base="zero2")
    script = synchronised(12_000, "every micro-step").model_copy(update={"observation": seen})
    assert told([script], "synchronised-early") == []
    assert told([changed(script, ranks=make_ranks(2, early_reduced_bytes=16_000))], "synchronised-early")
    assert told([synchronised(12_000, "every micro-step")], "synchronised-early") != []
    of_library = synchronised(12_000, "every micro-step", strategy="ZeRO stage 2")
    assert told([of_library], "synchronised-early") == []


def test_activations_of_tensor_parallel_ranks_are_no_gradients() -> None:
    record = synchronised(0, "last micro-step")
    gradients = [row.model_copy(update={"role": "shard"}) for row in record.comm]
    for role, dtype, dtypes in (
        ("tensor", "bfloat16", ["float32"]),
        ("shard", "bfloat16", ["bfloat16", "float32"]),
        ("shard", "complex64", ["float32"]),
    ):
        others = [row.model_copy(update={"role": role, "dtype": dtype}) for row in record.comm]
        assert reduce_dtypes(changed(record, comm=[*gradients, *others])) == dtypes


def in_groups(decaying: list[str], rest: list[str], label: str = "ddp") -> Record:
    def group(decay: float, names: list[str]) -> dict[str, Any]:
        return {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": decay, "parameters": names}

    seen = ObservedPart(optimizer_groups=[group(0.1, decaying), group(0.0, rest)])
    return make_record(label=label, observed=seen)


def test_groups_are_compared_by_the_names_of_their_parameters() -> None:
    reference = in_groups(["weight"], ["bias", "norm"], "single")
    assert setting_differences(reference, in_groups(["weight"], ["norm", "bias"])) == []
    (found,) = told([reference, in_groups(["bias", "norm"], ["weight"])], "optimizer-differs")
    assert found.id == "optimizer-differs"
    assert "bias has betas [0.9, 0.95], eps 1e-08, weight_decay 0.1 against" in found.message
    assert "constants of another group: 2" in found.message


def test_other_constants_are_told_once_and_not_again_by_parameter() -> None:
    reference = in_groups(["weight"], ["bias"], "single")
    group = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "parameters": ["weight", "bias"]}
    other = make_record(label="ddp", observed=ObservedPart(optimizer_groups=[group]))
    (difference,) = setting_differences(reference, other)
    assert difference.setting == "optimizer constants"


def test_of_constants_only_those_that_differ_are_shown() -> None:
    groups = make_effective().optimizer_groups
    for other, texts in (
        ([group | {"betas": [0.9, 0.999]} for group in groups], ("betas [0.9, 0.999]", "betas [0.9, 0.95]")),
        (groups[:1], ("weight_decay 0.1", "weight_decay 0.0 and 0.1")),
    ):
        reference, record = (
            make_record(observed=ObservedPart(optimizer_groups=held)) for held in (groups, other)
        )
        (difference,) = setting_differences(reference, record)
        assert (difference.setting, difference.texts) == ("optimizer constants", texts)


def with_constants(at_end: float, **by_step: float) -> Record:
    changes = {int(step[1:]): [{"weight_decay": value}] for step, value in by_step.items()}
    observed = ObservedPart(optimizer_groups=[{"weight_decay": at_end}], constants_by_step=changes)
    return make_record(label="ddp", observed=observed)


@pytest.mark.parametrize(
    ("record", "when"),
    [
        (with_constants(0.2), [""]),
        (with_constants(0.2, s0=0.2, s1=0.3), [""]),
        (with_constants(0.2, s0=0.1, s2=0.2), [", changed in step 2"]),
        (with_constants(0.1, s0=0.1, s1=0.2, s3=0.1), [", changed in step 1 and back in step 3"]),
        (with_constants(0.1), []),
    ],
)
def test_a_constant_that_changes_is_told_with_its_step(record: Record, when: list[str]) -> None:
    found = setting_differences(with_constants(0.1), record)
    assert [(d.setting, d.when) for d in found] == [("optimizer constants", one) for one in when]


def test_constants_that_change_as_the_references_do_are_no_difference() -> None:
    assert not setting_differences(with_constants(0.2, s0=0.1, s2=0.2), with_constants(0.2, s0=0.1, s2=0.2))


def test_clipping_that_is_another_one_after_the_training_is_told_with_both() -> None:
    record = changed(clipped(1.0, 1.0), backend={"changed": {"gradient_clipping": [0.5, 1.0]}})
    found = [d for d in setting_differences(clipped(1.0, 1.0), record) if d.setting == "gradient clipping"]
    assert [(d.reference, d.given, d.when) for d in found] == [
        ("1", "0.5", ", after the training; 1 before it")
    ]
