import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.job.job import Job, OptimizerSection
from harness.rank.data import SeenBatch, batch_hash_sum, content_digests, content_sum
from harness.rank.live.observer import DIGESTED_STEPS, Observer, OptimizerWatch
from harness.rank.models.losses import returns_loss, summed_cross_entropy, targets_of
from harness.rank.models.optimizer import update_groups
from harness.rank.step_hooks import Step
from harness.record import ObservedPart


class Model(nn.Module):
    """Enough of a language model: an embedding tied to the output if asked, and a norm."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.config = SimpleNamespace(_attn_implementation="sdpa", to_dict=lambda: {"attention_dropout": 0.0})

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.head(self.drop(self.norm(self.embedding(input_ids)))))


def batch(*tokens: list[int]) -> dict[str, Tensor]:
    rows = torch.tensor(tokens)
    return {"tokens": rows, "labels": rows}


def observed(model: Model, **changes: Any) -> tuple[Observer, torch.optim.AdamW]:
    """An observer that saw the model and its optimizer built; `skip` names a parameter left out."""
    skip = changes.get("skip")
    observer = Observer()
    observer.built(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if name != skip]
    section = OptimizerSection(beta2=0.9)
    return observer, observer.build_optimizer(named, section, update_groups(model, section))


def train(observer: Observer, model: Model, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Any]:
    seen = []
    for step in range(steps):
        rate = optimizer.param_groups[0]["lr"]
        observer.prepare(Step(number=step, since_first=step, rate=rate))
        observer.compute_loss(model, batch([0, 1, 2], [2, 3, 4])).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(observer.facts())
    return seen


def trained(steps: int = 1) -> tuple[Observer, torch.optim.Optimizer, list[Any]]:
    """After so many steps, with the facts of each."""
    model = Model()
    observer, optimizer = observed(model)
    return observer, optimizer, train(observer, model, optimizer, steps)


def test_report_is_what_a_record_holds_with_the_live_constants_of_each_group() -> None:
    observer, optimizer, _ = trained()
    part = ObservedPart(**observer.report())
    assert part.optimizer_used
    assert part.optimizer_steps == 1
    assert part.master_dtypes == part.optimizer_state_dtypes == ["float32"]
    assert part.parameters_left_out == part.frozen_parameters == []
    assert (part.attention, part.tied_parameters, part.dropout) == ("sdpa", 0, 0.0)
    optimizer.param_groups[1]["eps"] = 1e-5
    decaying, keeping = observer.report()["optimizer_groups"]
    assert decaying["parameters"] == ["embedding.weight", "head.weight"]
    assert keeping["parameters"] == ["norm.weight", "norm.bias"]
    assert (decaying["betas"], keeping["eps"], keeping["weight_decay"]) == ([0.9, 0.9], 1e-5, 0.0)


def test_an_optimizer_that_a_backend_built_for_itself_is_read_in_place_of_the_jobs() -> None:
    model = Model()
    observer, _ = observed(model)
    own = torch.optim.AdamW([*model.embedding.parameters(), *model.head.parameters()], lr=0.1, eps=1e-5)
    (seen,) = train(observer, model, own)
    assert seen["applied_learning_rate"] == 0.1
    facts = observer.report()
    assert facts["optimizer_used"] is False
    (group,) = facts["optimizer_groups"]
    assert (group["eps"], group["parameters"]) == (1e-5, ["embedding.weight", "head.weight"])
    assert facts["parameters_left_out"] == ["norm.bias", "norm.weight"]


def test_updates_without_a_torch_optimizer_are_not_seen_but_what_it_was_not_given() -> None:
    model = Model()
    observer, _ = observed(model, skip="norm.bias")
    observer.prepare(Step(number=0, since_first=0))
    observer.compute_loss(model, batch([0, 1, 2]))
    seen = observer.facts()
    assert seen["applied_learning_rate"] is None
    assert "applied" not in seen
    facts = observer.report()
    assert "optimizer_groups" not in facts
    assert facts["parameters_left_out"] == ["norm.bias"]


def test_the_loss_is_noted_as_it_was_computed_and_samples_in_every_step() -> None:
    """One by one, and with gradients, in the first steps only."""
    _, _, seen = trained(DIGESTED_STEPS + 1)
    assert seen[0]["computed_loss_sum"] > seen[1]["computed_loss_sum"] > 0
    assert len({of_step["batch_hash_sum"] for of_step in seen}) == 1
    assert [("applied" in of_step) for of_step in seen] == [*([True] * DIGESTED_STEPS), False]
    assert seen[0]["applied"]["share"] == 1.0
    assert [len(of_step.get("batch_digests", ())) for of_step in seen] == [*([2] * DIGESTED_STEPS), 0]
    assert seen[0]["batch_digests"] == seen[1]["batch_digests"]
    assert len(set(seen[0]["batch_digests"])) == 2


def test_the_rate_of_the_group_farthest_from_the_jobs_is_told() -> None:
    observer, optimizer, _ = trained()
    optimizer.param_groups[1]["lr"] = 0.5
    assert observer.facts()["applied_learning_rate"] == 0.5


def test_constants_are_told_by_step_if_they_change() -> None:
    observer, optimizer, _ = trained()
    observer.prepare(Step(number=1, since_first=1))
    observer.facts()
    assert observer.report()["constants_by_step"] == {}
    optimizer.param_groups[0]["eps"] = 0.5
    observer.prepare(Step(number=2, since_first=2))
    observer.facts()
    observer.prepare(Step(number=3, since_first=3))
    observer.facts()
    changes = observer.report()["constants_by_step"]
    assert {step: groups[0]["eps"] for step, groups in changes.items()} == {0: 1e-8, 2: 0.5}


def test_buffers_are_told_by_their_values_when_training_begins() -> None:
    found = []
    for value in (0.5, 0.5, 0.3):
        model = Model()
        model.register_buffer(
            "scale", torch.full((2,), value, dtype=torch.float64 if found else torch.float32)
        )
        observer, optimizer = observed(model)
        train(observer, model, optimizer)
        found.append(observer.report()["buffers"]["scale"])
    assert found[0] == found[1] != found[2]


def test_buffers_that_training_leaves_as_they_are_are_told() -> None:
    model = Model()
    assert observed(model)[0].report()["still_buffers"] is None, "no step was taken"
    for name in ("kept", "moved"):
        model.register_buffer(name, torch.zeros(2))
    observer, optimizer = observed(model)
    model.register_forward_pre_hook(lambda *_: setattr(model, "moved", model.moved + 1.0))
    train(observer, model, optimizer)
    assert observer.report()["still_buffers"] == ["kept"]


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_of_a_later_step_while_it_runs() -> None:
    model = Model()
    observer, _ = observed(model)
    observer.prepare(Step(number=DIGESTED_STEPS, since_first=DIGESTED_STEPS))
    with Operators() as own:
        summed_cross_entropy(model, batch([0, 1, 2]))
    with Operators() as seen:
        observer.compute_loss(model, batch([0, 1, 2]))
    assert seen.ran - own.ran == {"aten.detach.default": 1}
    assert observer.facts()["batch_hash_sum"]


def test_samples_of_an_evaluation_are_not_noted_and_labels_are_part_of_a_sample() -> None:
    model = Model()
    observer, _ = observed(model)
    observer.prepare(Step(number=0, since_first=0))
    with torch.no_grad():
        observer.compute_loss(model, batch([0, 1, 2]))
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2]])
    observer.compute_loss(model, {"tokens": tokens, "labels": torch.tensor([[0, 1, 2], [0, 1, 3]])})
    digests = observer.facts()["batch_digests"]
    assert len(digests) == len(set(digests)) == 2


def test_tied_frozen_dropout_and_checkpointing_are_read_from_the_live_model() -> None:
    model = Model(tied=True, dropout=0.25)
    model.norm.weight.requires_grad_(False)
    model.norm.gradient_checkpointing = True
    facts = observed(model)[0].report()
    assert facts["tied_parameters"] == 1
    assert facts["frozen_parameters"] == ["norm.weight"]
    assert facts["dropout"] == 0.25
    assert facts["activation_checkpointing"] is True


def test_dropout_that_only_the_configuration_names_counts() -> None:
    model = Model()
    model.config.to_dict = lambda: {"attention_dropout": 0.1, "resid_pdrop": 0.2, "use_dropout": True}
    assert observed(model)[0].report()["dropout"] == 0.2
    model.norm.resid_pdrop = 0.05
    assert observed(model)[0].report()["dropout"] == 0.1, "what a module keeps goes before its configuration"


class WithLoss(Model):
    """Returns a loss of its own, with a term that the job's has not."""

    def forward(self, input_ids: Tensor, use_cache: bool = False, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids, use_cache).logits.mean(1)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels) + 0.5
        return SimpleNamespace(logits=logits, loss=loss)


