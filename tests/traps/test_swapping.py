"""NVMe offload of a model below 1 MiB per rank writes no file, and DeepSpeed does not say so."""

from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.judge.rows import reason
from harness.record.store import read_runs
from tests.harness.cli.command_line import SHORT, harness_process

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=200)]

LABEL = "zero3:offload=nvme"


def test_nothing_in_files_is_named(tmp_path: Path) -> None:
    """Where libaio is there it compiles DeepSpeed's extension, for minutes; otherwise the row says so."""
    words = ["compare", "--backends", f"single,{LABEL}", "--nproc", "2", *SHORT, "--runs", "runs"]
    done = harness_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [record for _, record in read_runs([tmp_path / "runs"])[0]]
    (record,) = (record for record in records if record.backend.label == LABEL)
    if record.status == "unsupported":
        assert "libaio" in (reason(record) or "")
        return
    (found,) = (f for f in Comparison(records).findings if f.id == "swapping-frees-no-memory")
    assert found.message.startswith("zero3:offload=nvme on 2 ranks: 0 bytes of optimizer states lie in files")
