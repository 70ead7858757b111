"""Optimizers of every kind under each strategy: groups, SGD and Adam, 8-bit states, Muon, a user's own."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.judge.quantities import rank_states, textbook, volume_differences, why_unknown
from tests.representatives import EXHAUSTIVE, first
from tests.traps.clean import assert_clean, differing_bytes
from tests.traps.matrix import TINY

pytestmark = pytest.mark.long(seconds=50)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
FEW_GROUPED = ("zero2", "zero3", "fsdp")
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
@pytest.mark.parametrize("strategies", [FEW_GROUPED, pytest.param(STRATEGIES, marks=EXHAUSTIVE)])
def test_groups_with_rates_and_decay_of_their_own_train_the_same(strategies: tuple[str, ...], matrix) -> None:
    records = assert_clean(strategies, 2, [RATES], matrix)
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
    records = assert_clean([name for name in strategies if name != "fsdp1"], 2, [FROZEN], matrix)
    assert not differing_bytes(matrix.record("fsdp1", 2, [FROZEN]))
    assert all("model.embed_tokens.weight" in record.layout.frozen for record in records.values())
    found = {f.id for f in matrix.findings(["fsdp1"], 2, [FROZEN])}
    assert found == {"frozen-weights-reduced"}  # which torch does with frozen neighbours of trained weights


def test_a_backend_that_gives_all_groups_one_rate_is_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-OneRate"], 2, [RATES])}
    assert "learning-rate-differs" in found, found


@pytest.mark.parametrize("label", first(["zero3", "fsdp"], ["zero1", "zero3", "fsdp"]))
def test_an_estimate_has_the_states_of_a_run_and_a_peak_or_its_bounds(label, matrix) -> None:
    row = assert_estimated(label, [FROZEN], matrix)
    assert (row["peak_bytes"] is None) != (row["peak_bytes_between"] is None)


FILE = Path(__file__).with_name("own_optimizer.py")
LION = f"optimizer.factory={FILE}:lion"


@pytest.mark.parametrize("strategies", [FEW_GROUPED, pytest.param(STRATEGIES, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_every_strategy_trains_as_one_process_and_counts_what_it_keeps(
    strategies: tuple[str, ...], matrix
) -> None:
    groups = "optimizer.groups=[{parameters: '*norm*', learning_rate: 2.0e-4}]"
    given = [LION, "optimizer.arguments={beta: 0.95}", groups]
    records = assert_clean(strategies, 2, given, matrix, derived=False)
    for label, record in records.items():
        assert record.backend.effective.optimizer.endswith("own_optimizer.Lion")
        assert record.observed.optimizer_used
        for states in rank_states(record):
            assert states.expected is None
            assert 0.9 < states.measured["optimizer"] / states.measured["gradients"] < 1.1, label
        assert textbook(record) is None
        assert record.world.world_size == 1 or (why_unknown(record), volume_differences(record)) == (None, [])


def ask(*command: str, settings: Sequence[str] = (LION,)):
    sets = [word for setting in (*TINY, *settings) for word in ("--set", setting)]
    return CliRunner().invoke(harness, [*command, *sets])


def assert_estimated(label: str, settings: Sequence[str], matrix) -> dict:
    """States of the optimizer are those of a run; the row."""
    estimate = ("estimate", "--backends", label, "--world-size", "2", "--json")
    (row,) = json.loads(ask(*estimate, settings=settings).stdout)["rows"]
    terms = rank_states(matrix.record(label, 2, settings))[0].expected.terms
    assert row["optimizer_bytes"] == sum(t.bytes for t in terms if t.kind in ("optimizer", "masters"))
    return row


def test_what_it_will_keep_is_not_available_in_an_estimate() -> None:
    result = ask("estimate", "--backends", "ddp,zero1", "--world-size", "2", "--json")
    for row in json.loads(result.stdout)["rows"]:
        assert row["weights_bytes"] > 0
        assert row["sent_bytes_per_step"] > 0
        unknown = ("optimizer_bytes", "model_state_bytes", "textbook_model_state_bytes", "peak_bytes")
        assert [row[key] for key in unknown] == [None] * 4
        assert "counted in a run, not predicted" in row["memory_unknown"]


def test_recommend_refuses_with_the_reason() -> None:
    asked = ["--model", "gpt2", "--gpus", "2", "--gpu", "H100-80", "--tokens-per-step", "4096"]
    result = CliRunner().invoke(harness, ["recommend", *asked, "--set", LION])
    assert result.exit_code == 1
    assert "counted in a run, not predicted" in " ".join(result.output.split())


def test_fit_measures_without_a_prediction(tmp_path) -> None:
    limits = ("--limit", "100MB", "--most-runs", "1", "--runs", str(tmp_path))
    result = ask("fit", "--backend", "zero1", "--nproc", "2", *limits, "--json")
    assert result.exit_code == 0
    (trial,) = json.loads(result.stdout)["trials"]
    assert (trial["predicted_bytes"], trial["status"]) == (None, "ok")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("groups=[{parameters: encoder.*, frozen: true}]", "'encoder.*' has no parameters: it matches none"),
        ("groups=[{parameters: '*', frozen: true}]", "every parameter is frozen"),
        ("groups=[{parameters: '*', learning_rate: 1.0}, {parameters: '*.bias', frozen: true}]",
         "matches none"),
        ("groups=[{parameters: '*'}]", "give `learning_rate`, `weight_decay` or `frozen: true`"),
        ("groups=[{pattern: '*'}]", "pattern"),
        (f"factory={FILE}:no_optimizer", "returned a str; return an optimizer of torch"),
        (f"factory={FILE}:of_some", "returned an optimizer of other tensors"),
        (f"factory={FILE}:absent", "the module has no 'absent'"),
    ],
)  # fmt: skip
def test_groups_without_effect_and_what_is_no_optimizer_are_refused_before_a_run(
    setting: str, reason: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(
        harness, ["compare", "--set", f"optimizer.{setting}", "--runs", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert reason in " ".join(result.output.split())


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
    records = assert_clean(strategies, 2, settings, matrix)
    assert {record.backend.effective.optimizer for record in records.values()} == {name}
    found = rank_states(records["ddp"])[0]
    assert found.measured.get("optimizer", 0) // found.measured["weights"] == states


@pytest.mark.parametrize("settings", first([MOMENTUM], [MOMENTUM, ADAM]))
@pytest.mark.costly
def test_low_precision_of_stage_0_forgets_the_step_that_it_takes_while_it_sets_up(settings, matrix) -> None:
    given = [*settings, "training.precision=bf16-mixed", "optimizer.weight_decay=1.0"]
    assert_clean(["ddp", "zero0"], 2, given, matrix)


@pytest.mark.parametrize("label", ["zero2", "zero3", "fsdp1"])
def test_an_estimate_has_the_momentum_of_a_run(label: str, matrix) -> None:
    assert_estimated(label, MOMENTUM, matrix)


NOT_HELD = "was not validated against the reference"
OWN_IN_BF16 = ["optimizer.factory=own:lion", "training.precision=bf16-mixed"]


@pytest.mark.parametrize(
    ("settings", "labels", "reason"),
    [
        ([RATES], ("pp", "tp", "cp"), "optimizer.groups along"),
        (OWN_IN_BF16, ("zero0", "pp", "cp", "tp"), ""),
        (OWN_IN_BF16[:1], ("pp", "cp", "tp"), ""),
        *(
            ([f"optimizer.kind={kind}"], ("pp", "cp", "tp", "autotp-zero1"), NOT_HELD)
            for kind in ("sgd", "adam")
        ),
    ],
)
def test_strategies_that_were_not_held_to_the_reference_are_unsupported(settings, labels, reason) -> None:
    job = load_experiment(None, settings).job()
    for label in labels:
        refused = why_refused(label, 2, job)
        assert refused is not None, label
        assert reason in refused, label
    assert why_refused("zero0", 2, load_experiment(None, OWN_IN_BF16[:1]).job()) is None


@pytest.mark.parametrize(
    ("given", "ignored"),
    [({"momentum": 0.9}, "momentum"), ({"kind": "sgd", "beta1": 0.8}, "beta1")],
)  # fmt: skip
def test_settings_of_another_kind_are_refused(given, ignored) -> None:
    with pytest.raises(ValueError, match=f"`{ignored}` would be ignored by"):
        Job.model_validate({"optimizer": given})


KIND, BNB = "optimizer.kind=adamw-8bit", "optimizer.kind=adamw-8bit-bnb"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra low-bit is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="the extra qlora is not installed"
)
MODEL = (
    "model.config={hidden_size: %d, intermediate_size: %d, num_hidden_layers: %d, num_attention_heads: 2, "
)
MODEL += "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 320}"
EVEN = MODEL % (96, 128, 2)
"""Halves of its groups and of its matrices are multiples of 256 elements and above 4,096."""
ODD = MODEL % (64, 132, 1)
"""Every matrix is a multiple of 256 elements, half of all of them is not."""
UNEVEN = MODEL % (96, 100, 4)
"""Halves of all matrices are a multiple of 256 elements, one matrix is not."""
PARTS, PARTS_BNB = ("ddp", "zero1", "zero3", "fsdp"), ("ddp", "zero0", "zero1", "zero2", "zero3")
"""FSDP1 cuts units anywhere, so that parts of matrices are no multiples."""
CUT = MODEL % (64, 100, 1)
"""FSDP1's halves have 1,472 of the 6,400 elements of a matrix on the first rank."""


