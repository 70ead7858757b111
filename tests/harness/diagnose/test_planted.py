"""Real pairs of runs on two ranks: clean ones have no difference, planted defects are named in words."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.record import Record
from tests.records import changed
from tests.representatives import EXHAUSTIVE, cheap, first
from tests.traps.matrix import Matrix

pytestmark = pytest.mark.long(seconds=25)

BF16 = ("training.precision=bf16-mixed",)


def diagnose(first: Path, second: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(harness, ["diagnose", str(first), str(second), "--json", *options])
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def folder(matrix: Matrix, record: Record) -> Path:
    return matrix.store.root / record.run_id


def beside_reference(matrix: Matrix, label: str, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """The diagnosis of a run beside the reference, whose repetitions lie beside them."""
    rows = matrix.compare([label], 2, settings).rows
    code, said = diagnose(*(folder(matrix, row.record) for row in rows[:1] + rows[-1:]), "--strict")
    assert code == (0 if said["verdict"] == "no difference beyond noise" else 3)
    return said


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        *cheap([("fsdp", ())], [("zero3", BF16), ("fsdp", ())]),
        *first([], [("zero3", ()), ("fsdp", BF16)]),
    ],
)
def test_a_clean_run_beside_the_reference_has_no_difference(matrix, label: str, settings: tuple) -> None:
    said = beside_reference(matrix, label, settings)
    assert (said["verdict"], said["beyond"], said["step"]) == ("no difference beyond noise", {}, None)


@pytest.mark.parametrize("settings", [BF16, pytest.param((), marks=EXHAUSTIVE)], ids=["bf16-mixed", "fp32"])
@pytest.mark.costly
def test_two_clean_runs_have_no_difference_where_noise_is_measured_anew(
    matrix, settings: tuple, tmp_path: Path
) -> None:
    for label in ("zero3", "ddp"):
        shutil.copytree(folder(matrix, matrix.record(label, 2, settings)), tmp_path / label)
    code, said = diagnose(tmp_path / "zero3", tmp_path / "ddp", "--strict")
    assert (code, said["verdict"]) == (0, "no difference beyond noise")
    assert not any("not measured" in sentence for sentence in said["noise"])


@pytest.mark.costly
def test_a_record_that_is_not_reproduced_here_is_said_so_with_both_norms(matrix, tmp_path: Path) -> None:
    """As where an environment variable, or an imported file, took a gradient away."""
    first, other = tmp_path / "first", tmp_path / "second"
    for place in (first, other):
        shutil.copytree(folder(matrix, matrix.record("ddp", 2, ())), place)
    document = json.loads((other / "record.json").read_text())
    norm = document["steps"][0]["gradient_norm"]
    document["steps"][0]["gradient_norm"] = 0.985 * norm
    document["run_id"] += "-env"
    (other / "record.json").write_text(json.dumps(document))
    said = diagnose(first, other)[1]
    assert said["reproduced"] is False
    sides = f"{0.985 * norm:.6g} in its record, {norm:.6g} when run again"
    assert f"not reproduced here: ddp on 2 ranks (second), gradient norm in step 0: {sides}" in text(said)
    assert "the records differ in step 0 already, gradient norm" in text(said)
    assert "accumulates" not in text(said)


def text(said: dict[str, Any]) -> str:
    assert said["verdict"] == "the runs differ beyond noise", said["said"]
    return "\n".join(said["said"])


@pytest.mark.costly
def test_one_frozen_parameter(matrix) -> None:
    said = beside_reference(matrix, "planted-Frozen")
    name = "model.layers.1.mlp.up_proj.weight"
    assert f"may matter: frozen parameters: {name} in planted-Frozen on 2 ranks, none in" in text(said)
    assert f"gradients: 1 of 21 tensors differ: {name} has none" in text(said)
    assert f"updates: 1 of 21 tensors differ: {name} has none" in text(said)


@pytest.mark.costly
def test_another_beta2_is_named_as_a_setting_and_parts_in_the_second_update(matrix) -> None:
    said = beside_reference(matrix, "planted-WrongBeta2")
    assert "may matter: optimizer constants: betas [0.9, 0.999] in planted-WrongBeta2" in text(said)
    assert "gradients: all 21 tensors agree" in text(said)
    assert (said["step"], said["tensors"]["gradients"]["beyond"]) == (1, [])


@pytest.mark.costly
def test_the_loss_of_rank_0_is_wrong_while_the_training_is_right(matrix) -> None:
    said = beside_reference(matrix, "planted-LossOfRankZero")
    assert "the loss is that of rank 0 only" in text(said)
    assert list(said["hypotheses"])[:2] == ["loss-of-one-rank/one-rank", "loss-altered/altered"]  # both stand
    assert said["hypotheses"]["loss-scale/factor"] == {"loss_scales": []}
    assert said["said"][-1] == "so both train equally, but one of them reports a wrong loss"


def test_the_defect_is_told_of_the_run_that_has_it_whatever_the_order(matrix) -> None:
    matrix.compare([], 2)
    broken, sound = (matrix.record(label, 2, ()) for label in ("planted-GradientsSummed", "ddp"))
    _, said = diagnose(folder(matrix, broken), folder(matrix, sound))
    assert (said["runs"], said["baseline"]) == ([broken.run_id, sound.run_id], sound.run_id)
    assert "all gradients x 2.000: summed over 2 ranks instead of averaged" in text(said)
    assert (said["step"], said["hypotheses"]) == (0, {})


@pytest.mark.costly
def test_a_run_of_several_nodes_is_rerun_on_one(matrix, tmp_path: Path) -> None:
    matrix.compare([], 2)
    record = matrix.record("planted-GradientsSummed", 2, ())
    moved = matrix.store.root / "moved"
    moved.mkdir()
    nodes = changed(record, world={"nodes": 2, "ranks_per_node": 1})
    (moved / "record.json").write_text(nodes.model_dump_json())
    reference = matrix.compare([], 2).rows[0].record
    _, said = diagnose(folder(matrix, reference), moved)
    assert "all gradients x 2.000" in text(said)
