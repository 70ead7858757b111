"""Ranks that end before their time: the record names the one whose end the others only follow."""

from pathlib import Path

import pytest

from harness.record import ErrorPart, Record
from tests.observed import run_script
from tests.representatives import first

SCRIPT = """
import os, signal, sys, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def fail():
    raise OSError("no room left")
for step in range(9):
    if step == 7 and dist.get_rank() == 1:
        {end}
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDS = {
    "os._exit(3)": ("Exit", 3, "the rank ended with exit code 3 before it finished"),
    "sys.exit('no data left')": ("Exit", 1, "the rank ended with exit code 1 before it finished"),
    "raise ValueError('sample 7 is empty')": ("ValueError", 1, "sample 7 is empty"),
    "sys.exit(None)": ("Exit", 0, "the rank ended with exit code 0 after 7 steps, but rank 0 went on: "),
    "os._exit(0)": ("Exit", 0, "the rank ended with exit code 0 after 7 steps, but rank 0 went on: "),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("Exit", -11, "the rank was killed by SIGSEGV"),
}
"""What rank 1 does -> kind of the error, exit code, beginning of the message."""


ALIKE = ("sys.exit('no data left')", "os._exit(0)")
"""Ends with a code and ends with 0, as others do."""


def ended(folder: Path, end: str) -> Record:
    (folder / "train.py").write_text(SCRIPT.format(end=end))
    record = run_script(folder, folder / "train.py").record
    assert record is not None
    return record


@pytest.mark.parametrize("end", first([end for end in ENDS if end not in ALIKE], ENDS))
def test_the_rank_that_ended_first_is_blamed_with_its_own_exit_code(tmp_path: Path, end: str) -> None:
    record = ended(tmp_path, end)
    kind, code, message = ENDS[end]
    error = record.error
    assert record.status == "failed"
    assert isinstance(error, ErrorPart)
    assert (error.rank, error.kind, error.exit_code, error.step) == (1, kind, code, 7)
    assert error.message.startswith(message)
    assert len(record.steps) == 7


def test_an_exception_in_a_thread_is_a_note_of_a_run_that_succeeded(tmp_path: Path) -> None:
    record = ended(tmp_path, "threading.Thread(target=fail).start()")
    assert record.status == "ok"
    assert len(record.steps) == 9
    events = (tmp_path / "run" / "rank-00001.jsonl").read_text()
    assert "a thread ended with OSError: no room left" in events
