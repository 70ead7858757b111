from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.cells import canonical_label
from harness.renamed import SETTINGS, rename_options
from tests.harness.cli.command_line import harness

OLD = "measure: {settling_steps: 5, counted_steps: 1}\ncompare: {floor: false}\n"


def test_old_settings_of_a_file_are_read_and_told_once(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(OLD, encoding="utf-8")
    told: list[str] = []
    experiment = load_experiment(path, ["measure.settling_steps=6"], told.append)
    assert (experiment.measure.cooldown_steps, experiment.measure.probed_steps) == (6, 1)
    assert not experiment.compare.noise_runs
    assert sorted(told) == [f"setting '{old}' is now called '{new}'" for old, new in SETTINGS.items()]


def test_new_settings_are_told_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    load_experiment(None, ["measure.cooldown_steps=6", "compare.noise_runs=false"], told.append)
    assert told == []


@pytest.mark.parametrize(
    ("text", "assignments"),
    [
        ("measure: {settling_steps: 5, cooldown_steps: 5}\n", []),
        ("", ["measure={settling_steps: 5, cooldown_steps: 5}"]),
        ("", ["measure.settling_steps=5", "measure.cooldown_steps=5"]),
    ],
)
def test_both_names_of_a_setting_are_refused(text: str, assignments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match=r"'measure.settling_steps' is the old name of 'measure.cooldown_"):
        load_experiment(path, assignments)


def test_an_old_setting_overrides_the_new_one_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("compare: {noise_runs: true}\n", encoding="utf-8")
    assert not load_experiment(path, ["compare.floor=false"]).compare.noise_runs
    assert not load_experiment(path, ["compare={floor: false}"]).compare.noise_runs


def test_an_old_option_is_the_new_one() -> None:
    assert canonical_label("fsdp:masters=compute,offload=cpu") == "fsdp:master_dtype=compute,offload=cpu"
    told: list[str] = []
    assert rename_options("fsdp-hybrid: masters =compute", told.append) == "fsdp-hybrid:master_dtype=compute"
    assert told == ["option 'masters' of backend 'fsdp-hybrid' is now called 'master_dtype'"]
    assert rename_options("theirs:masters=2", told.append) == "theirs:masters=2"
    assert len(told) == 1
    with pytest.raises(HarnessError, match="give only 'master_dtype'"):
        canonical_label("fsdp:masters=compute,master_dtype=fp32")


def test_the_command_says_each_new_name_once(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(OLD + "training: {global_batch_size: 7}\n", encoding="utf-8")
    done = harness(
        "compare", "--config", str(path), "--backends", "fsdp:masters=compute,fsdp:masters=fp32",
        "--runs", "runs", cwd=tmp_path,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "is now called" in line]
    assert len(lines) == len(set(lines)) == len(SETTINGS) + 1
    assert done.returncode == 1, "7 samples do not divide over 2 ranks"
