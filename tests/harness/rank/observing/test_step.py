from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from harness.rank.observing.hooks import SHARE, may_divide, reads
from harness.rank.observing.step import TRAINER, MicroBatch, MicroLoss, total_loss
from harness.record.run import LABELLED, PADDING


def batch(targets: int) -> MicroBatch:
    labels = torch.full((1, 5), -100)
    labels[0, 1 : 1 + targets] = 7
    found = MicroBatch.of(
        (), {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": labels}, causal=True
    )
    assert found is not None
    return found


def test_returned_losses_are_averaged_over_target_tokens() -> None:
    losses = [MicroLoss(returned=torch.tensor(1.0)), MicroLoss(returned=torch.tensor(4.0))]
    total = total_loss(losses, [batch(1), batch(3)])
    assert (total.value, total.weight) == (13.0, 4.0)


class Outputs(torch.autograd.Function):
    """As DDP passes what a model returns."""

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(one.clone() for one in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


@pytest.mark.parametrize("place", [0, 1])
def test_a_returned_loss_that_the_scripts_own_leaves_out_gets_no_gradient(place: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss, seen = weight.sum(), MicroLoss()
    seen.returns(loss)
    Outputs.apply(loss, weight.square().sum())[place].backward()
    assert len(seen.gradients) == (place == 0)


def test_a_loss_that_the_model_divided_by_given_items_is_summed_again() -> None:
    total = total_loss([MicroLoss(returned=torch.tensor(0.5), items=8.0)], [batch(4)])
    assert (total.value, total.weight) == (4.0, 4.0)


def test_a_sample_that_is_no_text_counts_as_one_token() -> None:
    images = MicroBatch.of((torch.ones(3, 5),), {}, causal=False)
    embeddings = MicroBatch.of((), {"inputs_embeds": torch.ones(3, 5, 2)}, causal=True)
    assert (images and images.tokens(), embeddings and embeddings.tokens()) == (3, None)


@pytest.mark.parametrize(
    ("output", "labels", "tokens"),
    [
        (torch.ones(16, 10), None, 16), (torch.ones(16), None, 16), ((torch.ones(16, 1),), None, 16),
        ({"loss": torch.tensor(1.0), "logits": torch.ones(16, 2)}, torch.ones(16), 16),
        (torch.tensor(1.0), torch.ones(16), 16), (torch.tensor(1.0), None, 128),
        (torch.ones(16, 8, 64), None, 128), ({"logits": torch.ones(16, 8)}, None, 128),
        (torch.ones(128, 64), None, 128), (torch.tensor(1.0), torch.ones(16, 8), 128),
    ],
)  # fmt: skip
def test_tokens_count_where_the_model_answers_for_each(
    output: object, labels: torch.Tensor | None, tokens: int
) -> None:
    found = MicroBatch.of((), {"x": torch.ones(16, 8, dtype=torch.long), "labels": labels}, causal=False)
    assert (found and found.answered(output).tokens()) == tokens


def test_scalars_of_several_micro_steps_are_not_guessed_at() -> None:
    scalars = [MicroLoss(scalar=torch.tensor(1.0)), MicroLoss(scalar=torch.tensor(1.0))]
    assert total_loss(scalars, []) is None
    alone = total_loss(scalars[:1], [])
    assert alone.value == 1.0


@pytest.mark.parametrize(
    ("tokens", "labels", "is_ahead"),
    [
        ([1, 2, 3, 4], [2, 3, 4, 5], True), ([1, 2, 3, 4], [-100, -100, 4, 5], True),
        ([1, 2, 3, 4], [1, 2, 3, 4], False), ([7, 7, 7, 7], [7, 7, 7, 7], False),
        ([1, 2, 3, 4], [2, 3, 9, 5], False), ([1, 2, 3, 4], [-100, -100, -100, 5], False),
        ([1, 2, 3, 4], [2, 3, 4], False), ([1.0, 2.0, 3.0, 4.0], [2, 3, 4, 5], False),
    ],
)  # fmt: skip
def test_labels_that_are_the_next_tokens_stand_ahead(
    tokens: list[float], labels: list[int], is_ahead: bool
) -> None:
    given = {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([labels])}
    found = MicroBatch.of((), given, causal=True)
    assert found is not None
    assert found.labels_are_ahead() is is_ahead


def test_labels_of_padding_are_counted() -> None:
    tokens = torch.tensor([[5, 6, 0, 0], [5, 0, 0, 0]])
    for labels, labelled in ((tokens, 5.0), (tokens.where(tokens != 0, -100), 0.0)):
        given = {"input_ids": tokens, "labels": labels, "attention_mask": tokens != 0}
        found = MicroBatch.of((), given, causal=True)
        assert found is not None
        assert found.padding() == {PADDING: 5.0, LABELLED: labelled}


@pytest.mark.parametrize(
    ("returned", "framework", "scalar", "named", "pair"),
    [
        (None, 0.5, 0.5, {"framework_name": "Accelerator.backward"}, None),  # divided by the script, or never
        (None, 2.0, 0.5, {"framework_name": "Accelerator.backward"}, (0.5, 2.0)),
        (2.0, 0.5, 0.5, {"framework_name": "Accelerator.backward"}, (0.5, 2.0)),
        (2.0, 2.0, 2.0, {"framework_name": "Accelerator.backward"}, (2.0, 2.0)),
        (None, 0.5, 0.5, {"framework_name": TRAINER}, None),  # divided by args.gradient_accumulation_steps
        (None, 2.0, 2.0, {"framework_name": TRAINER, "may_be_divided": False}, (2.0, 2.0)),
        (None, 2.0, 0.5, {"framework_name": TRAINER, "may_be_divided": False}, (0.5, 2.0)),
        (None, None, 0.5, {}, None),
    ],
)
def test_a_loss_that_the_script_may_have_divided_is_not_that_of_its_micro_step(
    returned: float | None, framework: float | None, scalar: float, named: dict[str, Any],
    pair: tuple[float, float] | None,
) -> None:  # fmt: skip
    tensors = {"returned": returned, "framework": framework, "scalar": scalar}
    given = {name: torch.tensor(value) for name, value in tensors.items() if value is not None}
    assert MicroLoss(**given, **named).of_backward == pair
    if returned is not None:
        unreached = MicroLoss(**given, **named, gradients=[torch.tensor(0.0)])
        assert unreached.of_backward == (0.0, returned)


class Losses:
    def own(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(inputs)

    def divided(self, model: Any, inputs: Any, **named: Any) -> Any:
        return model(inputs) / self.args.gradient_accumulation_steps

    def by_trainer(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(inputs).sum() / (num_items_in_batch or self.current_gradient_accumulation_steps)

    def __call__(self, model: Any) -> Any:
        return model

    of_part = partialmethod(own, num_items_in_batch=None)


@pytest.mark.parametrize(
    ("function", "share", "divides"),
    [
        (Losses.own, False, False), (Losses.divided, False, True), (Losses.by_trainer, True, True),
        (Losses.of_part, True, False), (partial(Losses.own), True, True), (Losses(), True, True),
        (len, True, True),
    ],
)  # fmt: skip
def test_what_a_loss_reads_is_known_of_code_and_else_taken_as_read(
    function: Any, share: bool, divides: bool
) -> None:
    assert (reads(function, SHARE), may_divide(function)) == (share, divides)
