"""What a record keeps of a log says nothing of the folders of the machine that wrote it."""

import json
import sys
import traceback
from pathlib import Path

import harness
from harness.run_directory.rank_state import LOG_TAIL_LINES, log_tail


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


def test_other_lines_are_kept_as_they_are(tmp_path: Path) -> None:
    folder = Path(harness.__file__).parents[1]
    text = f'reading "{folder}/data.txt"\nFile "{folder}/data.txt" is missing'
    assert log_tail(_written(tmp_path, text)) == text


def test_the_end_of_a_long_log_is_kept(tmp_path: Path) -> None:
    lines = [str(number) for number in range(LOG_TAIL_LINES + 10)]
    assert log_tail(_written(tmp_path, "\n".join(lines))).splitlines() == lines[10:]


def test_without_a_log_it_is_empty(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "rank-0.log") == ""
