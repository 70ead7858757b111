"""--from-accelerate and --from-deepspeed on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.command_line import SHORT, harness, records, refused

DEEPSPEED = {
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000},
    "gradient_clipping": 0.25, "bf16": {"enabled": False}, "steps_per_print": 5,
}  # fmt: skip
ACCELERATE = """
distributed_type: FSDP
mixed_precision: no
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_offload_params: false}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    return tmp_path


@pytest.mark.costly
def test_a_row_of_a_file_keeps_every_key(folder: Path) -> None:
    words = ["--from-deepspeed", "ds.json", "--from-mode", "like-for-like", "--nproc", "2", *SHORT]
    done = harness("compare", *words, "--set", "compare.noise_runs=false", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ds.json (deepspeed, like-for-like) is row zero1:overlap_comm=True,row=ds" in done.stderr
    record = next(one for one in records(folder / "runs") if one.backend.given)
    part = record.backend.given
    assert part is not None
    assert record.job.training.gradient_clipping == 0.25
    config = record.backend.native_config
    assert config is not None
    assert config["zero_optimization"]["overlap_comm"] is True
    handled = {setting.key: setting.handling for setting in part.settings}
    assert handled["zero_optimization.overlap_comm"] == "taken"
    assert handled["zero_optimization.reduce_bucket_size"] == "pinned"
    report = harness("report", "runs", "-o", "report.md", cwd=folder)
    assert report.returncode == 0, report.stderr
    assert "Configuration files of other tools" in (folder / "report.details.md").read_text()


def cells(folder: Path, *words: str) -> list[str]:
    done = harness(
        "compare", "--dry-run", "--json", "--backends", "ddp", "--set", "compare.noise_runs=false", *words,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [cell["backend"] for cell in json.loads(done.stdout)["cells"]]


def test_files_are_more_rows_of_a_comparison(folder: Path) -> None:
    words = ["--from-deepspeed", "ds.json", "--from-accelerate", "fsdp.yaml"]
    assert cells(folder, *words, "--from-mode", "like-for-like") == [
        "single",
        "ddp",
        "fsdp:row=fsdp",
        "zero1:overlap_comm=True,row=ds",
    ]


def test_both_modes_bring_the_reference_of_the_job_as_given(folder: Path) -> None:
    words = ["--from-deepspeed", "ds.json", "--from-mode", "both", "--set", "training.gradient_clipping=1"]
    exact = "zero1:overlap_comm=True,preset=library-defaults,reduce_bucket_size=1000,row=ds-as-given"
    assert cells(folder, *words) == ["single", "ddp", "zero1:overlap_comm=True,row=ds", "single", exact]


def test_run_takes_one_row(folder: Path) -> None:
    for words in ([], ["--backend", "ddp", "--from-deepspeed", "ds.json"]):
        done = harness("run", *words, cwd=folder)
        assert done.returncode == 2
        assert "Give one of --backend" in done.stderr


def test_a_typing_error_is_one_line(folder: Path) -> None:
    (folder / "odd.json").write_text('{"zero_optimization": {"stge": 2}}')
    text = refused(folder, "compare", "--from-deepspeed", "odd.json")
    assert "'zero_optimization.stge' is unknown" in text
    assert "Did you mean 'stage'" in text


def test_largest_batches_exclude_files(folder: Path) -> None:
    text = refused(folder, "compare", "--from-deepspeed", "ds.json", "--batch", "largest")
    assert "exclude each other" in text


def planned(folder: Path, *words: str) -> dict[str, Any]:
    done = harness(*words, "--model", "bloom-560m", "--gpu", "A100-80", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plan_takes_a_file_and_says_what_it_leaves_out(folder: Path) -> None:
    zero = {**DEEPSPEED["zero_optimization"], "overlap_com": True}  # type: ignore[dict-item]
    document = {**DEEPSPEED, "zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps(document))
    found = planned(folder, "estimate", "--from-deepspeed", "ds.json")
    (row,) = found["rows"]
    assert row["backend"] == "zero1:overlap_comm=True,reduce_bucket_size=1000"
    assert row["micro_batch_size"] == 2
    assert (found["job"]["gradient_clipping"], found["job"]["precision"]) == (0.25, "fp32")
    assert found["job"]["preset"] == "library-defaults"
    taken, idle, left, *_ = found["remarks"]
    assert taken.startswith("from ds.json: zero_optimization.stage=1, zero_optimization.overlap_comm=true, ")
    assert idle == "without effect on a run, in ds.json: steps_per_print"
    assert left.startswith(
        "not understood in ds.json, and left out: 'zero_optimization.overlap_com' is unknown"
    )
    assert "overlap_com' is unknown" in refused(folder, "compare", "--from-deepspeed", "ds.json")


def test_a_recommendation_takes_the_job_of_a_file_and_leaves_its_strategy_open(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**DEEPSPEED, "train_micro_batch_size_per_gpu": 2}))
    found = planned(folder, "recommend", "--gpus", "2", "--from-deepspeed", "ds.json")
    assert any("from 1 micro-step of 2 samples on 2 GPUs" in remark for remark in found["remarks"])
    assert len({one["backend"] for one in found["fitting"]}) > 3
    (line, *_) = found["commands"]["compare"]
    assert "--set training.gradient_clipping=0.25" in line


def test_a_plan_takes_one_file(folder: Path) -> None:
    two = ("--from-deepspeed", "ds.json", "--from-accelerate", "fsdp.yaml")
    assert "2 files are given; a plan takes one" in refused(folder, "estimate", "--model", "gpt2", *two)
