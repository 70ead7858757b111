"""`harness list`, `show`, `clean`, `report` and `verify`, mostly on records that were never run."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import records
from harness.cli.records import all_runs
from harness.record import ErrorPart
from harness.tell.formats import WIDTH
from tests.faults.scene import WITHOUT_OVERRIDE
from tests.records import make_effective, make_record, make_steps, saved

from .command_line import harness, harness_process, refused, succeeds

LONG_LABEL = "zero3:offload=cpu,stage3_prefetch_bucket_size=1000000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "runs", "one-aaa", cell="1")
    saved(tmp_path / "runs", "two-bbb", label=LONG_LABEL, cell="2")
    failed = {"status": "failed", "error": ErrorPart(kind="ValueError", message="it broke", rank=1)}
    saved(tmp_path / "runs", "three-ccc-20261123-055417-fsdp1-hybrid-grad-op-n2", label="ddp", **failed)
    return tmp_path


def test_list_fits_the_width_and_cuts_nothing(folder: Path) -> None:
    done = succeeds("list", cwd=folder)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    begins = lines[0].index("backend")
    shown = "".join(line[begins : lines[0].index("ranks")].strip() for line in lines)
    assert LONG_LABEL in shown


def test_wide_list_has_a_line_for_each_run_and_says_why_one_failed(folder: Path) -> None:
    alone = succeeds("list", "--runs", "runs/one-aaa", cwd=folder)
    assert alone.stderr == "1 run; `harness show RUN` shows one in detail\n"
    shown = harness("list", "--runs", "runs", "--wide", cwd=folder).stdout
    assert LONG_LABEL in shown
    assert "ValueError (rank 1): it broke" in shown
    assert len(shown.splitlines()) == 2 + 3


def test_a_rate_and_a_loss_have_the_unit_of_what_was_counted(folder: Path) -> None:
    images = make_steps(changes={step: {"tokens": 8} for step in range(4)})
    saved(folder / "images", "a", steps=images)
    saved(folder / "both", "a", steps=images)
    saved(folder / "both", "b")
    heads = {
        runs: harness("list", "--runs", runs, cwd=folder).stdout.splitlines()[0]
        for runs in ("runs", "images")
    }
    assert "tokens/s" in heads["runs"]
    assert "samples/s" in heads["images"]
    both = harness("list", "--runs", "both", "--wide", cwd=folder).stdout
    assert re.search(r"\d samples/s .*\n.*\d tokens/s ", both)
    shown = harness("show", "--runs", "images", cwd=folder).stdout
    assert "tokens/s" not in shown
    assert re.search(r"last loss +\S+ nats per token", harness("show", "one", cwd=folder).stdout)


def test_list_is_filtered_by_backend_and_status(folder: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        document = json.loads(harness("list", "--json", *arguments, cwd=folder).stdout)
        return [run["run_id"].partition("-")[0] for run in document["runs"]]

    assert ids() == ["one", "three", "two"]
    assert ids("--backend", "zero3") == ["two"]
    assert ids("--status", "failed") == ["three"]
    assert ids("--job", "nothing") == []


@pytest.mark.parametrize("index", ["", "[]", '{"made_by": 1}', "changed", "kept"])
def test_index_is_used_where_it_fits_and_made_again_where_it_does_not(
    index: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statuses() -> list[str]:
        return [run.document["status"] for _, run in all_runs(folder / "runs")]

    monkeypatch.setattr(records, "FEWEST_INDEXED", 1)
    first = statuses()
    kept, record = folder / "runs/.index.json", folder / "runs/one-aaa/record.json"
    content = json.loads(kept.read_text())
    if index == "kept":
        monkeypatch.setattr(records, "read_record", None)
    elif index == "changed":  # of the same size, with the same time
        times = record.stat()
        record.write_text(record.read_text().replace('"status":"ok"', '"status":"oom"').removesuffix("\n"))
        os.utime(record, ns=(times.st_atime_ns, times.st_mtime_ns))
        first[0] = "oom"
    else:
        kept.write_text(index)
        content |= {"runs": {"one-aaa": 5, "two-bbb": [None, "ddp", {}]}}
    assert statuses() == first
    kept.write_text(json.dumps(content))
    assert statuses() == first


def test_show_finds_a_run_by_a_part_of_its_name_and_says_why_one_failed(folder: Path) -> None:
    done = succeeds("show", "bbb", cwd=folder)
    assert done.stdout.startswith("two-bbb\n")
    assert "backend  zero3:offload=cpu" in done.stdout
    assert "Non-default settings" in done.stdout
    assert "why      ValueError (rank 1): it broke" in harness("show", "three", cwd=folder).stdout
    document = json.loads(harness("show", "runs/one-aaa", "--json", cwd=folder).stdout)
    assert document == json.loads((folder / "runs/one-aaa/record.json").read_text())
    assert "has 'two-bbc' in its name. Did you mean 'two-bbb'?" in refused(folder, "show", "two-bbc")
    assert re.search(r"'e-' names 2 runs \(one-aaa, three-[^,.]*\);", refused(folder, "show", "e-"))
    assert "characters left out" in refused(folder, "show", "e" * 5000)


def test_clean_lists_what_it_would_remove_and_removes_nothing(folder: Path) -> None:
    saved(folder / "runs", "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    done = succeeds("clean", cwd=folder)
    assert "one-aaa: replaced by a later run" in done.stdout
    assert "n2: failed" in done.stdout
    assert "two-bbb" not in done.stdout
    assert len([*(folder / "runs").iterdir()]) == 4


def test_clean_keeps_what_a_report_in_the_folder_lists(folder: Path) -> None:
    saved(folder / "runs", "zz-one-again", cell="1", created_at="2099-01-01T00:00:00+00:00")
    succeeds("report", "runs/one-aaa", "-o", "runs/report.csv", cwd=folder)
    assert "kept: a report in runs lists" in harness("clean", "--yes", cwd=folder).stderr
    assert (folder / "runs/one-aaa/record.json").is_file()
    for path in (folder / "runs").glob("*.*"):
        path.unlink()
    assert "kept" not in harness("clean", "--yes", cwd=folder).stderr
    left = {path.parent.name for path in (folder / "runs").glob("*/record.json")}
    assert left == {"two-bbb", "zz-one-again"}


def test_clean_takes_links_away_not_what_they_lead_to(folder: Path) -> None:
    saved(folder / "runs", "naive", cell="3", created_at="2020-01-01T00:00:00")
    saved(folder / "runs", "odd", cell="3", created_at="yesterday")
    (folder / "runs/naive").rename(folder / "elsewhere")
    (folder / "runs/naive").symlink_to(folder / "elsewhere")
    done = succeeds("clean", "--yes", cwd=folder)
    assert "naive: replaced by a later run" in done.stdout
    assert not (folder / "runs/naive").is_symlink()
    assert (folder / "elsewhere/record.json").exists()
    assert (folder / "runs/odd").exists()


def test_list_and_clean_name_the_same_copies_and_closed_folders_and_remove_no_run_for_them(
    folder: Path,
) -> None:
    runs = folder / "runs"
    shutil.copytree(runs / "one-aaa", runs / "0\ncopy")
    shutil.copytree(runs / "one-aaa", runs / "zz")
    (runs / "zz/record.json").write_text((runs / "zz/record.json").read_text() + " ")
    (runs / "three-ccc-20261123-055417-fsdp1-hybrid-grad-op-n2").rename(runs / "th\nree")
    (runs / "two-bbb").chmod(0)
    (folder / "closed").mkdir(mode=0o300)
    closed = [*WITHOUT_OVERRIDE, sys.executable, "-m", "harness"]
    listed, cleaned, unlisted = (
        subprocess.run([*closed, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        for arguments in (["list"], ["clean", "--yes"], ["list", "--runs", "closed"])
    )
    assert unlisted.stderr == "harness: folder 'closed' cannot be read: Permission denied\n"
    skipped = [line for line in listed.stderr.splitlines() if line.startswith("skipped: ")]
    assert skipped == [line for line in cleaned.stderr.splitlines() if line.startswith("skipped: ")]
    ours = "runs/one-aaa/record.json"
    assert skipped == [
        f"skipped: record runs/0 copy/record.json is a copy of {ours}: run one-aaa counts once",
        "skipped: record runs/two-bbb/record.json cannot be read: Permission denied",
        f"skipped: record runs/zz/record.json differs from {ours}, and both say it is theirs: run one-aaa "
        "counts once",
    ]
    assert cleaned.stdout.startswith("th ree: failed")
    assert sorted(path.name for path in runs.iterdir()) == ["0\ncopy", "one-aaa", "two-bbb", "zz"]


def write_runs(folder: Path, *, seconds: float = 0.5) -> None:
    saved(folder, "run-single-n1")
    saved(folder, "run-ddp-n2", label="ddp", steps=make_steps(seconds=seconds))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with two runs."""
    write_runs(tmp_path / "runs")
    return tmp_path


