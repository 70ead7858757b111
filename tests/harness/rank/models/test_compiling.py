import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from harness.backends.base import SetupContext, World
from harness.backends.options import SingleOptions
from harness.backends.single import SingleBackend
from harness.job.job import Job
from harness.rank.models.changes import is_compiled, while_compiling
from harness.run_directory.rank_state import PositionWriter, read_position
from tests.harness.rank.models.test_model import SMALL, built, job


def compiled_job(compiled: str) -> Job:
    asked = job(SMALL)
    return asked.model_copy(update={"model": asked.model.model_copy(update={"compile": compiled})})


def test_blocks_are_compiled_in_place() -> None:
    model = built(compiled_job("block"))
    assert [name for name, m in model.named_modules() if m._compiled_call_impl is not None] == [
        "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    assert list(model.state_dict()) == list(built(job(SMALL)).state_dict())
    assert is_compiled(model)
    assert not is_compiled(built(job(SMALL)))


def test_a_compiled_job_is_another_job() -> None:
    ids = {compiled_job(compiled).job_id() for compiled in ("none", "block", "model")}
    assert len(ids) == 3
    assert compiled_job("none").job_id() == job(SMALL).job_id()


@pytest.mark.parametrize("precision", [None, "cast"])
@pytest.mark.parametrize("compiled", ["none", "block", "model"])
def test_what_computes_is_compiled(compiled: str, precision: str | None) -> None:
    world = World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu")
    called: list[nn.Module] = []
    context = SetupContext(
        world=world, precision="bf16-mixed", gradient_clipping=None, micro_batch_size=1,
        accumulation_steps=1, preset="like-for-like", compile=compiled,
        compute_loss=lambda module, _: called.append(module) or torch.zeros(()),
    )  # fmt: skip
    engine = SingleBackend(SingleOptions(precision=precision)).prepare(
        lambda: built(compiled_job(compiled)),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named]),
        context,
    )
    engine.forward({})
    assert is_compiled(called[0]) == (compiled != "none")


def test_a_copy_of_a_compiled_module_is_not_compiled() -> None:
    assert not is_compiled(copy.deepcopy(built(compiled_job("block"))))


def test_compiling_is_a_phase_of_its_own_each_time(tmp_path: Path) -> None:
    seen: list[str] = []
    position = PositionWriter(tmp_path, 0)

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        found = read_position(tmp_path, 0)
        seen.append(found.phase if found else "")
        return graph.forward

    double = torch.compile(lambda tensor: tensor * 2, backend=compiler, dynamic=False)
    while_compiling(lambda: position.within("compile"))
    try:
        for phase, length in (("forward", 2), ("step", 3), ("step", 3)):
            position.enter(phase)
            double(torch.ones(length))
            assert position.position.phase == phase
    finally:
        callback_handler.clear()
    assert seen == ["compile", "compile"]