def of_class(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
    logits = module(input_ids=given["input_ids"]).logits
    return nn.functional.cross_entropy(logits, given["labels"], reduction="sum")


def probed(
    model: nn.Module, loss: Any, given: dict[str, Tensor], **more: Any
) -> tuple[float | None, Observer]:
    """The loss of a batch as an engine computes it that does nothing else, and who observed that."""
    observer = Observer()
    observer.built(model, loss, **more)
    engine: Any = SimpleNamespace(
        train=lambda mode: None, forward=lambda batch: observer.compute_loss(model, batch)
    )
    return observer.probe_loss(engine, given), observer


def test_the_loss_of_a_model_stands_beside_the_jobs_whatever_the_task() -> None:
    for task, labels in (("classification", 2), ("seq2seq", 6), ("causal-lm", 4)):
        given = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3).long()}
        factories = {"model": {"factory": "m:f"}, "data": {"factory": "m:f"}}
        job = Job.model_validate({"task": task, **factories})
        assert returns_loss(job, WithLoss())
        assert not returns_loss(job, Model()), "its forward pass takes no labels"
        assert int(targets_of(given, job)) == labels
    given = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([0, 1])}
    _, observer = probed(WithLoss(), of_class, given, targets_of_model_loss=len)
    seen = observer.report()["model_loss"]
    assert (seen.targets, round(seen.model - seen.job, 5)) == (2, 0.5)