def test_a_report_that_was_just_written_holds_and_of_a_changed_one_the_line_is_named(two: Path) -> None:
    succeeds("report", "runs", "-o", "report.md", cwd=two)
    assert "holds; 2 records unchanged" in succeeds("verify", "report.md", cwd=two).stdout
    text = (two / "report.md").read_text()
    (two / "report.md").write_text(text.replace("2,048", "4,096", 1))
    line = text[: text.index("2,048")].count("\n") + 1
    done = harness("verify", "report.md", cwd=two)
    assert done.returncode == 1
    assert f"report.md, line {line}: reads" in done.stdout
    document = json.loads(harness("verify", "report.md", "--json", cwd=two).stdout)
    assert document["holds"] is False
    assert [problem["line"] for problem in document["problems"]] == [line]


@pytest.mark.parametrize(
    ("name", "begins"),
    [("r.md", "# "), ("r.html", "<!doctype html>"), ("r.csv", "backend,"), ("r.json", "{"), ("r", "# "),
     ("r.txt --format json", "{")],
)  # fmt: skip
def test_ending_of_the_name_or_an_option_tells_the_format(two: Path, name: str, begins: str) -> None:
    succeeds(*f"report runs -o {name}".split(), cwd=two)
    assert (two / name.split()[0]).read_text().startswith(begins)


