"""`harness doctor` with and without --gpu, and `fabric`."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from harness import cli
from harness.backends import registry
from harness.backends.libraries import facts
from harness.cli import doctor
from harness.doctor import gpu_runs, self_check
from harness.doctor.gpu_runs import CHECKS, Evidence
from harness.fabric.result import OPERATIONS, read_fabric
from harness.gpus.found import Gpu, Gpus
from harness.record.store import read_archive
from tests.forkserver import launcher
from tests.harness.doctor.gpu_evidence import fabric_of, sound
from tests.patience import SECONDS, until
from tests.representatives import first

from .command_line import harness, harness_process


def called(*options: str) -> tuple[int, str]:
    done = harness("doctor", *options, cwd=Path.cwd())
    return done.returncode, done.stdout or done.stderr


def test_without_torch_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher()  # needs torch, also where this is the process's first test
    monkeypatch.setattr(facts, "installed_version", {"transformers": "5.23"}.get)
    code, said = called()
    assert code == 1
    assert said == (
        "harness: torch is not installed, which ranks need: pip install 'sharding-harness[train]'\n"
    )


@pytest.mark.parametrize("ranks", first([2], [1, 2]))
@pytest.mark.costly
def test_an_installation_that_can_be_trusted(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as one backend: three planted defects are found on one rank as on two."""
    monkeypatch.setattr(doctor, "RANKS", ranks)
    code, said = called("--backends", "fsdp")
    assert code == 0, said
    assert "3 of 3 injected faults found" in said
    assert "deepspeed: clips gradients at 1.0" in said
    assert said.splitlines()[-1].startswith("this installation can be trusted")
    assert ("reduction and sharding over ranks" in said) == (ranks == 1)


@pytest.mark.costly
def test_a_broken_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = called("--backends", "planted-divided-again")
    assert code == 1
    assert "- gradient-scale: planted-divided-again on 2 ranks: all gradients x 0.5" in said
    assert said.splitlines()[-1] == "this installation cannot be trusted until these are resolved"


@pytest.mark.costly
def test_a_missing_library_is_named_and_the_rest_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.package_versions

    def without_deepspeed(extra: tuple[str, ...]) -> dict[str, str]:
        return {name: version for name, version in real(extra).items() if name != "deepspeed"}

    monkeypatch.setattr(doctor, "package_versions", without_deepspeed)
    code, said = called("--backends", "ddp,zero3")
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("zero3")]
    assert "deepspeed is not installed (pip install deepspeed)" in line
    assert (
        said.splitlines()[-1]
        == "this installation can be trusted, as far as it was tried: 1 line above was not"
    )


@pytest.mark.costly
def test_what_two_minutes_do_not_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "BUDGET_SECONDS", 0.0)
    only_ddp = {
        name: replace(entry, in_short_check=name == "ddp") for name, entry in registry.BUILT_IN.items()
    }
    monkeypatch.setattr(registry, "BUILT_IN", only_ddp)
    code, said = called("--json")
    document = json.loads(said)
    assert code == 0, document["self_check"]
    ran = {backend["name"] for backend in document["backends"]}
    assert ran == {"single", "ddp"}
    assert "two minutes" in document["not_covered"]["fsdp1"]


Doctor = Callable[..., Result]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command on evidence in place of runs."""

    def run(evidence: Evidence, *words: str) -> Result:
        monkeypatch.setattr(doctor, "find_gpus", lambda: evidence.gpus)
        monkeypatch.setattr(gpu_runs, "gather", lambda *_: evidence)
        return CliRunner().invoke(doctor.doctor, ["--gpu", *words])

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
    monkeypatch.setattr(doctor, "find_gpus", lambda: Gpus(why_none="torch is built for the CPU"))
    result = CliRunner().invoke(doctor.doctor, ["--gpu"])
    assert result.exit_code == 1
    assert result.stderr == (
        "harness: no GPU can be checked: torch is built for the CPU; `harness doctor` checks this machine's "
        "CPU\n"
    )
    result = CliRunner().invoke(doctor.doctor, ["--gpu", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["why_not"]) == (1, "torch is built for the CPU")


def test_a_machine_whose_gpus_cannot_be_used_has_a_bundle_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: Gpus(why_none="the NVIDIA driver takes CUDA 11.4"))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "not-to-be-told")
    bundle = tmp_path / "out.tar.xz"
    result = CliRunner().invoke(doctor.doctor, ["--gpu", "--bundle", str(bundle)])
    assert (result.exit_code, "no GPU can be checked: the NVIDIA driver" in result.stderr) == (1, True)
    ((_, text),) = read_archive(bundle, named="doctor.json").items()
    document = json.loads(text)
    assert document["why_not"] == "the NVIDIA driver takes CUDA 11.4"
    assert document["environment"]["variables"]["NCCL_DEBUG"] == "INFO"
    assert b"not-to-be-told" not in text
    assert read_archive(bundle, named="nvidia-smi.txt")


@pytest.mark.costly
def test_two_ranks_measure_every_operation_and_a_gate_closes(tmp_path: Path) -> None:
    words = "fabric --nproc 2 --device cpu --max-size 64KB --repeats 3 --output fabric.json --json"
    done = harness_process(*words.split(), "--require-busbw", "1TB/s", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "below the required 1e+03 GB/s" in done.stderr
    document = json.loads(done.stdout)
    result = read_fabric(tmp_path / "fabric.json")
    assert (result.transport, result.world_size) == ("gloo", 2)
    assert {row["op"] for row in document["rows"]} == set(OPERATIONS)
    for op in OPERATIONS:
        assert [row.size_bytes for row in result.rows if row.op == op] == [1024, 4096, 16384, 65536]
    assert all(second > 0 for row in result.rows for second in row.seconds)
    assert document["summary"]["all_reduce_bus_bytes_per_second"] == result.bus_bandwidth()


def test_a_file_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "nowhere/x"
    monkeypatch.setattr("harness.cli.doctor.start_ranks", lambda nproc, arguments: pytest.fail("began"))
    done = CliRunner().invoke(cli.harness, ["fabric", "--device", "cpu", "--output", str(output)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"harness: --output was given '{output}'")
    assert "No such file or directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_device_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.gpus.found.find_gpus", lambda: Gpus(why_none="this machine shows no GPU"))
    done = CliRunner().invoke(cli.harness, ["fabric", "--device", "cuda"])
    assert (done.exit_code, done.stderr.splitlines()) == (
        1,
        ["harness: no GPU can be used: this machine shows no GPU; --device cpu runs on the CPU"],
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a killed parent")
@pytest.mark.parametrize(
    ("number", "ended"),
    [pytest.param(signal.SIGTERM, 130, marks=pytest.mark.exhaustive), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_self_test_that_is_ended_leaves_no_rank_behind(number: signal.Signals, ended: int) -> None:
    command = [
        sys.executable, "-m", "harness", "fabric", "--nproc", "2", "--device", "cpu", "--max-size", "1KB",
        "--repeats", "100000000",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

        def both() -> list[psutil.Process]:
            family = psutil.Process(process.pid).children(recursive=True)
            ranks = [one for one in family if "--output" in one.cmdline() and one.ppid() != process.pid]
            return ranks if len(ranks) == 2 else []

        ranks = until(both, process)
        process.send_signal(number)
        code = process.wait(SECONDS)
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    for rank in alive:
        rank.kill()
    assert (code, alive) == (ended, [])
