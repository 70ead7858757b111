"""Models of the user's own as skeletons: the same weights and buffers as whole ones, or why not."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.initial_weights import why_whole
from tests.harness.rank.loading.models import assert_equal, filled, source_of

SOURCE = """\
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_buffer("drawn", torch.rand(2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("doubled", self.first.weight.detach() * 2, persistent=False)
        self.second = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.second.weight
        with torch.no_grad():
            self.second.bias.copy_(torch.arange(3.0))
        self.scale = nn.Parameter(torch.tensor(2.0))


class Derived(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.double = self.weight.detach() * 2


class Reading(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.largest = float(self.weight.max())


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


class Fickle(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        if self.weight.is_meta:
            self.more = nn.Linear(1, 1)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("own") / "own_skeletons.py"
    path.write_text(SOURCE)
    known = [*sys.path]
    yield path
    sys.path[:] = known


def job(file: Path, kind: str, precision: str = "fp32") -> Job:
    return Job.model_validate({
        "task": "custom", "model": {"factory": f"{file}:{kind}"}, "data": {"factory": "mine:data"},
        "training": {"precision": precision},
    })  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16"])
def test_weights_and_buffers_are_those_of_the_whole_model(file: Path, precision: str, tmp_path: Path) -> None:
    asked = job(file, "Plain", precision)
    assert why_whole(asked, "slices") is None
    source = source_of(asked, tmp_path)
    whole, skeleton = source(), source.skeleton()
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert_equal(filled(source), whole)
    buffers = dict(skeleton.named_buffers())
    for name, buffer in whole.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.costly
def test_a_large_model_is_written_by_another_process(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.rank.initial_weights.SMALL_ELEMENTS", 0)
    source = source_of(job(file, "Plain"), tmp_path)
    assert_equal(filled(source), source())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Derived", "'double' is made of its weights and no buffer"),
        ("Reading", "cannot be built without memory"),
        ("Turned", "parameter 'turns' is complex, and files of weights hold real numbers"),
    ],
)
def test_what_weights_decide_needs_the_whole_model(file: Path, kind: str, reason: str) -> None:
    assert reason in str(why_whole(job(file, kind), "slices"))
    assert why_whole(job(file, kind), "full") is None


def test_a_function_that_builds_something_else_without_memory_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"builds other parameters .* runtime\.loading=full"):
        source_of(job(file, "Fickle"), tmp_path).skeleton()


def test_broadcast_has_no_way_for_buffers(file: Path) -> None:
    assert "runtime.loading=slices" in str(why_whole(job(file, "Plain"), "broadcast"))
    assert isinstance(source_of(job(file, "Plain"), file.parent)(), nn.Module)
