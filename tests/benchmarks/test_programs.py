"""What losses and blocks of other programs hold, next to ours."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from benchmarks.published.losses import FAST, FUSED, OURS, WIDENED_SHIFTED, LogitBytes, with_loss
from benchmarks.published.programs import recomputing, with_head
from harness.forms.activations import Point, Size
from tests.harness.forms.test_activations import TOKENS, llama

LLAMA = llama()


def most(points: tuple[Point, ...]) -> float:
    """Bytes per logit, those below the segment not counted."""
    return max(point.live.bytes(1, TOKENS) for point in points) / TOKENS / 128256


def test_a_job_s_own_loss_is_what_tracing_shows() -> None:
    assert most(LLAMA.loss.forward) + 2 == pytest.approx(OURS.forward, rel=0.01)
    assert most(LLAMA.loss.backward) + 2 == pytest.approx(OURS.backward, rel=0.01)


@pytest.mark.parametrize("other", [FAST, FUSED, WIDENED_SHIFTED])
def test_another_loss_holds_its_bytes_per_logit(other: LogitBytes) -> None:
    changed = with_loss(LLAMA, other)
    assert most(changed.loss.forward) + 2 == pytest.approx(other.forward, rel=0.01)
    assert most(changed.loss.backward) + 2 == pytest.approx(other.backward, rel=0.01)
    kept = with_loss(LLAMA, replace(other, kept=4)).kept - LLAMA.kept
    assert kept.bytes(1, TOKENS) == pytest.approx(4 * TOKENS * 128256, rel=0.01)


def test_what_is_recomputed_is_there_in_the_backward_pass_alone() -> None:
    plain = llama(checkpointing=False)
    gone = next(saved for saved in plain.block.saved if saved.module == "mlp.act_fn")
    found = recomputing(plain, ("act_fn",)).block
    assert found.forward_growth - plain.block.forward_growth == gone.size.times(-1)
    assert found.held - plain.block.held == gone.size.times(-1)
    assert found.backward == plain.block.backward


def test_a_head_that_is_unpacked_is_there_while_it_computes() -> None:
    beside = Size((7, 0, 0, 0, 0, 0))
    pairs = zip(LLAMA.head.forward, with_head(LLAMA, beside).head.forward, strict=True)
    assert {after.live - before.live for before, after in pairs} == {beside}


BLOCKS, HIDDEN = 4, 16


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def adapted(*, own_unit: bool) -> FullyShardedDataParallel:
    """A frozen and a trained layer; `own_unit`: of the trained one, as peft's policy wraps them."""
    frozen, trained = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
    frozen.weight.requires_grad_(not own_unit)
    return sharded(nn.Sequential(frozen, sharded(trained) if own_unit else trained))


@pytest.mark.parametrize(
    ("reentrant", "own_unit", "alive"),
    [(True, True, 2 * BLOCKS - 1), (False, True, 1), (True, False, 1), (False, False, 1)],
)
def test_inputs_of_frozen_units_and_their_gradients_outlive_reentrant_checkpoints(
    two_ranks: None, reentrant: bool, own_unit: bool, alive: int
) -> None:
    """`Program.keeps_block_inputs` in torch's own code, seen as the first block's gradient arrives."""
    seen: list[weakref.ref[torch.Tensor]] = []
    counted: list[int] = []

    def count(gradient: torch.Tensor) -> None:
        gc.collect()
        there = [tensor for one in seen if (tensor := one()) is not None]
        counted.append(len(there) + sum(one.is_leaf and one.grad is not None for one in there))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(adapted(own_unit=own_unit) for _ in range(BLOCKS))
            self.head = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return self.head(hidden)

    def remember(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_grad_enabled() or len(seen) == BLOCKS:
            return
        seen.append(weakref.ref(given[0]))
        if module is model.blocks[0].module:
            given[0].register_hook(count)

    model = Model()
    for block in model.blocks:
        block.module.register_forward_pre_hook(remember)
    sharded(model)(torch.randn(2, 3, HIDDEN, requires_grad=True)).sum().backward()
    assert counted == [alive]