def test_fall_beyond_the_limit_exits_with_3(tmp_path: Path) -> None:
    write_runs(tmp_path / "a")
    write_runs(tmp_path / "b", seconds=0.6)
    words = "report a b --baseline -o r.md --fail-on tokens_per_second<-"
    done = harness(*f"{words}3%".split(), cwd=tmp_path)
    assert done.returncode == 3
    assert "fail-on: ddp on 2 ranks: tokens_per_second changed by -16.7 %" in done.stderr
    said = (tmp_path / "r.md").read_text().partition("## Verdict\n\n")[2].partition("\n\n## ")[0]
    assert "Undecided, as runs are too few or overlap: tokens/s of ddp on 2 ranks (-16.7 %)." in said
    for line in said.split("\n\n"):
        assert f"\n{line}\n" in done.stderr
    succeeds(*f"{words}30%".split(), cwd=tmp_path)


PIPE = "is a pipe or device"
NOT_PLAIN = r"fifo'? cannot be read: it is not a plain file$"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify notes.md", "carries no list of its records"),
        ("verify none.md", "none.md"),
        ("report runs runs --baseline -o r.md --fail-on speed>1", r"peak_bytes>\+5%,tokens_per_second<-3%"),
        ("report runs --baseline -o r.md", "two sets of runs, 1 given"),
        ("report runs -o r.md --fail-on peak_bytes>+5%", "give --baseline"),
        ("report runs runs --baseline --archive -o r.md", "give two archives"),
        ("report odd -o r.md --archive", "--archive needs readable records; fix or remove: record"),
        ("report unreadable -o r.md", "none of 2 records can be read"),
        ("report record.json -o r.md", "is not a record of this harness"),
        ("report runs -o notes.md/r.md", "cannot be written"),
        ("report runs -o runs/run-ddp-n2/record.json", "would replace record.json"),
        ("report runs -o innocent.json", "is a symbolic link"),
        ("report runs -o link.md", "is a symbolic link; give the file itself"),
        *((f"report runs -o {place} --format md", PIPE)
          for place in ("/dev/full", "/dev/zero", "/dev/null", "fifo")),
        ("settings --write fifo", PIPE),
        ("show fifo", NOT_PLAIN),
        ("report fifo -o r.md", NOT_PLAIN),
        ("verify fifo", f"{NOT_PLAIN[:-1]}; give what `harness report -o FILE` wrote$"),
        ("diagnose fifo fifo", NOT_PLAIN),
        *((f"run --backend ddp --config {given}", "it is not a plain file")
          for given in ("/dev/zero", "/dev/null", "fifo")),
        *((f"run --backend ddp --set data.source=text --set data.path={given}", PIPE)
          for given in ("/dev/zero", "/dev/null", "fifo")),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_written_is_one_line_and_all_files_stay(
    two: Path, words: str, said: str
) -> None:
    (two / "notes.md").write_text("# Notes")
    (two / "record.json").write_text("{}")
    os.mkfifo(two / "fifo")
    (two / "link.md").symlink_to("notes.md")
    (two / "innocent.json").symlink_to("runs/run-ddp-n2/record.json")
    saved(two / "odd", "sound")
    for broken in ("odd/1", "odd/2", "unreadable/1", "unreadable/2"):
        (two / broken).mkdir(parents=True)
        (two / broken / "record.json").write_text("{")
    before = {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    assert re.search(said, refused(two, *words.split()))
    assert {path: path.read_bytes() for path in two.rglob("*") if path.is_file()} == before


def test_report_with_an_archive_holds_without_the_folder_of_runs(two: Path) -> None:
    succeeds("report", "runs", "-o", "out/report.md", "--archive", cwd=two)
    shutil.rmtree(two / "runs")
    succeeds("verify", "out/report.md", cwd=two)
    succeeds("report", "out/runs.tar.xz", "-o", "out/again.md", cwd=two)
    for ending in ("md", "manifest.json"):
        shown = [
            re.sub('"sha256":".*"', "", (two / f"out/{name}.{ending}").read_text()).replace(f"{name}.", "")
            for name in ("again", "report")
        ]
        assert shown[0] == shown[1]
    done = succeeds("export", "tracking", "out/runs.tar.xz", "--to", "tensorboard", "-o", "board", cwd=two)
    assert "runs logged for tensorboard" in done.stderr


def test_report_without_the_reference_but_with_its_noise_run(tmp_path: Path) -> None:
    saved(tmp_path / "runs", "noise", label="single:micro_batch_size=4,norm=fp32")
    saved(tmp_path / "runs", "ddp", label="ddp")
    succeeds("report", "runs", "-o", "report.md", cwd=tmp_path)
    assert (tmp_path / "report.loss.svg").exists()


def test_odd_record_is_passed_over_by_name(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    saved(runs, "sound")
    effective = make_effective(optimizer_groups=[{"betas": 7, "eps": [], "weight_decay": {}}])
    odd = make_record(label="ddp").backend.model_copy(update={"effective": effective})
    saved(runs, "odd", label="ddp", backend=odd)
    saved(runs, "odder", label="fsdp", steps=make_steps(changes={1: {"step": 0}}), ranks=[])
    assert "unexpected" not in succeeds("report", "runs", "-o", "report.md", cwd=tmp_path).stderr
    assert "sound" in (tmp_path / "report.manifest.json").read_text()


def test_report_that_does_not_fit_on_the_disk_leaves_the_old_one(two: Path) -> None:
    succeeds("report", "runs", "-o", "report.md", cwd=two)
    before = {path.name: path.read_bytes() for path in two.glob("report*")}
    saved(two / "runs", "another", label="fsdp")
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))}
    done = harness_process("report", "runs", "-o", "report.md", cwd=two, started=full)
    assert done.returncode == 1
    assert "report" in done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert {path.name: path.read_bytes() for path in two.glob("report*")} == before
    assert not list(two.glob(".report*"))


