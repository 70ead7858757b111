"""Jobs of `configs` that are no language models: under every strategy equal to one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.command_line import records, succeeds
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=40)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHORT = (
    "training.steps=4", "measure.warmup_steps=2", "measure.probed_steps=1", "measure.traced_steps=0",
    "measure.cooldown_steps=0", "evaluation.every_steps=4", "evaluation.samples=6", "data.limit=48",
    "training.global_batch_size=8", "compare.noise_runs=false",
)  # fmt: skip
JOBS = {
    "vit": ("zero3", "fsdp1"), "t5": ("fsdp",), "own-model": ("zero2",),
}  # fmt: skip
ALWAYS = {"own-model": JOBS["own-model"]}
WIDE = {
    "vit": ("ddp", "zero2", "zero3", "fsdp", "fsdp1", "trainer-ddp"),
    "t5": ("ddp", "zero2", "zero3", "fsdp", "fsdp1", "trainer-zero2"),
    "resnet": ("ddp", "zero3", "fsdp"),
    "own-model": ("zero2", "fsdp1"),
}
OF_THE_MACHINE = {"busy-machine", "slow-rank", "slow-data", "noisy-steps"}


def compared(folder: Path, name: str, *settings: str) -> dict[str, Any]:
    words = [word for setting in (*SHORT, *settings) for word in ("--set", setting)]
    folder.mkdir(exist_ok=True)
    done = succeeds("compare", "--config", CONFIGS / f"{name}.yaml", *words, "--json", cwd=folder)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "backends"),
    [*cheap([*ALWAYS.items()], JOBS.items()), *first([], WIDE.items())],
)
def test_strategies_train_what_one_process_trains(
    name: str, backends: tuple[str, ...], tmp_path: Path
) -> None:
    small = {
        "resnet": ["training.micro_batch_size=4"],
        # Keys' biases have a gradient of zero but for rounding, which Adam makes as large as any other.
        "vit": [
            "data.image_size=16",
            "model.config.num_hidden_layers=2",
            "training.accumulation_steps=2",
            "compare.noise_runs=true",
        ],
    }
    found = compared(tmp_path, name, f"compare.backends=[{', '.join(backends)}]", *small.get(name, []))
    rows = {row["backend"]: row for row in found["rows"]}
    assert set(rows) == {"single", *backends}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {rows[backend]["parity"] for backend in backends} <= {"exact", "tight"}
    for backend in backends:
        expected_bytes = rows[backend]["expected_sent_bytes_per_step"]
        assert expected_bytes == rows[backend]["sent_bytes_per_step"] is not None
    expected = {"batch-norm"} if name == "resnet" else set()
    assert {finding["id"] for finding in found["findings"]} - OF_THE_MACHINE == expected
    runs = records(tmp_path / "runs")
    evaluated = [run.eval[-1].loss for run in runs]
    if name != "resnet":  # whose running statistics differ by rank
        assert evaluated == pytest.approx([evaluated[0]] * len(runs), rel=1e-5)
    assert all(run.data is not None and run.eval[-1].samples == 6 for run in runs)


LOW_PRECISION = ("training.precision=bf16-mixed", "training.steps=3", "evaluation.every_steps=null")


@pytest.mark.costly
def test_low_precision_takes_numbers(tmp_path: Path) -> None:
    """Inputs that are no token ids meet weights in 16 bits."""
    found = compared(tmp_path, "own-model", *LOW_PRECISION, "compare.backends=[zero3]")
    assert {row["backend"]: row["parity"] for row in found["rows"]} == {"single": "exact", "zero3": "band"}


@pytest.mark.exhaustive
def test_low_precision_takes_images_and_refuses_batch_norm_where_it_cannot_run(tmp_path: Path) -> None:
    micro = "training.micro_batch_size=4"
    found = compared(tmp_path, "resnet", *LOW_PRECISION, micro, "compare.backends=[zero3, fsdp, fsdp1]")
    rows = {row["backend"]: row for row in found["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "single": "ok", "zero3": "unsupported", "fsdp": "unsupported", "fsdp1": "ok",
    }  # fmt: skip
    assert all("BatchNorm" in rows[name]["reason"] for name in ("zero3", "fsdp"))
    assert rows["fsdp1"]["expected_sent_bytes_per_step"] is None


@pytest.mark.costly
def test_batch_norm_is_judged_by_a_reference_with_the_same_micro_batches(tmp_path: Path) -> None:
    settings = ("training.micro_batch_size=null", "compare.backends=[ddp]")
    found = compared(tmp_path, "resnet", *settings)
    (row,) = (row for row in found["rows"] if row["backend"] == "ddp")
    assert row["parity"] in ("exact", "tight")
    (finding,) = (finding for finding in found["findings"] if finding["id"] == "batch-norm")
    assert "over the 4 samples of a rank's micro-batch: 9; the reference does so too" in finding["message"]
