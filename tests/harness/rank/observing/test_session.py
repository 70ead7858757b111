"""Ranks that end before their time, and scripts that make more than one update after a backward pass."""

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.rank.observing.session import trains
from harness.record import ErrorPart, Record
from tests.observed import run_script
from tests.representatives import first


def test_a_model_that_trains_may_have_a_wrapper_that_does_not() -> None:
    """An evaluation does not train, whether it keeps gradients or not."""
    model = nn.Sequential(nn.Linear(1, 1))
    model.training = False
    assert trains(model)
    with torch.no_grad():
        assert not trains(model.train())
    assert not trains(model.eval())


WAITS = """
import os, threading
from torch.utils.file_baton import FileBaton

os.makedirs("op")
open("op/lock", "w").close()
for path in ("op/lock", "op"):
    os.utime(path, (0, 0))
threading.Timer(1.0, os.unlink, ["op/lock"]).start()
FileBaton("op/lock").wait()
"""


def test_a_script_that_waits_for_a_killed_build_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    seen = run_script(tmp_path, tmp_path / "train.py", ranks=1)
    assert seen.codes == [0]
    assert "harness observe: op/lock is" in seen.printed[0]
    assert "a build of the extension op was killed" in seen.printed[0]


HEAD = """
import os, signal, sys, threading
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
def fail(error):
    raise error
"""
ENDING = """
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    if step == 7:
        {end}
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDS = {
    "rank and os._exit(3)": ("Exit", 3, "the rank ended with exit code 3 before it finished"),
    "rank and sys.exit('no data left')": ("Exit", 1, "the rank ended with exit code 1 before it finished"),
    "rank and fail(ValueError('sample 7 is empty'))": ("ValueError", 1, "sample 7 is empty"),
    "rank and sys.exit(None)": (
        "Exit", 0, "the rank ended with exit code 0 after 7 steps, but rank 0 went on: ",
    ),
    "rank and os._exit(0)": (
        "Exit", 0, "the rank ended with exit code 0 after 7 steps, but rank 0 went on: ",
    ),
    "rank and os.kill(os.getpid(), signal.SIGSEGV)": ("Exit", -11, "the rank was killed by SIGSEGV"),
    "os.kill(os.getpid(), signal.SIGKILL) if rank else fail(KeyboardInterrupt())": (
        "Exit", -9, "the rank was killed by SIGKILL",
    ),
}  # fmt: skip
"""What ranks do -> of rank 1 kind of the error, exit code, beginning of the message."""
ALIKE = ("rank and sys.exit('no data left')", "rank and os._exit(0)")
"""Ends with a code and ends with 0, as others do."""


def observed(folder: Path, body: str) -> Record:
    (folder / "train.py").write_text(HEAD + body)
    record = run_script(folder, folder / "train.py").record
    assert record is not None
    return record


@pytest.mark.parametrize("end", first([end for end in ENDS if end not in ALIKE], ENDS))
def test_the_rank_that_ended_first_is_blamed_with_its_own_exit_code(tmp_path: Path, end: str) -> None:
    record = observed(tmp_path, ENDING.format(end=end))
    kind, code, message = ENDS[end]
    error = record.error
    assert record.status == "failed"
    assert isinstance(error, ErrorPart)
    assert (error.rank, error.kind, error.exit_code, error.step) == (1, kind, code, 7)
    assert error.message.startswith(message)
    assert len(record.steps) == 7


NUMBER = "number 13 of group 0, default_pg"
DISAGREE = {
    # gloo ends rank 1, which gets more than it waits for, and rank 0 loses its peer.
    "dist.all_reduce(torch.ones(3 if rank else 3000))": (
        f"differ in size: rank 0 in gloo all_reduce {NUMBER} (3000 Float) at AT:19 <module>; rank 1 in gloo "
        f"all_reduce {NUMBER} (3 Float) at AT:19 <module>;"
    ),
    # Rank 0 alone evaluates; gloo's own time limit ends both.
    "rank or (dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), None), dist.barrier())": (
        f"differ in collective: rank 0 in gloo barrier {NUMBER} at AT:19 <module>; rank 1 in gloo all_reduce "
        f"{NUMBER} (4160 Float) at AT:20 <module>;"
    ),
}


@pytest.mark.parametrize("end", DISAGREE, ids=["size", "collective"])
def test_of_two_ranks_that_disagree_on_a_collective_of_gloo_none_is_blamed(tmp_path: Path, end: str) -> None:
    error = observed(tmp_path, ENDING.format(end=end)).error
    assert isinstance(error, ErrorPart)
    assert (error.kind, error.rank) == ("CollectiveMismatch", None)
    assert f"rank 0, 1 {DISAGREE[end]}".replace("AT", f"{tmp_path.name}/train.py") in error.message


def test_an_exception_in_a_thread_is_a_note_of_a_run_that_succeeded(tmp_path: Path) -> None:
    end = "rank and threading.Thread(target=fail, args=(OSError('no room left'),)).start()"
    record = observed(tmp_path, ENDING.format(end=end))
    assert record.status == "ok"
    assert len(record.steps) == 9
    events = (tmp_path / "run" / "rank-00001.jsonl").read_text()
    assert "a thread ended with OSError: no room left" in events


TWO_OPTIMIZERS = """
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
first, second = (torch.optim.AdamW(part.parameters(), lr=1e-3) for part in model.module)
for step in range(6):
    model(torch.randn(4, 64)).square().mean().backward()
    first.step()
    second.step()
    model.zero_grad()
"""
WEIGHTS = 4 * (64 * 64 + 64)
"""Bytes of one linear layer."""


@pytest.mark.costly
def test_two_optimizers_of_one_backward_pass_are_one_step(tmp_path: Path) -> None:
    record = observed(tmp_path, TWO_OPTIMIZERS)
    assert record.status == "ok"
    assert [step.samples for step in record.steps] == [8] * 6
    # Without the steps that torch counts in a tensor each.
    held = [p.kinds or {} for rank in record.ranks for p in rank.memory if p.moment == "after_step"]
    assert {kinds["optimizer"] // 1000 for kinds in held} == {2 * 2 * WEIGHTS // 1000}
    assert any("2 optimizers step" in note for note in record.observation.notes)
