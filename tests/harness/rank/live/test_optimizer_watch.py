import pytest
import torch
from torch import nn

from harness.rank.data import SeenBatch, batch_hash_sum, content_digests, content_sum
from harness.rank.live.observer import OptimizerWatch


def stepped(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def test_an_optimizer_that_steps_is_seen_whoever_built_it() -> None:
    model = nn.Linear(3, 4)
    watch = OptimizerWatch()
    watch.start()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.5))
    stepped(optimizer, 2.0)
    squares, elements = watch.stop() or (0.0, 0)
    assert watch.optimizers == [optimizer]
    assert (squares, elements) == (pytest.approx(4.0 * 16), 16)


def test_gradients_changed_by_a_hook_of_the_optimizer_are_seen_as_they_were_used() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def halve(*_: object) -> None:
        weight.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    watch = OptimizerWatch()
    watch.start()
    stepped(optimizer, 2.0)
    assert watch.stop() == (pytest.approx(4.0), 4)


def test_a_parameter_that_steps_twice_counts_once() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    watch = OptimizerWatch()
    watch.start()
    stepped(optimizer, 3.0)
    stepped(optimizer, 1.0)
    assert watch.stop() == (pytest.approx(4.0), 4)


def test_nothing_is_seen_before_the_start_and_after_the_stop() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=1.0)
    watch = OptimizerWatch()
    stepped(optimizer, 1.0)
    watch.start()
    assert watch.stop() is None
    stepped(optimizer, 1.0)
    assert watch.optimizers == []


def batch() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6) % 7


def total(tokens: torch.Tensor, labels: torch.Tensor) -> int:
    return int(content_sum({"tokens": tokens, "labels": labels}))


def test_content_sums_do_not_depend_on_order_or_on_the_cut() -> None:
    whole = total(batch(), batch())
    assert total(batch().flip(0), batch().flip(0)) == whole
    parts = [total(part, part) for part in batch().split(2)]
    assert (sum(parts) - whole) % 2**64 == 0


@pytest.mark.parametrize("which", ["tokens", "labels", "swapped tails", "another order", "repeated"])
def test_content_sums_tell_other_samples(which: str) -> None:
    tokens, labels = batch(), batch()
    if which == "swapped tails":
        tokens[0, 3:], tokens[1, 3:] = batch()[1, 3:], batch()[0, 3:]
        labels = tokens
    elif which == "another order":
        tokens[0] = labels[0] = batch()[0].flip(0)
    elif which == "repeated":
        tokens = labels = batch()[[0, 0, 2, 3]]
    else:
        (tokens if which == "tokens" else labels)[2, 1] += 1
    assert total(tokens, labels) != total(batch(), batch())


def test_content_sums_tell_other_images_and_classes() -> None:
    images, labels = torch.rand(4, 3, 5, 5), torch.arange(4)
    other = images.clone()
    other[1, 2, 3, 4] += 1e-6
    found = [
        int(content_sum({"pixel_values": first, "labels": second}))
        for first, second in (
            (images, labels),
            (other, labels),
            (images, labels.flip(0)),
            (images[[0, 0, 2, 3]], labels),
        )
    ]
    assert len(set(found)) == 4


def test_content_digests_are_one_per_sample() -> None:
    tokens = batch()[[0, 0, 1]]
    first, again, other = content_digests({"tokens": tokens, "labels": tokens})
    assert first == again != other


def test_batches_are_summed_as_they_were_fed_or_not_at_all() -> None:
    first, second = ({"tokens": part, "labels": part} for part in batch().clone().split(2))
    seen = [SeenBatch(first), SeenBatch(second)]
    assert batch_hash_sum(seen) == total(batch(), batch()) % 2**64
    second["labels"].zero_()
    assert batch_hash_sum(seen) is None