def test_a_loss_that_takes_a_gradient_is_not_probed() -> None:
    def penalised(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
        points = given["points"].requires_grad_()
        (slope,) = torch.autograd.grad(module(points).sum(), points, create_graph=True)
        return slope.square().mean()

    assert probed(nn.Linear(2, 1), penalised, {"points": torch.ones(3, 2)})[0] is None


def test_what_a_loss_draws_is_the_same_on_every_rank() -> None:
    def noisy(module: nn.Module, given: dict[str, Tensor]) -> Tensor:
        return module(given["points"] + torch.randn(3, 2) * random.random()).sum()

    model, given = nn.Linear(2, 1), {"points": torch.ones(3, 2)}
    assert probed(model, noisy, given)[0] == probed(model, noisy, given)[0]


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


def rows() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6) % 7


def total(tokens: torch.Tensor, labels: torch.Tensor) -> int:
    return int(content_sum({"tokens": tokens, "labels": labels}))


def test_content_sums_do_not_depend_on_order_or_on_the_cut() -> None:
    whole = total(rows(), rows())
    assert total(rows().flip(0), rows().flip(0)) == whole
    parts = [total(part, part) for part in rows().split(2)]
    assert (sum(parts) - whole) % 2**64 == 0


@pytest.mark.parametrize("which", ["tokens", "labels", "swapped tails", "another order", "repeated"])
def test_content_sums_tell_other_samples(which: str) -> None:
    tokens, labels = rows(), rows()
    if which == "swapped tails":
        tokens[0, 3:], tokens[1, 3:] = rows()[1, 3:], rows()[0, 3:]
        labels = tokens
    elif which == "another order":
        tokens[0] = labels[0] = rows()[0].flip(0)
    elif which == "repeated":
        tokens = labels = rows()[[0, 0, 2, 3]]
    else:
        (tokens if which == "tokens" else labels)[2, 1] += 1
    assert total(tokens, labels) != total(rows(), rows())


def test_content_sums_tell_other_images_and_classes() -> None:
    images, labels = torch.rand(4, 3, 5, 5), torch.arange(4)
    other = images.clone()
    other[1, 2, 3, 4] += 1e-6
    found = [
        int(content_sum({"pixel_values": first, "labels": second}))
        for first, second in (
            (images, labels), (other, labels), (images, labels.flip(0)), (images[[0, 0, 2, 3]], labels),
        )
    ]  # fmt: skip
    assert len(set(found)) == 4


def test_content_digests_are_one_per_sample() -> None:
    tokens = rows()[[0, 0, 1]]
    first, again, other = content_digests({"tokens": tokens, "labels": tokens})
    assert first == again != other


def test_batches_are_summed_as_they_were_fed_or_not_at_all() -> None:
    first, second = ({"tokens": part, "labels": part} for part in rows().clone().split(2))
    seen = [SeenBatch(first), SeenBatch(second)]
    assert batch_hash_sum(seen) == total(rows(), rows()) % 2**64
    second["labels"].zero_()
    assert batch_hash_sum(seen) is None
