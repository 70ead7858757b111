"""What one rank along 'tensor' computes by the plan is what torch counts on a model that was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from harness.backends.tensor.backend import cut_layers
from harness.forms.layout import DTYPE_BYTES
from harness.forms.tensor import LOGITS
from harness.plan.hardware import Device
from harness.plan.models import load_model
from harness.plan.step_time import Work, predict_speed
from tests.harness.plan.plans import A100, scenario

RANKS, TOKENS, VOCABULARY, HIDDEN = 4, 32, 512, 64
LLAMA = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False, attn_implementation="eager",
)  # fmt: skip
NORM = 1
"""The last norm counts as a row of the output projection (`harness.plan.model`)."""


class Counted(TorchDispatchMode):
    """FLOPs of matrix products and elements of log-softmax on plain tensors, as one rank runs them.

    FlopCounterMode counts a product of DTensors as the whole group computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.normalised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        # DTensor finds out shapes with fake tensors of the whole group.
        if any(type(value) is not torch.Tensor for value in args if isinstance(value, torch.Tensor)):
            return out
        if func.overloadpacket is torch.ops.aten.mm:
            self.flops += flop_registry[func.overloadpacket](*args, out_val=out)
        if func.overloadpacket is torch.ops.aten._log_softmax:
            self.normalised += out.numel()
        return out


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def step(model: LlamaForCausalLM) -> None:
    tokens = torch.arange(TOKENS).reshape(1, TOKENS) % VOCABULARY
    model(input_ids=tokens, labels=tokens).loss.backward()


def counted(ranks: int) -> Counted:
    model = LlamaForCausalLM(LLAMA)
    if ranks > 1:
        cut_layers(model, init_device_mesh("cpu", (ranks,)))
    with Counted() as found:
        step(model)
    return found


def work(backend: str, ranks: int, folder: Path, device: Device = A100) -> Work:
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA.to_dict()))
    given = scenario(
        backend, ranks, model=load_model(str(file)), micro_batch_size=1, sequence_length=TOKENS, device=device
    )
    return Work(replace(given, options={"tensor": ranks}, label=f"{backend}:tensor={ranks}"))


@pytest.mark.usefixtures("ranks")
def test_a_rank_multiplies_a_part_of_all_layers_and_normalises_all_logits(tmp_path: Path) -> None:
    found, plan = counted(RANKS), work("tp", RANKS, tmp_path)
    products = sum(m.rows * m.columns * m.count for m in plan.decoder.matrices)
    assert found.flops == 6 * TOKENS * (products + (plan.decoder.head_rows - NORM) * HIDDEN)
    assert found.normalised == TOKENS * (plan.logit_rows - NORM)


@pytest.mark.usefixtures("ranks")
@pytest.mark.costly
def test_the_counter_agrees_with_that_of_torch_on_a_model_that_is_not_cut() -> None:
    with FlopCounterMode(display=False) as whole:
        step(LlamaForCausalLM(LLAMA))
    found = counted(1)
    assert found.flops == whole.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert found.normalised == TOKENS * VOCABULARY
    assert counted(RANKS).flops == found.flops // RANKS


@pytest.mark.parametrize("backend", ["tp", "fsdp-tp", "autotp-zero1"])
def test_the_loss_is_of_as_many_logits_as_each_rank_gathers(backend: str, tmp_path: Path) -> None:
    plan = work(backend, RANKS, tmp_path)
    (gathered,) = (c for c in plan.collectives[0] if c.term == LOGITS)
    assert gathered.payload_bytes // DTYPE_BYTES[gathered.dtype] == plan.tokens * (plan.logit_rows - NORM)


def test_the_time_of_the_loss_does_not_fall_with_the_ranks_of_a_layer(tmp_path: Path) -> None:
    def loss(ranks: int) -> float:
        speed = predict_speed(work("tp", ranks, tmp_path).scenario)
        return next(term.seconds for term in speed.computing if term.name == "logits and loss")

    assert loss(4) == loss(2)
