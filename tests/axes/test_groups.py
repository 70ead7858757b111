"""Groups of the optimizer by names of parameters: own rates, own decay, frozen ones."""

import json

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.job.config import load_experiment
from harness.job.pairs import why_refused
from harness.judge.quantities import rank_states
from tests.representatives import EXHAUSTIVE, first
from tests.traps.matrix import TINY

from .parity import assert_as_derived, assert_parity

pytestmark = pytest.mark.long(seconds=15)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
FEW = ("zero2", "zero3", "fsdp")
FEW_FROZEN = ("zero3", "fsdp", "fsdp1")
"""FSDP1 reduces frozen neighbours of trained weights."""
RATES = (
    "optimizer.groups=[{parameters: '*norm*', weight_decay: 0.05, learning_rate: 3.0e-4}, "
    "{parameters: model.layers.1.*, learning_rate: 2.0e-4}]"
)
FROZEN = (
    "optimizer.groups=[{parameters: model.embed_tokens.*, frozen: true}, {parameters: '*self_attn*', "
    "frozen: true}, {parameters: model.layers.0.*, learning_rate: 2.0e-4}]"
)


@pytest.mark.costly
@pytest.mark.parametrize("strategies", [FEW, pytest.param(STRATEGIES, marks=EXHAUSTIVE)])
def test_groups_with_rates_and_decay_of_their_own_train_the_same(strategies: tuple[str, ...], matrix) -> None:
    records = assert_parity(matrix, [RATES], strategies)
    assert_as_derived(matrix, [RATES], strategies)
    for record in records.values():
        seen = record.observed
        assert sorted(group["lr_scale"] for group in seen.optimizer_groups) == [0.2, 0.3, 1.0]
        assert [len(rates) for rates in seen.learning_rates] == [len(record.steps)] * 3
        for group, rates in zip(seen.optimizer_groups, seen.learning_rates, strict=True):
            scale = group["lr_scale"]
            assert rates == pytest.approx([step.learning_rate * scale for step in record.steps], rel=1e-12)
        assert all(step.applied_learning_rate == step.learning_rate for step in record.steps)


@pytest.mark.parametrize("strategies", [FEW_FROZEN, pytest.param(STRATEGIES, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_groups_that_are_frozen_keep_their_weights_and_have_neither_gradients_nor_states(
    strategies: tuple[str, ...], matrix
) -> None:
    records = assert_parity(matrix, [FROZEN], [name for name in strategies if name != "fsdp1"])
    assert_as_derived(matrix, [FROZEN], strategies)
    assert all("model.embed_tokens.weight" in record.layout.frozen for record in records.values())
    found = {f.id for f in matrix.findings(["fsdp1"], 2, [FROZEN])}
    assert found == {"frozen-weights-reduced"}  # which torch does with frozen neighbours of trained weights


def test_a_backend_that_gives_all_groups_one_rate_is_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-OneRate"], 2, [RATES])}
    assert "learning-rate-differs" in found, found


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ("[{parameters: encoder.*, frozen: true}]", "'encoder.*' has no parameters: it matches none"),
        ("[{parameters: '*', frozen: true}]", "every parameter is frozen"),
        ("[{parameters: '*', learning_rate: 1.0}, {parameters: '*.bias', frozen: true}]", "matches none"),
        ("[{parameters: '*'}]", "give `learning_rate`, `weight_decay` or `frozen: true`"),
        ("[{pattern: '*'}]", "pattern"),
    ],
)  # fmt: skip
def test_groups_without_effect_are_refused_before_a_run(groups, reason, tmp_path) -> None:
    command = ["compare", "--set", f"optimizer.groups={groups}", "--runs", str(tmp_path)]
    result = CliRunner().invoke(harness, command)
    assert result.exit_code != 0
    assert reason in result.output


@pytest.mark.parametrize("label", first(["zero3", "fsdp"], ["zero1", "zero3", "fsdp"]))
def test_an_estimate_has_the_states_of_a_run_and_a_peak_or_its_bounds(label, matrix) -> None:
    sets = [word for setting in (*TINY, FROZEN) for word in ("--set", setting)]
    command = ["estimate", "--backends", label, "--world-size", "2", "--json", *sets]
    (row,) = json.loads(CliRunner().invoke(harness, command).stdout)["rows"]
    expected = rank_states(matrix.record(label, 2, [FROZEN]))[0].expected
    assert row["optimizer_bytes"] == sum(
        t.bytes for t in expected.terms if t.kind in ("optimizer", "masters")
    )
    assert (row["peak_bytes"] is None) != (row["peak_bytes_between"] is None)


@pytest.mark.parametrize("label", ["pp", "tp", "cp"])
def test_strategies_whose_ranks_share_samples_are_unsupported(label) -> None:
    job = load_experiment(None, [RATES]).job()
    assert "optimizer.groups along" in why_refused(label, 2, job)
