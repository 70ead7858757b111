"""Commands as a user gives them on a CUDA machine; ranks are new processes but those of the self-check."""

import json
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.doctor import doctor
from harness.doctor import self_check
from harness.doctor.gpu_runs import BackendMatrix, compare_all
from harness.fabric.result import OPERATIONS, read_fabric
from harness.judge.quantities import Run
from harness.record import Record
from harness.record.store import read_runs
from harness.run_directory.rank_state import WATCH, DeviceNote, device_note
from harness.tell.verify import verify
from tests.gpu_stub.launcher import launcher
from tests.gpu_stub.machine import SET, SETTINGS, TORCHRUN, Machine
from tests.representatives import EXHAUSTIVE

TRIED = ("single", "ddp", "zero2", "fsdp")
TWO = {"CUDA_STUB_DEVICES": "2"}


@pytest.mark.parametrize(
    "launched_by",
    [pytest.param((), id="own launcher"), pytest.param(TORCHRUN, id="torchrun", marks=EXHAUSTIVE)],
)
def test_run(launched_by: tuple[str, ...], machine: Machine) -> None:
    runs = f"runs-{len(launched_by)}"
    words = [] if launched_by else ["--nproc", "2"]
    done = machine.harness(
        "run", "--backend", "fsdp", *words, *SET, "--runs", runs, environment=TWO, launched_by=launched_by
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens/s" not in done.stderr
    assert launched_by or "step 6/6, loss" in done.stderr
    predicted = [line for line in done.stderr.splitlines() if line.startswith("predicted memory: ")]
    assert launched_by or [line.rpartition(" of ")[2] for line in predicted] == ["85.9 GB per rank"]
    ((_, record),), problems = read_runs([machine.folder / runs])
    assert problems == []
    assert (record.status, record.world.collectives) == ("ok", "nccl")
    assert {rank.device_name for rank in record.ranks} == {"CUDA stub"}
    forked = machine.run("fsdp")
    assert record.final_weights.digest == forked.final_weights.digest


def test_fabric(machine: Machine) -> None:
    done = machine.harness(
        "fabric", "--device", "cuda", "--max-size", "1MB", "--repeats", "2", "--output", "fabric.json",
        environment=TWO, launched_by=TORCHRUN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = read_fabric(machine.folder / "fabric.json")
    assert (result.world_size, result.device_name) == (2, "CUDA stub")
    assert {row.op for row in result.rows} == set(OPERATIONS)
    assert [row.seconds for row in result.rows] == [[]] * len(result.rows)
    assert "n/a" in done.stdout


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LocalLauncher", lambda *_: launcher())
    with launcher().environment(TWO):
        monkeypatch.setenv("CUDA_STUB_DEVICES", "2")
        done = CliRunner().invoke(doctor, ["--backends", "ddp,zero2,fsdp", "--json"])
    assert done.exit_code == 0, done.output[-3000:]
    document = json.loads(done.stdout)
    assert (document["trusted"], document["device"], document["ranks"]) == (True, "cuda", 2)
    assert "CUDA stub" in document["device_reason"]
    assert {row["name"]: row["status"] for row in document["backends"]} == dict.fromkeys(TRIED, "ok")


OK = {
    "devices", "transport", "initial-weights", "repeat", "traffic", "states", "deepspeed-waits",
    "out-of-memory", "after-out-of-memory",
}  # fmt: skip
NOT_APPLICABLE = {
    "architecture", "cpu-loss", "norm", "driver-memory", "phases", "step-time", "trace", "kernels",
    "products", "utilisation", "fabric",
}  # fmt: skip


@EXHAUSTIVE
@pytest.mark.long(seconds=150)
def test_a_stub_answers_what_does_not_need_a_gpu(machine: Machine) -> None:
    bundle = machine.folder / "doctor.tar.xz"
    words = ["doctor", "--gpu", "--json", "--minutes", "10", "--bundle", str(bundle)]
    done = machine.harness(*words, environment={"CUDA_STUB_DEVICES": "2"}, timeout=600)
    document = json.loads(done.stdout)
    verdicts = {check["id"]: check["verdict"] for check in document["checks"]}
    assert verdicts == dict.fromkeys(OK, "ok") | dict.fromkeys(NOT_APPLICABLE, "n/a"), done.stderr
    assert all("CUDA stub" in c["detail"] for c in document["checks"] if c["verdict"] == "n/a")
    assert (done.returncode, document["is_stub"], document["devices"]) == (0, True, ["CUDA stub"] * 2)
    with tarfile.open(bundle) as tar:
        names = [name.rpartition("/")[2] for name in tar.getnames()]
    assert names.count("record.json") == 6


@EXHAUSTIVE
@pytest.mark.long(seconds=60)
def test_a_comparison_is_packed_with_snapshots(tmp_path: Path) -> None:
    """What --full adds to the checks: each rank's snapshot is read, and holds the peak that was measured."""
    small = BackendMatrix(
        name="at-size", config="@default", backends=("ddp", "fsdp"), ranks=2, device="cuda",
        settings=(*SETTINGS, "compare.noise_runs=false", "measure.traced_steps=1"),
    )  # fmt: skip
    ends = time.monotonic() + 600
    (compared,) = compare_all([small], tmp_path / "runs", tmp_path / "packed", ends, print)
    assert (compared.missing, set(compared.statuses.values())) == (None, {"ok"})
    packed = tmp_path / "packed" / "at-size"
    records = {record.backend.label: record for _, record in read_runs([packed])[0]}
    told = (packed / "fsdp-2-0.memory_snapshot.md").read_text()
    assert f"{max(Run.of(records['fsdp']).rank_peaks) / 1e6:.3g}" in told
    assert (packed / "raw" / "fsdp-2-0-memory-snapshot-00001.json").is_file()
    assert verify(packed / "report.md").problems == []


def watched(machine: Machine, label: str) -> tuple[Record, list[DeviceNote]]:
    record = machine.run(label, environment={WATCH: "1"})
    directory = machine.run_directory(record)
    files = [device_note(directory, rank) for rank in range(record.world.world_size)]
    return record, [DeviceNote.model_validate_json(file.read_bytes()) for file in files]


def test_events_outside_of_the_loop_span_what_its_clock_measures(machine: Machine) -> None:
    """A clock that missed part of a step would miss it in each; a busy machine delays one or another."""
    record, notes = watched(machine, "ddp")
    for rank, note in zip(record.ranks, notes, strict=True):
        pairs = zip(note.event_step_seconds, rank.step_seconds, strict=True)
        assert min(abs(spanned / measured - 1) for spanned, measured in pairs) < 0.1
    assert len({note.uuid for note in notes}) == len(notes)


def test_the_throughput_timer_of_deepspeed_is_seen_to_wait(machine: Machine) -> None:
    """Like for like it is off; with the library's own defaults it synchronises in every micro-step."""
    _, off = watched(machine, "zero2")
    _, on = watched(machine, "zero2:preset=library-defaults")
    assert {count for note in off for count in note.synchronisations} == {0}
    assert all(count >= note.micro_steps for note in on for count in note.synchronisations[2:])
