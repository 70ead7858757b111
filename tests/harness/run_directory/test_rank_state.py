"""What a record keeps of a log says nothing of the folders of the machine that wrote it."""

import json
import sys
import traceback
from pathlib import Path

import harness
from harness.record.store import keep_record, read_record, write_record
from harness.run_directory.assemble import Outcome, assemble
from harness.run_directory.events import EventWriter, FailureEvent
from harness.run_directory.rank_state import LOG_TAIL_LINES, log_tail
from harness.run_directory.request import rank_file, rank_log
from harness.safe_text import described
from tests.fake_ranks import a_request
from tests.records import changed, make_record


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
    assert record.error.log_tail.endswith("the end")
    assert "bytes left out" in record.error.message


def test_secrets_reach_neither_log_tail_nor_record(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text(f"loading with token={TOKEN}\n")
    request = a_request(1).model_copy(update={"command": ["harness", "run", f"s3://me:{TOKEN}@bucket"]})
    record = assemble(tmp_path, request, Outcome(exit_codes={0: 1}))
    assert TOKEN not in record.error.log_tail
    assert TOKEN not in write_record(tmp_path, record).read_text()


SECRETS = {
    "credentials": "pw-Zz91", "note": "https://s3/x?X-Amz-Signature=pw-Zz91", "key": "AIza" + "pw-Zz91" * 5,
    "command": "sshpass -p pw-Zz91 ssh node", "nested": {"wandb_api_key": "pw-Zz91 with spaces"},
}  # fmt: skip


def test_secrets_in_native_configurations_reach_no_record(tmp_path: Path) -> None:
    kept = keep_record(tmp_path, changed(make_record(label="ddp"), backend={"native_config": SECRETS}))
    assert "pw-Zz91" not in (tmp_path / "record.json").read_text()
    assert "pw-Zz91" not in repr(kept)
    assert kept == read_record(tmp_path / "record.json")
    assert kept.backend.native_config["nested"] == {"wandb_api_key": "***"}
