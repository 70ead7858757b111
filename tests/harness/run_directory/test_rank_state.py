"""What a record keeps of a log says nothing of the folders of the machine that wrote it."""

import json
import sys
import traceback
from pathlib import Path

import pytest

import harness
from harness.rank.events import EventWriter
from harness.record import ErrorPart, Record
from harness.record.store import keep_record, read_record, write_record
from harness.run_directory.assemble import Outcome, assemble
from harness.run_directory.events import FailureEvent
from harness.run_directory.rank_state import LOG_TAIL_LINES, log_tail
from harness.run_directory.request import rank_file, rank_log
from harness.safe_text import described
from harness.tell.report import write_report
from tests.fake_ranks import a_request
from tests.records import make_record


def _written(folder: Path, text: str) -> Path:
    log = folder / "rank-0.log"
    log.write_text(text, encoding="utf-8")
    return log


def test_files_are_told_from_where_they_are_imported(tmp_path: Path) -> None:
    try:
        json.loads("{")
    except ValueError:
        text = traceback.format_exc()
    checkout = Path(harness.__file__).parents[1]
    text += f'  File "{checkout}/harness/rank/rank.py", line 7, in run\n'
    text += '  File "/somebody/else/plugin.py", line 7, in run\n'
    tail = log_tail(_written(tmp_path, text))
    assert 'File "json/decoder.py", line ' in tail
    assert 'File "harness/rank/rank.py", line 7' in tail
    assert 'File "/somebody/else/plugin.py", line 7' in tail
    assert not any(f'File "{entry}/' in tail for entry in sys.path if entry)


def test_other_lines_are_kept_as_they_are_and_of_a_long_log_the_end(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "rank-0.log") == ""
    folder = Path(harness.__file__).parents[1]
    text = f'reading "{folder}/data.txt"\nFile "{folder}/data.txt" is missing'
    assert log_tail(_written(tmp_path, text)) == text
    lines = [str(number) for number in range(LOG_TAIL_LINES + 10)]
    assert log_tail(_written(tmp_path, "\n".join(lines))).splitlines() == lines[10:]


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_messages_and_logs_of_many_megabytes_are_cut(tmp_path: Path) -> None:
    message = described(ValueError("x" * 40_000_000))
    event = FailureEvent(status="failed", error_kind="ValueError", message=message, at=1.0)
    EventWriter(rank_file(tmp_path, 0)).write(event)
    rank_log(tmp_path, 0).write_text("y" * 40_000_000 + "\nthe end")
    record = assemble(tmp_path, a_request(1), Outcome(exit_codes={0: 1}))
    path = write_record(tmp_path, record)
    assert path.stat().st_size < 100_000
    assert record.error is not None
    assert record.error.log_tail.endswith("the end")
    assert "bytes left out" in record.error.message


def test_secrets_reach_neither_log_tail_nor_record(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text(f"loading with token={TOKEN}\n")
    request = a_request(1).model_copy(update={"command": ["harness", "run", f"s3://me:{TOKEN}@bucket"]})
    record = assemble(tmp_path, request, Outcome(exit_codes={0: 1}))
    assert record.error is not None
    assert TOKEN not in record.error.log_tail
    assert TOKEN not in write_record(tmp_path, record).read_text()


SECRETS = {
    "credentials": "pw-Zz91", "note": "https://s3/x?X-Amz-Signature=pw-Zz91", "key": "AIza" + "pw-Zz91" * 5,
    "command": "sshpass -p pw-Zz91 ssh node", "nested": {"wandb_api_key": "pw-Zz91 with spaces"},
}  # fmt: skip


def secretive() -> Record:
    """A record with secrets in its native configuration, command, job, error and log."""
    record = make_record(label="ddp", status="failed")
    error = ErrorPart(
        kind="OSError", message="GET https://cdn/x?sig=pw-Zz91", log_tail="password='pw-Zz91 b'"
    )
    data = record.job.data.model_copy(update={"path": "s3://me:pw-Zz91@bucket/x"})
    return record.model_copy(
        update={
            "backend": record.backend.model_copy(update={"native_config": SECRETS}),
            "command": ["harness", "run", "--hub-token", "pw-Zz91"],
            "job": record.job.model_copy(update={"data": data}),
            "error": error,
        }
    )


def test_secrets_in_native_configurations_reach_no_record(tmp_path: Path) -> None:
    kept = keep_record(tmp_path, secretive())
    assert "pw-Zz91" not in (tmp_path / "record.json").read_text()
    assert "pw-Zz91" not in repr(kept)
    assert kept == read_record(tmp_path / "record.json")
    assert kept.backend.native_config is not None
    assert kept.backend.native_config["nested"] == {"wandb_api_key": "***"}


@pytest.mark.parametrize("name", ["report.md", "report.html", "report.json", "report.csv", "report.tex"])
def test_secrets_reach_no_report(name: str, tmp_path: Path) -> None:
    runs = []
    for record in (make_record(), secretive()):
        folder = tmp_path / record.run_id
        folder.mkdir()
        runs.append((folder / "record.json", keep_record(folder, record)))
    write_report(runs, tmp_path / "out" / name)
    written = b"".join(file.read_bytes() for file in (tmp_path / "out").iterdir())
    assert b"OSError" in written or b"failed" in written
    assert b"pw-Zz91" not in written