def test_a_pipe_among_the_records_is_passed_over_and_two_formats_keep_their_pictures(two: Path) -> None:
    (two / "runs" / "three").mkdir()
    os.mkfifo(two / "runs" / "three" / "record.json")
    assert "2 records" in succeeds("report", "runs", "-o", "x.md", cwd=two).stderr
    for words in ("report runs -o x.html", "verify x.md", "verify x.html"):
        succeeds(*words.split(), cwd=two)


def test_report_on_a_pipe_whose_reader_is_gone_ends(two: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = harness_process("report", "runs", "-o", "/dev/stdout", cwd=two, started={"stdout": writer})
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == "harness: report '/dev/stdout' cannot be written: Broken pipe\n"


def test_report_on_standard_output_writes_no_other_file(two: Path) -> None:
    before = set(os.listdir("/dev"))
    done = harness_process("report", "runs", "-o", "-", cwd=two)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# ")
    assert "pictures and tables next to it are left out" in done.stderr
    assert {name for name in set(os.listdir("/dev")) - before if name.startswith("stdout")} == set()
    assert not (two / "-").exists()


def test_a_dash_is_no_name_of_a_folder(tmp_path: Path) -> None:
    done = harness("report", "-", "-o", "x.md", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'-' cannot be a standard stream here; give a path" in done.stderr
