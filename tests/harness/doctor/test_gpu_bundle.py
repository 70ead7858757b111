"""The bundle for a bug report: what was found, without secrets."""

import json
import tarfile
from pathlib import Path

import pytest

from harness.doctor.packing import check_bundle, write_bundle
from harness.errors import HarnessError
from harness.record.store import read_runs, write_record
from tests.records import make_record

TOKEN = "hf_" + "a" * 34
MORE = "credentials=word https://s3/x?X-Amz-Signature=word sshpass -p word ssh node"


def packed(tmp_path: Path) -> dict[str, str]:
    run = tmp_path / "scratch" / "fsdp" / "run"
    run.mkdir(parents=True)
    write_record(run, make_record(label="fsdp"))
    (run / "rank-00000.log").write_text(f"started\nHF_TOKEN={TOKEN}\nhttps://me:word@host/x\n{MORE}\n")
    (run / "request.json").write_text(json.dumps({"command": ["run", "--hub-token", "word"]}))
    (run / "trace-00000.json.gz").write_text("large")
    (tmp_path / "scratch" / "cpu.log").write_text("harness: no memory\n")
    bundle = tmp_path / "out.tar.xz"
    write_bundle(bundle, tmp_path / "scratch", {"failed": ["norm"], "note": TOKEN}, ["norm  failed"])
    with tarfile.open(bundle) as tar:
        return {
            member.name: found.read().decode()
            for member in tar
            if (found := tar.extractfile(member)) is not None
        }


def test_it_holds_records_logs_answers_and_the_topology(tmp_path: Path) -> None:
    files = packed(tmp_path)
    assert set(files) == {
        "doctor/doctor.json", "doctor/doctor.txt", "doctor/checks/fsdp/run/record.json",
        "doctor/checks/fsdp/run/request.json",
        "doctor/checks/cpu.log", "doctor/checks/fsdp/run/rank-00000.log", "doctor/nvidia-smi.txt",
        "doctor/nvidia-smi-topology.txt",
    }  # fmt: skip
    assert json.loads(files["doctor/doctor.json"])["failed"] == ["norm"]
    assert files["doctor/doctor.txt"] == "norm  failed\n"


def test_its_records_can_be_read(tmp_path: Path) -> None:
    packed(tmp_path)
    with tarfile.open(tmp_path / "out.tar.xz") as tar:
        tar.extractall(tmp_path / "unpacked")
    ((_, record),), problems = read_runs([tmp_path / "unpacked" / "doctor" / "checks" / "fsdp"])
    assert (record.backend.label, problems) == ("fsdp", [])


def test_it_holds_no_secret(tmp_path: Path) -> None:
    text = "\n".join(packed(tmp_path).values())
    assert "started" in text
    assert TOKEN not in text
    assert "word" not in text


@pytest.mark.parametrize("name", ["out.tar", "missing/out.tar.xz"])
def test_a_file_that_cannot_be_written_is_refused_before_any_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(HarnessError, match="--bundle"):
        check_bundle(tmp_path / name)
