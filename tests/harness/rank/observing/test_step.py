import torch

from harness.rank.observing.step import MicroBatch, MicroLoss, total_loss


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


def test_a_loss_that_the_model_divided_by_given_items_is_summed_again() -> None:
    total = total_loss([MicroLoss(returned=torch.tensor(0.5), items=8.0)], [batch(4)])
    assert (total.value, total.weight) == (4.0, 4.0)


def test_scalars_of_several_micro_steps_are_not_guessed_at() -> None:
    scalars = [MicroLoss(scalar=torch.tensor(1.0)), MicroLoss(scalar=torch.tensor(1.0))]
    assert total_loss(scalars, []) is None
    alone = total_loss(scalars[:1], [])
    assert alone.value == 1.0
