import torch

from harness.rank.observing.step import MicroBatch, MicroLoss, StepLoss


def batch(targets: int) -> MicroBatch:
    labels = torch.full((1, 5), -100)
    labels[0, 1 : 1 + targets] = 7
    found = MicroBatch.of(
        (), {"input_ids": torch.ones(1, 5, dtype=torch.long), "labels": labels}, causal=True
    )
    assert found is not None
    return found


def test_returned_losses_are_averaged_over_target_tokens() -> None:
    losses = StepLoss([MicroLoss(returned=torch.tensor(1.0)), MicroLoss(returned=torch.tensor(4.0))])
    total = losses.total([batch(1), batch(3)], micro_steps=2)
    assert total is not None
    assert (total.value, total.weight) == (13.0, 4.0)


def test_a_loss_that_the_model_divided_by_given_items_is_summed_again() -> None:
    losses = StepLoss([MicroLoss(returned=torch.tensor(0.5), items=8.0)])
    total = losses.total([batch(4)], micro_steps=1)
    assert total is not None
    assert (total.value, total.weight) == (4.0, 4.0)


def test_scalars_of_several_micro_steps_are_not_guessed_at() -> None:
    scalars = [MicroLoss(scalar=torch.tensor(1.0)), MicroLoss(scalar=torch.tensor(1.0))]
    assert StepLoss(scalars).total([], micro_steps=2) is None
    alone = StepLoss(scalars[:1]).total([], micro_steps=1)
    assert alone is not None
    assert alone.value == 1.0