@needs_torchao
@pytest.mark.parametrize("label", first(["fsdp1"], ["zero1", "zero3", "fsdp1", "fsdp-cp", "tp"]))
def test_trap_30_what_a_rank_updates_is_no_multiple_of_a_block(label: str, matrix) -> None:
    found = {f.id: f for f in matrix.findings([label], 2, [KIND, ODD])}
    wide = found.pop("low-bit-states-wide")
    assert wide.cell.label == label
    assert "bytes of optimizer states are in full width although optimizer.kind is adamw-8bit" in wide.text
    # What it names may be all that there is of quantised moments.
    assert set(found) <= {"master-dtype-differs"}


@pytest.mark.parametrize(
    ("kind", "precision", "labels"),
    [
        pytest.param(KIND, "fp32", ("zero3", "fsdp"), marks=needs_torchao),
        pytest.param(BNB, "fp32", ("zero3",), marks=[needs_bitsandbytes, pytest.mark.costly]),
        *(
            pytest.param(kind, precision, labels, marks=[needs, EXHAUSTIVE])
            for kind, labels, needs in ((KIND, PARTS, needs_torchao), (BNB, PARTS_BNB, needs_bitsandbytes))
            for precision in ("fp32", "bf16-mixed")
        ),
    ],
)
def test_every_strategy_trains_with_8_bit_states(
    kind: str, precision: str, labels: tuple[str, ...], matrix
) -> None:
    records = assert_clean(labels, 2, [kind, EVEN, f"training.precision={precision}"], matrix)
    for label, record in records.items():
        assert "uint8" in record.observed.optimizer_state_dtypes, label
        assert record.observed.wide_optimizer_bytes == 0, label


