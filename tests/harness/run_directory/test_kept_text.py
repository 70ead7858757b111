"""What a record keeps of messages and logs: capped in bytes, and without secrets."""

from pathlib import Path

from harness.run_directory.assemble import assemble
from harness.run_directory.events import FailureEvent
from harness.run_directory.outcome import Outcome
from harness.run_directory.request import rank_file, rank_log
from harness.safe_text import described
from harness.store import write_record
from harness.worker.events import EventWriter
from tests.fake_ranks import a_request

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
