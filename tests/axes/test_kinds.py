"""SGD and Adam beside AdamW: weight decay added to gradients, other states."""

import json

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.judge.quantities import rank_states
from tests.representatives import EXHAUSTIVE, first
from tests.traps.matrix import TINY

from .parity import assert_as_derived, assert_parity

pytestmark = pytest.mark.long(seconds=15)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
SHARDED = ("ddp", "zero2", "zero3", "fsdp1")
"""An estimate is held to them below."""
PLAIN_SGD = ["optimizer.kind=sgd", "optimizer.learning_rate=0.1"]
MOMENTUM = [*PLAIN_SGD, "optimizer.momentum=0.9"]
ADAM = ["optimizer.kind=adam"]


@pytest.mark.parametrize(
    ("settings", "name", "states", "strategies"),
    [
        pytest.param(MOMENTUM, "torch.optim.sgd.SGD", 1, SHARDED, marks=pytest.mark.costly),
        pytest.param(ADAM, "torch.optim.adam.Adam", 2, ("ddp", "fsdp"), marks=pytest.mark.costly),
        *(
            pytest.param(settings, f"torch.optim.{name}", states, STRATEGIES, marks=EXHAUSTIVE)
            for settings, name, states in (
                (PLAIN_SGD, "sgd.SGD", 0), (MOMENTUM, "sgd.SGD", 1), (ADAM, "adam.Adam", 2),
            )
        ),
    ],
)  # fmt: skip
def test_every_strategy_trains_as_one_process_and_holds_what_is_derived(
    settings, name, states, strategies, matrix
) -> None:
    records = assert_parity(matrix, settings, strategies)
    assert {record.backend.effective.optimizer for record in records.values()} == {name}
    found = assert_as_derived(matrix, settings, strategies)["ddp"]
    assert found.measured.get("optimizer", 0) // found.measured["weights"] == states


@pytest.mark.parametrize("settings", first([MOMENTUM], [MOMENTUM, ADAM]))
@pytest.mark.costly
def test_low_precision_of_stage_0_forgets_the_step_that_it_takes_while_it_sets_up(settings, matrix) -> None:
    given = [*settings, "training.precision=bf16-mixed", "optimizer.weight_decay=1.0"]
    assert_parity(matrix, given, ["ddp", "zero0"])


@pytest.mark.parametrize("label", ["zero2", "zero3", "fsdp1"])
def test_an_estimate_has_the_momentum_of_a_run(label: str, matrix) -> None:
    sets = [word for setting in (*TINY, *MOMENTUM) for word in ("--set", setting)]
    command = ["estimate", "--backends", label, "--world-size", "2", "--json", *sets]
    (row,) = json.loads(CliRunner().invoke(harness, command).stdout)["rows"]
    expected = rank_states(matrix.record(label, 2, MOMENTUM))[0].expected
    assert row["optimizer_bytes"] == sum(
        t.bytes for t in expected.terms if t.kind in ("optimizer", "masters")
    )


@pytest.mark.parametrize("label", ["pp", "cp", "tp", "autotp-zero1"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_strategies_that_were_not_held_to_the_reference_are_unsupported(kind: str, label: str) -> None:
    job = Job.model_validate({"optimizer": {"kind": kind}})
    assert "was not validated against the reference" in why_refused(label, 2, job)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [({"momentum": 0.9}, "momentum"), ({"kind": "sgd", "beta1": 0.8}, "beta1")],
)  # fmt: skip
def test_settings_of_another_kind_are_refused(given, ignored) -> None:
    with pytest.raises(ValueError, match=f"`{ignored}` would be ignored by"):
        Job.model_validate({"optimizer": given})
