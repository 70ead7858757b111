"""Reports of odd records, on full disks and into places where they must not go."""

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

from harness.record.store import write_record
from tests.patience import SECONDS
from tests.records import make_effective, make_record, make_steps

from .command_line import HARNESS, environment, harness


def put(folder: Path, name: str, **changes: object) -> Path:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    return write_record(run, make_record(run_id=name, **changes))


def test_report_does_not_replace_a_record(tmp_path: Path) -> None:
    path = put(tmp_path, "one")
    before = path.read_bytes()
    link = tmp_path / "innocent.json"
    link.symlink_to(path)
    for output, why in ((path, "would replace record.json"), (link, "is a symbolic link")):
        done = harness("report", "runs", "-o", output, cwd=tmp_path)
        assert done.returncode == 1
        assert why in done.stderr
    assert path.read_bytes() == before


def test_report_without_the_reference_but_with_its_noise_run(tmp_path: Path) -> None:
    put(tmp_path, "noise", label="single:micro_batch_size=4,norm=fp32")
    put(tmp_path, "ddp", label="ddp")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.loss.svg").exists()


def test_odd_record_is_passed_over_by_name(tmp_path: Path) -> None:
    put(tmp_path, "sound")
    effective = make_effective(optimizer_groups=[{"betas": 7, "eps": [], "weight_decay": {}}])
    odd = make_record(label="ddp").backend.model_copy(update={"effective": effective})
    put(tmp_path, "odd", label="ddp", backend=odd)
    put(tmp_path, "odder", label="fsdp", steps=make_steps(changes={1: {"step": 0}}), ranks=[])
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr
    assert "sound" in (tmp_path / "report.manifest.json").read_text()


def test_report_of_no_readable_record_fails(tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(tmp_path, name).write_text("{")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "none of 2 records can be read" in done.stderr
    assert not (tmp_path / "report.md").exists()


def test_report_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    put(tmp_path, "one")
    assert harness("report", "runs", "-o", "report.md", cwd=tmp_path).returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("report*")}
    put(tmp_path, "two", label="ddp")
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "report.md"], cwd=tmp_path, env=environment(), text=True,
        capture_output=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "report" in done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("report*")} == before
    assert not list(tmp_path.glob(".report*"))


@pytest.mark.parametrize("output", ["/dev/full", "/dev/zero", "/dev/null", "fifo"])
def test_report_into_a_pipe_or_device_is_refused(tmp_path: Path, output: str) -> None:
    put(tmp_path, "one")
    os.mkfifo(tmp_path / "fifo")
    done = harness("report", "runs", "-o", output, "--format", "md", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_report_through_a_link_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "one")
    (tmp_path / "kept").write_text("before")
    (tmp_path / "report.md").symlink_to("kept")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a symbolic link; give the file itself" in done.stderr
    assert (tmp_path / "kept").read_text() == "before"


def test_configuration_to_fill_in_is_not_written_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness("settings", "--write", "fifo", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_pipe_among_the_records_is_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "one")
    (tmp_path / "runs" / "two").mkdir()
    os.mkfifo(tmp_path / "runs" / "two" / "record.json")
    done = harness("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 records" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("show", "fifo"),
        ("report", "fifo", "-o", "report.md"),
        ("verify", "fifo"),
        ("diagnose", "fifo", "fifo"),
    ],
)
def test_pipe_in_place_of_a_record_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness(*words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert re.search(r"fifo'? cannot be read: it is not a plain file$", line)


@pytest.mark.parametrize("given", ["/dev/zero", "/dev/null", "fifo"])
def test_pipe_or_device_as_configuration_or_data_is_refused(tmp_path: Path, given: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    done = harness("run", "--backend", "ddp", "--config", given, cwd=tmp_path)
    assert done.returncode == 1
    assert "it is not a plain file" in done.stderr
    data = ["--set", "data.source=text", "--set", f"data.path={given}"]
    done = harness("run", "--backend", "ddp", *data, cwd=tmp_path)
    assert done.returncode == 1
    assert "is a pipe or device" in done.stderr


def test_reports_of_two_formats_keep_their_pictures(tmp_path: Path) -> None:
    put(tmp_path, "one")
    put(tmp_path, "two", label="ddp")
    for name in ("x.md", "x.tex"):
        assert harness("report", "runs", "-o", name, cwd=tmp_path).returncode == 0
    assert harness("verify", "x.md", cwd=tmp_path).returncode == 0
    assert harness("verify", "x.tex", cwd=tmp_path).returncode == 0


def test_report_on_a_pipe_whose_reader_is_gone_ends(tmp_path: Path) -> None:
    put(tmp_path, "one")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "/dev/stdout"], cwd=tmp_path, env=environment(), stdout=writer,
        stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == "harness: report '/dev/stdout' cannot be written: Broken pipe\n"


def test_report_on_standard_output_writes_no_other_file(tmp_path: Path) -> None:
    put(tmp_path, "one")
    before = set(os.listdir("/dev"))
    done = subprocess.run(
        [*HARNESS, "report", "runs", "-o", "-"], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# ")
    assert "pictures and tables next to it are left out" in done.stderr
    assert {name for name in set(os.listdir("/dev")) - before if name.startswith("stdout")} == set()
    assert not (tmp_path / "-").exists()


def test_a_dash_is_no_name_of_a_folder(tmp_path: Path) -> None:
    done = harness("report", "-", "-o", "x.md", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'-' cannot be a standard stream here; give a path" in done.stderr