@needs_bitsandbytes
def test_trap_30_a_part_is_too_small_for_bitsandbytes(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["fsdp1"], 2, [BNB, CUT])}
    wide = found.pop("low-bit-states-wide")
    assert wide.values["wide_optimizer_bytes"] == 2 * 4 * 1472
    assert "adamw-8bit-bnb: what a rank updates is below 4,096 elements" in wide.text
    assert not found


MUON = "optimizer.kind=muon"
ODD_ROWS = (
    "model.config={hidden_size: 32, intermediate_size: 49, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}"
)
"""Rows of some matrices that two ranks do not share evenly."""


def test_muon_trains_the_same_with_whole_matrices_and_with_rows(matrix) -> None:
    records = assert_clean(["ddp", "fsdp"], 2, [MUON, ODD_ROWS], matrix)
    for record in records.values():
        assert record.backend.effective.optimizer == "harness.rank.models.optimizer.MuonAndAdamW"
        assert record.observed.matrices_in_parts == 0


@pytest.mark.parametrize("label", first(["fsdp"], ["ddp", "fsdp"]))
@pytest.mark.costly
def test_muon_in_bf16_lies_within_what_its_rounding_changes(label: str, matrix) -> None:
    assert_clean([label], 2, [MUON, ODD_ROWS, "optimizer.newton_schulz=bf16"], matrix)


def test_rows_that_are_orthogonalised_by_themselves_are_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-OrthogonalisesRows"], 2, [MUON, ODD_ROWS])}
    assert next(iter(found)) == "muon-on-parts"
    assert "no optimizer keeps the complete momentum of 14 matrices" in found["muon-on-parts"].text
    assert set(found) <= {"muon-on-parts", "diverged", "update-differs"}


@pytest.mark.parametrize(
    ("label", "settings", "reason"),
    [
        pytest.param("zero1", [KIND, UNEVEN], "a parameter ends within one", marks=needs_torchao),
        ("fsdp", [BNB, EVEN], "take no DTensor"), ("zero1", [MUON], "muon needs whole matrices"),
        ("fsdp1", [MUON], "muon needs whole matrices"),
    ],
)  # fmt: skip
def test_what_an_optimizer_cannot_update_is_unsupported(
    label: str, settings: list[str], reason: str, matrix
) -> None:
    record = matrix.record(label, 2, settings)
    assert record.status == "unsupported"
    assert reason in record.reasons[0]
