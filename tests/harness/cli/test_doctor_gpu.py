"""`harness doctor --gpu`: what is printed, and the exit code."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from harness.cli import doctor as doctor_gpu
from harness.cli.doctor import doctor
from harness.doctor.gpu_runs import CHECKS, Evidence
from harness.gpus.found import Gpu, Gpus
from harness.record.store import read_archive
from tests.harness.doctor.gpu_evidence import fabric_of, sound

Doctor = Callable[..., Result]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command on evidence in place of runs."""

    def run(evidence: Evidence, *words: str) -> Result:
        monkeypatch.setattr(doctor_gpu, "find_gpus", lambda: evidence.gpus)
        monkeypatch.setattr(doctor_gpu, "gather", lambda *_: evidence)
        return CliRunner().invoke(doctor, ["--gpu", *words])

    return run


def test_each_check_has_a_line_and_all_ok_is_0(examined: Doctor) -> None:
    result = examined(sound())
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0].startswith("2 x NVIDIA A100-SXM4-80GB, torch 2.13.0+cu130 (CUDA 13.0)")
    for check in CHECKS:
        assert sum(line.split()[:2] == [check.id, "ok"] for line in lines) == 1
    assert f"{len(CHECKS)} ok, 0 failed, 0 skipped, 0 n/a" in result.stdout


def test_a_failed_check_is_1(examined: Doctor) -> None:
    result = examined(replace(sound(), fabric=fabric_of(seconds=0.1)), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["failed"]) == (1, ["fabric"])
    assert [c["verdict"] for c in document["checks"] if c["id"] == "fabric"] == ["failed"]


def test_a_stub_is_called_so(examined: Doctor) -> None:
    stub = Gpu(name="CUDA stub", uuid="0", memory_bytes=2**34, capability=(8, 0))
    evidence = sound()
    result = examined(replace(evidence, gpus=replace(evidence.gpus, devices=(stub, stub))))
    assert result.exit_code == 0
    assert "no GPU was checked: the devices are a stub" in result.stdout


def test_without_a_gpu_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpu, "find_gpus", lambda: Gpus(why_none="torch is built for the CPU"))
    result = CliRunner().invoke(doctor, ["--gpu"])
    assert result.exit_code == 1
    assert result.stderr == (
        "harness: no GPU can be checked: torch is built for the CPU; `harness doctor` checks this machine's "
        "CPU\n"
    )


def test_a_bundle_is_written(examined: Doctor, tmp_path: Path) -> None:
    bundle = tmp_path / "out.tar.xz"
    assert examined(sound(), "--bundle", str(bundle)).exit_code == 0
    assert bundle.stat().st_size > 0


def test_a_machine_whose_gpus_cannot_be_used_has_a_bundle_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_gpu, "find_gpus", lambda: Gpus(why_none="the NVIDIA driver takes CUDA 11.4"))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "not-to-be-told")
    bundle = tmp_path / "out.tar.xz"
    result = CliRunner().invoke(doctor, ["--gpu", "--bundle", str(bundle)])
    assert (result.exit_code, "no GPU can be checked: the NVIDIA driver" in result.stderr) == (1, True)
    ((_, text),) = read_archive(bundle, named="doctor.json").items()
    document = json.loads(text)
    assert document["why_not"] == "the NVIDIA driver takes CUDA 11.4"
    assert document["environment"]["variables"]["NCCL_DEBUG"] == "INFO"
    assert b"not-to-be-told" not in text
    assert read_archive(bundle, named="nvidia-smi.txt")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpu", "--backends", "ddp"], "leave out --backends"), (["--bundle", "x.tar.xz"], "add --gpu")],
)
def test_options_that_would_be_ignored_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(doctor, words)
    assert result.exit_code == 1
    assert said in result.stderr
