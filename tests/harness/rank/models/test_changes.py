import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import JobError
from harness.forms.activations import recomputed_share
from harness.job.job import Job
from harness.rank.models.changes import chunk_head, enable_checkpointing, is_compiled, while_compiling
from harness.rank.models.losses import loss_function, summed_cross_entropy
from harness.run_directory.rank_state import PositionWriter, read_position
from tests.harness.rank.small_models import SMALL, alone, built, job_of

MODES = (False, True, "every-2", "selective")
LAYERS = 3


def step(checkpointing: bool | str) -> tuple[int, list[torch.Tensor], int]:
    """FLOPs of matrix products and attention in a step, its gradients, and bytes kept for backward."""
    model = built(job_of(SMALL | {"num_hidden_layers": LAYERS}, activation_checkpointing=checkpointing))
    tokens = torch.arange(16).reshape(2, 8)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = summed_cross_entropy(model, {"tokens": tokens, "labels": tokens})
        loss.backward()
    return counter.get_total_flops(), [p.grad for p in model.parameters()], sum(kept.values())


def test_flops_are_recomputed_as_the_share_says_and_gradients_stay() -> None:
    found = {mode: step(mode) for mode in MODES}
    plain, gradients, _ = found[False]
    every = found[True][0] - plain
    assert every > 0
    for mode in MODES:
        assert found[mode][0] - plain == every * recomputed_share(mode, LAYERS), mode
        assert all(torch.equal(a, b) for a, b in zip(found[mode][1], gradients, strict=True)), mode
    assert found[True][2] < found["every-2"][2] < found[False][2]


def test_a_model_that_recomputes_all_or_nothing_says_so() -> None:
    model = nn.Linear(2, 2)
    model.activation_checkpointing_enable = lambda: None
    model.gradient_checkpointing_enable = lambda: None
    enable_checkpointing(model, True)
    with pytest.raises(JobError, match="recomputes every block or none"):
        enable_checkpointing(model, "every-2")
    with pytest.raises(JobError, match="has no gradient checkpointing"):
        enable_checkpointing(SimpleNamespace(), True)


VOCABULARY, LENGTH, SAMPLES = 4096, 24, 2


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that an operator returns, parameters' gradients left out."""

    def __init__(self, besides: set[int]) -> None:
        super().__init__()
        self._besides = besides
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() not in self._besides:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def chunked_step(chunk_tokens: int | None, **config: object) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and bytes of the largest activation of a step."""
    job = Job.model_validate(
        {
            "model": {"config": SMALL | {"vocab_size": VOCABULARY} | config},
            "data": {"sequence_length": LENGTH},
            "loss": {"chunk_tokens": chunk_tokens},
        }
    )
    model = built(job)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[1, 9:] = -100
    with LargestTensor({p.numel() for p in model.parameters()}) as largest:
        loss = loss_function(job, model)(model, {"tokens": tokens, "labels": labels})
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters()], largest.bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.costly
def test_loss_and_gradients_are_those_of_all_logits(chunk: int, tied: bool) -> None:
    loss, gradients, _ = chunked_step(None, tie_word_embeddings=tied)
    chunked, others, _ = chunked_step(chunk, tie_word_embeddings=tied)
    assert chunked == pytest.approx(loss, rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        # Sums over tokens in another order.
        assert (one - other).norm() <= SAMPLES * LENGTH * torch.finfo(torch.float32).eps * one.norm()


def test_the_largest_tensor_is_the_logits_of_one_chunk() -> None:
    assert chunked_step(None)[2] == SAMPLES * LENGTH * VOCABULARY * 4
    assert chunked_step(7)[2] == 7 * VOCABULARY * 4


def test_logits_that_the_model_changes_and_heads_that_are_not_linear_are_refused() -> None:
    with pytest.raises(JobError, match="changes its logits after the output layer"):
        chunked_step(7, model_type="gemma2", head_dim=16, num_hidden_layers=1)
    with pytest.raises(JobError, match=r"needs an output layer that is a plain nn\.Linear; Linear has none"):
        chunk_head(nn.Linear(2, 2), 4)


def compiled_job(compiled: str) -> Job:
    asked = job_of(SMALL)
    return asked.model_copy(update={"model": asked.model.model_copy(update={"compile": compiled})})


def test_blocks_are_compiled_in_place() -> None:
    model = built(compiled_job("block"))
    assert [name for name, m in model.named_modules() if m._compiled_call_impl is not None] == [
        "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    assert list(model.state_dict()) == list(built(job_of(SMALL)).state_dict())
    assert is_compiled(model)
    assert not is_compiled(copy.deepcopy(model))
    assert not is_compiled(built(job_of(SMALL)))


@pytest.mark.parametrize("precision", [None, "cast"])
@pytest.mark.parametrize("compiled", ["none", "block", "model"])
def test_what_computes_is_compiled(compiled: str, precision: str | None) -> None:
    called: list[nn.Module] = []
    engine = alone(
        lambda: built(compiled_job(compiled)),
        lambda module, _: called.append(module) or torch.zeros(()),
        precision, compile=compiled,
    )  # fmt: skip
    engine.forward({})
    assert is_compiled(called[0]) == (compiled != "none")


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
