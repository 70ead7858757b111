from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.errors import JobError
from harness.forms.activations import recomputed_share
from harness.rank.models.changes import enable_checkpointing
from harness.rank.models.losses import summed_cross_entropy
from tests.harness.rank.models.test_model import SMALL, built, job

MODES = (False, True, "every-2", "selective")
LAYERS = 3


def step(checkpointing: bool | str) -> tuple[int, list[torch.Tensor], int]:
    """FLOPs of matrix products and attention in a step, its gradients, and bytes kept for backward."""
    model = built(job(SMALL | {"num_hidden_layers": LAYERS}, activation_checkpointing=checkpointing))
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
