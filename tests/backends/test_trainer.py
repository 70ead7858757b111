"""What is said of Trainer's own loss and batches is what it does where nothing is overridden.

Trainer is imported in the tests, since every worker imports this module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.backends.accelerate import forget_accelerator
from harness.backends.trainer.engines import GivenRates, Handover

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


pytestmark = pytest.mark.long(seconds=8)
TARGETS = (2, 6)
"""Target tokens of the two micro-batches of the step."""


class MeanLoss(nn.Module):
    """A causal model whose forward takes no further arguments, so that its loss is a mean."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss}


@pytest.fixture
def llama() -> Iterator[LlamaForCausalLM]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    yield LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=31,
        )
    )  # fmt: skip
    forget_accelerator()


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 31, (len(TARGETS), 8), generator=generator)
    labels = tokens.clone()
    for sample, count in enumerate(TARGETS):
        labels[sample, 1 + count :] = -100
    return [{"input_ids": ids, "labels": row} for ids, row in zip(tokens, labels, strict=True)]


def trained(model: nn.Module, folder: Path) -> tuple[float, float]:
    """Trainer's own loop over one step of two micro-batches; the loss and gradient norm that it logs."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=samples())  # type: ignore[arg-type]
    trainer.train()
    logged = trainer.state.log_history[0]
    return logged["loss"], logged["grad_norm"]


def expected(model: LlamaForCausalLM, weights: tuple[float, ...]) -> tuple[float, float]:
    """Loss and gradient norm of the weighted sums over each sample's target tokens."""
    total = torch.zeros(())
    for sample, weight in zip(samples(), weights, strict=True):
        logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
        summed = nn.functional.cross_entropy(logits, sample["labels"][1:], ignore_index=-100, reduction="sum")
        total = total + weight * summed
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return float(total.detach()), float(torch.stack([g.norm() for g in gradients]).norm())


def test_a_model_that_counts_gets_the_loss_per_target_token_of_the_step(
    llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    per_token = 1 / sum(TARGETS)
    loss, norm = expected(llama, (per_token, per_token))
    own_loss, own_norm = trained(llama, tmp_path)
    assert own_loss == pytest.approx(loss, rel=1e-4)  # logged with few digits
    assert own_norm == pytest.approx(norm, rel=1e-4)


def test_another_model_gets_the_mean_of_micro_batches(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    loss, norm = expected(llama, tuple(1 / count / len(TARGETS) for count in TARGETS))
    own_loss, own_norm = trained(MeanLoss(llama), tmp_path)
    assert own_loss == pytest.approx(loss, rel=1e-4)
    assert own_norm == pytest.approx(norm, rel=1e-4)


def test_ranks_take_batches_in_turn_and_the_last_round_is_filled_up() -> None:
    from accelerate.data_loader import prepare_data_loader

    loader = DataLoader(range(5), batch_size=1)  # type: ignore[arg-type]
    seen = [
        [
            int(batch)
            for batch in prepare_data_loader(
                loader, device=torch.device("cpu"), num_processes=2, process_index=rank, put_on_device=False
            ).batch_sampler  # type: ignore[union-attr]
            for batch in batch
        ]
        for rank in (0, 1)
    ]
    assert seen == [[0, 2, 4], [1, 3, 0]]


class Doubling:
    """A loop that answers each number with its double, and notes how it ended."""

    def __init__(self) -> None:
        self.handover = Handover(self.loop)
        self.unwound = False
        self.thread: int | None = None

    def loop(self) -> None:
        self.thread = threading.get_ident()
        given = self.handover.answer("ready")
        try:
            while True:
                given = self.handover.answer(2 * given)
        finally:
            self.unwound = True


def test_the_two_sides_take_turns() -> None:
    doubling = Doubling()
    assert doubling.thread is None  # it has not begun
    assert doubling.handover.call() == "ready"
    assert [doubling.handover.call(number) for number in (1, 2, 3)] == [2, 4, 6]
    assert doubling.thread != threading.get_ident()
    doubling.handover.end()
    assert doubling.unwound


def test_what_the_loop_raises_reaches_the_caller() -> None:
    doubling = Doubling()
    doubling.handover.call()
    with pytest.raises(TypeError, match="unsupported operand"):
        doubling.handover.call(None)
    assert doubling.unwound


def test_a_loop_that_ends_by_itself_is_an_error() -> None:
    handover = Handover(lambda: None)
    with pytest.raises(RuntimeError, match="ended before its last step"):
        handover.call()


def test_a_loop_that_never_began_can_be_ended() -> None:
    Handover(lambda: pytest.fail("it began")).end()


def test_a_stepped_scheduler_leaves_the_rates_that_were_given() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    rates = GivenRates(optimizer)
    for given in (0.1, 0.3, 0.2):
        optimizer.param_groups[0]["lr"] = given
        optimizer.step()
        rates.step()
        assert optimizer.param_groups[0]["lr"] == given
    assert rates.get_last_lr() == [0.2]
    assert rates.steps_taken == 3
