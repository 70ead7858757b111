"""Scripts that do more than one update after each backward pass, or that do not come to their end."""

from pathlib import Path

import pytest

from harness.record import Record
from tests.observed import ScriptRun, run_script

HEAD = """
import os, signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
"""
TWO_OPTIMIZERS = """
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
first, second = (torch.optim.AdamW(part.parameters(), lr=1e-3) for part in model.module)
for step in range(6):
    model(torch.randn(4, 64)).square().mean().backward()
    first.step()
    second.step()
    model.zero_grad()
"""
TURNS = """
models = [DistributedDataParallel(nn.Linear(64, 64)) for _ in range(2)]
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
for step in range(3):
    for model, optimizer in zip(models, optimizers):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
KILLED = """
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    if step == 6:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BOTH_INTERFACES_OF_TF32 = """
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.fp32_precision = "ieee"
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS = 4 * (64 * 64 + 64)
"""Bytes of one linear layer."""


def run(folder: Path, body: str) -> ScriptRun:
    (folder / "train.py").write_text(HEAD + body)
    return run_script(folder, folder / "train.py")


def optimizer_bytes(record: Record) -> set[int]:
    """After the updates of probed steps, without the steps that torch counts in a tensor each."""
    return {
        (part.kinds or {})["optimizer"] // 1000
        for rank in record.ranks
        for part in rank.memory
        if part.moment == "after_step"
    }


@pytest.mark.costly
def test_two_optimizers_of_one_backward_pass_are_one_step(tmp_path: Path) -> None:
    seen = run(tmp_path, TWO_OPTIMIZERS)
    assert seen.codes == [0, 0], seen.printed
    record = seen.record
    assert record is not None
    assert record.observation is not None
    assert [step.samples for step in record.steps] == [8] * 6
    assert optimizer_bytes(record) == {2 * 2 * WEIGHTS // 1000}
    assert any("2 optimizers step" in note for note in record.observation.notes)


def test_optimizers_that_take_turns_have_a_step_each(tmp_path: Path) -> None:
    record = run(tmp_path, TURNS).record
    assert record is not None
    assert record.observation is not None
    assert record.status == "ok"
    assert [step.samples for step in record.steps] == [8] * 6
    assert any(note.startswith("several models train") for note in record.observation.notes)


def test_an_interrupted_script_leaves_the_steps_that_it_made(tmp_path: Path) -> None:
    seen = run(tmp_path, KILLED)
    record = seen.record
    assert seen.codes[1] == -9
    assert record is not None
    assert record.error is not None
    assert record.status == "failed"
    assert len(record.steps) == 6
    assert record.error.rank == 1


def test_a_script_that_sets_tf32_by_both_interfaces_leaves_its_record(tmp_path: Path) -> None:
    seen = run(tmp_path, BOTH_INTERFACES_OF_TF32)
    assert seen.codes == [0, 0], seen.printed
    assert seen.record is not None
    assert seen.record.observed is not None
    assert seen.record.observed.tf32 is True
    assert len(seen.record.steps) == 6
