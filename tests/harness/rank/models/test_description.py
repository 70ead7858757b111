"""Which modules run, how often, and where gradients go, found on the meta device."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from harness.backends.base import Batch
from harness.errors import JobError
from harness.forms.textbook import ModelGeometry, model_flops_per_token
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.rank.models import description
from harness.rank.models.description import (
    DEPENDS_ON_DATA,
    REGULAR,
    ModuleUses,
    describe_geometry,
    find_module_uses,
    split_dependence,
)
from harness.rank.models.losses import ComputeLoss
from harness.record import GeometryPart, SplitPart
from tests.harness.rank.small_models import SMALL, SMALL_GPT2, built, job_of
from tests.sweep import models
from tests.sweep.table import own

IDS = {"input_ids": torch.tensor([[1, 2, 3], [3, 2, 1]]), "labels": torch.tensor([0, 1])}


class Shared(nn.Module):
    """A table that two modules look things up in and a third multiplies with, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Embedding(4, 4)
        self.first, self.second = nn.Embedding(4, 4), nn.Embedding(4, 4)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        for module in (self.first, self.second, self.last):
            module.weight = self.unused.weight
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.once(self.first(input_ids) + self.second(input_ids))
        self.seen.append(hidden)
        return self.last(self.twice(self.twice(hidden)))[:, 0]


def own_job(task: str = "classification") -> Job:
    return Job.model_validate({
        "task": task, "model": {"factory": "mine:model"}, "data": {"factory": "mine:data"}
    })  # fmt: skip


def traced(model: nn.Module, task: str = "classification") -> ModuleUses:
    return find_module_uses(own_job(task), model, None, IDS)


@pytest.mark.parametrize(("largest", "refused"), [(3, False), (4, True)])
def test_a_table_with_too_few_rows_for_the_data_is_refused(largest: int, refused: bool) -> None:
    """The first that is fed the data itself."""
    job, given = own_job(), {"input_ids": largest, "labels": 9}
    if not refused:
        assert find_module_uses(job, Shared(), None, IDS, given) == traced(Shared())
        return
    with pytest.raises(JobError, match="input_ids up to 4, so 'first' needs 5 rows and has 4"):
        find_module_uses(job, Shared(), None, IDS, given)


class Placed(Shared):
    """Adds what a table of two rows has for three places, or for those that `most` lets through."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.table, self.most = nn.Embedding(2, 4), most

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        inside = places if self.most > 1 else places.clamp(max=self.most)
        return super().forward(input_ids) + self.table(inside)[:, 0]


def test_places_beyond_a_table_are_refused_unless_the_model_keeps_them_within() -> None:
    job, given = own_job(), {"input_ids": 3, "labels": 9}
    assert find_module_uses(job, Placed(1), None, IDS, given) == traced(Placed(1)) != DEPENDS_ON_DATA
    with pytest.raises(JobError, match="3 places, so 'table' needs 3 rows and has 2"):
        find_module_uses(job, Placed(2), None, IDS, given)


def test_uses_are_in_the_order_of_the_forward_pass_with_what_the_backward_pass_sees() -> None:
    model = Shared()
    twice = ["earlier run of its module", "inputs with gradient"]
    assert traced(model).uses == {
        "unused.weight": ["inputs without gradient", "inputs without gradient", "inputs with gradient"],
        "twice.weight": twice,
        "twice.bias": twice,
    }
    assert model.seen == []  # a copy ran
    assert not any(parameter.is_meta for parameter in model.parameters())


class Weighed(nn.Module):
    """Returns a weight as it is, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(input_ids)[:, 0], self.weight


def test_a_parameter_that_its_module_returns_is_known_as_such() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden, weight = model(batch["input_ids"])
        return (hidden * weight.exp()).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.rank.models.description.loss_function", lambda *_: loss)
        found = traced(Weighed())
    assert found.uses == {"weight": ["returned by its module"]}
    assert found.read_outside == ["weight"]


def clamp(model: Any) -> None:
    with torch.no_grad():
        model[1].weight.clamp_(-0.1, 0.1)


def clamp_data(model: Any) -> None:
    model[1].weight.data.clamp_(-0.1, 0.1)


def give_data(model: Any) -> None:
    model[1].weight.data = model[1].weight.data / 2


def read_only(model: Any) -> None:
    model[1].weight.detach().clone().clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("change", "names"),
    [(clamp, ["1.weight"]), (clamp_data, ["1.weight"]), (give_data, ["1.weight"]), (read_only, [])],
)
def test_weights_that_passes_write_to_are_named(change: Callable[[Any], None], names: list[str]) -> None:
    model = Chain()
    model.before = lambda _: change(running[0])
    running: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, _: running.insert(0, module))
    assert traced(model).changed_in_passes == names


class Lends(nn.Module):
    """Returns a weight of another module, and one of its own in a container within another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, input_ids: Tensor) -> Any:
        return self.table(input_ids)[:, 0], self.table.weight, [self.weight]


def test_what_another_module_returns_or_a_container_hides_is_read_elsewhere() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden, table, (weight,) = model(batch["input_ids"])
        return (hidden * weight.exp()).sum() + table.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.rank.models.description.loss_function", lambda *_: loss)
        found = traced(Lends())
    elsewhere = ["read by another module"]
    assert found.uses == {"table.weight": elsewhere, "weight": elsewhere}


def test_frozen_weights_have_no_backward_pass() -> None:
    model = Shared()
    for module in (model.unused, model.once):
        module.requires_grad_(False)
    found = traced(model).uses
    assert found["unused.weight"] == ["forward only", "forward only", "inputs with gradient"]


def test_a_module_that_does_not_run_has_no_use() -> None:
    model = Shared()
    model.spare = nn.Linear(2, 2)
    assert traced(model).uses["spare.weight"] == []  # type: ignore[index]


class Chain(nn.Sequential):
    """Layers in a row, after something that a test does with the inputs."""

    def __init__(self, before: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 2))
        self.before = before

    def forward(self, input_ids: Tensor) -> Tensor:
        self.before(input_ids)
        return super().forward(input_ids.float())


def test_other_models_are_regular() -> None:
    assert traced(Chain()) == REGULAR
    assert find_module_uses(Job(), Shared(), None, None) == REGULAR


def penalised(coefficient: float = 1.0) -> Callable[..., Tensor]:
    """A loss with a penalty on weights, as `loss.factory`."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            sum(parameter.norm() for parameter in model.parameters())  # for a log, of no matter
        return model(batch["input_ids"]).sum() + coefficient * model[1].weight.square().sum()

    return loss


def test_weights_that_the_loss_reads_beside_the_model_are_named() -> None:
    loss = {"factory": f"{__name__}:penalised", "reduction": "mean", "targets": "samples"}
    own = own_job("custom").model_dump() | {"loss": loss}
    found = find_module_uses(Job.model_validate(own), Chain(), None, IDS)
    assert (found.read_outside, found.unreached, found.uses) == (["1.weight"], [], {})


@pytest.mark.parametrize("before", [
    lambda x: x.tolist(), lambda x: 1 / 0, lambda x: torch.rand([]), lambda x: torch.empty(1).uniform_(),
    lambda x: random.random(), lambda x: numpy.random.uniform(0, 1),
])  # fmt: skip
def test_nothing_is_known_where_values_or_random_numbers_may_decide_what_runs(
    before: Callable[[Tensor], Any],
) -> None:
    model = Chain(before)
    states = torch.get_rng_state(), random.getstate()
    assert traced(model) == DEPENDS_ON_DATA
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class Headed(Chain):
    """A frozen first layer, and a head that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Linear(2, 2)
        self[0].requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self[1](self[0](input_ids.float()))
        self.dropped(hidden)
        return hidden


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(self.last, self.table(input_ids), use_reentrant=False)[:, 0]


class Reentrant(Recomputing):
    _no_split_modules = ["Linear"]

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(self.last, self.table(input_ids), use_reentrant=True)[:, 0]


class Alternating(nn.Module):
    """Each pass runs another layer than the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = nn.ModuleList(nn.Linear(3, 2) for _ in range(3)), 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.passes += 1
        return self.layers[self.passes % 3](input_ids.float())


class EvaluatedElsewhere(nn.Module):
    """A layer that evaluations alone run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self.first(input_ids.float())
        return found if self.training else self.head(found)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Headed, {"unreached": ["dropped.weight", "dropped.bias"], "without_gradient": ["0", "dropped"]}),
        # How often weights are gathered is unknown where the model recomputes by itself,
        (Recomputing, {"uses": None, "unreached": []}),
        # and calls of blocks that run without gradients first.
        (Reentrant, {"unit_calls": None, "without_gradient": [], "unreached": []}),
        (Alternating, vars(DEPENDS_ON_DATA)),
        (EvaluatedElsewhere, {"evaluates_alike": False, "unreached": ["head.weight", "head.bias"]}),
    ],
)
def test_what_a_pass_leaves_out_repeats_or_alternates_is_told(
    model: type[nn.Module], found: dict[str, object]
) -> None:
    seen = vars(traced(model()))
    assert {name: seen[name] for name in found} == found


SAMPLES = models.points(64)


def batch_of(ids: Sequence[int]) -> Batch:
    return {name: torch.stack([SAMPLES[i][name] for i in ids]) for name in SAMPLES[0]}


def measured(
    loss: str | ComputeLoss, model: str | Callable[..., nn.Module] = "mlp", batches: int = 8, **arguments: Any
) -> SplitPart:
    """arguments: of the model, or `loss_...`."""
    torch.manual_seed(0)
    of_loss = {key: arguments.pop(key) for key in [key for key in arguments if key.startswith("loss_")]}
    built = models.model(model, **arguments) if isinstance(model, str) else model(**arguments)
    job = load_experiment(None, own("mlp", loss if isinstance(loss, str) else "given", **of_loss)).job()
    before = [tensor.clone() for tensor in (*built.parameters(), *built.buffers())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "given", lambda: loss, raising=False)
        found = split_dependence(job, built, batch_of, [range(8 * n, 8 * n + 8) for n in range(batches)])
    after = [*built.parameters(), *built.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.get_default_dtype() is torch.float32
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("loss", "model", "rest"),
    [
        ("of_pairs", "towers", {}), ("of_classes", "mlp", {"statistics": True}), ("of_mixed", "mlp", {}),
        ("of_weighted", "mlp", {}),
    ],
)  # fmt: skip
def test_a_loss_of_the_batch_depends_on_the_split(loss: str, model: str, rest: dict) -> None:
    found = measured(loss, model, **rest)
    assert found.depends
    assert not found.is_random
    assert found.difference > 0.01
    mean = measured("of_classes")
    assert not mean.depends
    assert mean.difference < 1e-6


def test_of_a_large_model_losses_are_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_WITH_GRADIENTS", 0)
    assert not measured("of_classes").depends
    assert measured("of_pairs", "towers").difference > 0.01

    def refuses(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    assert measured("of_mixed", loss_random=True).is_random
    monkeypatch.setattr(torch.Tensor, "backward", refuses)
    assert measured("of_mixed").depends


class Student(nn.Module):
    """Learns from a running mean of its own weights, which each forward pass moves, or its samples too."""

    def __init__(self, follows: float, by_samples: bool = False) -> None:
        super().__init__()
        self.layer, self.follows, self.by_samples = nn.Linear(models.FEATURES, 4), follows, by_samples
        self.register_buffer("teacher", self.layer.weight.detach().clone())

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.layer.weight, self.follows * (left.mean() if self.by_samples else 1))
        return (self.layer(left) - left @ self.teacher.T).square().mean()


@pytest.mark.parametrize(
    ("follows", "by_samples", "found_as"),
    [(0.004, False, "counts_passes"), (0.2, True, "is_random"), (0.0, False, None)],
)
def test_a_mean_of_weights_that_each_pass_moves_is_told(
    follows: float, by_samples: bool, found_as: str | None
) -> None:
    """Though it begins as the weights, with which no pass would move it."""
    found = measured(lambda model, batch: model(batch["points"]), partial(Student, follows, by_samples))
    names = ("counts_passes", "is_random")
    assert [name for name in names if getattr(found, name)] == ([found_as] if found_as else [])


def test_a_spectral_norm_counts_passes() -> None:
    found = measured(
        lambda model, batch: model(batch["points"]).square().mean(),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(models.FEATURES, 4)),
    )
    assert found.counts_passes
    assert found.depends
    assert found.repetition > 100 * found.rounding


def only_fp32(model: nn.Module, batch: Batch) -> Tensor:
    if batch["points"].dtype != torch.float32:
        raise TypeError("fp32 only")
    return models.of_pairs()(model, batch)


def test_code_that_takes_fp32_only_is_measured_in_fp32() -> None:
    found = measured(only_fp32, "towers")
    assert found.depends
    assert found.rounding == 2.0**-10


def branching(model: nn.Module, batch: Batch) -> Tensor:
    return models.of_classes()(model, batch) * (1 + (batch["points"][0, 1] > 2))


def branching_blocks(model: Any, batch: Batch) -> Tensor:
    block = model.blocks[int(batch["points"][0, 0] > 0)]
    return block(model.first(batch["points"])).square().mean()


def not_finite(model: nn.Module, batch: Batch) -> Tensor:
    left = batch["points"]
    lost = len(left) < 8 and bool(left[0, 0] > 1)
    return models.of_classes()(model, batch) * (torch.nan if lost else 1.0)


@pytest.mark.parametrize("loss", [branching, branching_blocks, not_finite])
def test_halves_that_take_other_branches_or_are_not_finite_depend_on_the_split(loss: ComputeLoss) -> None:
    """Those of the first batch may agree by chance."""
    if loss is branching:
        assert not measured(loss, batches=1).depends
    found = measured(loss)
    assert found.depends
    assert not found.is_random
    assert SplitPart.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("config", "looked_up"),
    [(SMALL, 257 * 32), (SMALL | {"tie_word_embeddings": True}, 0), (SMALL_GPT2, 64 * 32)],
)
def test_a_table_that_is_only_looked_up_does_not_multiply(config: dict[str, object], looked_up: int) -> None:
    """Of a tied one the output layer does; positions of GPT-2 are looked up alone."""
    model = built(job_of(config))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert describe_geometry(model) == GeometryPart(
        multiplying_parameters=total - looked_up, layers=2, attention_width=32
    )


def test_mixtures_of_experts_have_no_closed_form_here() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert describe_geometry(built(job_of(SMALL | experts))) is None


@pytest.mark.parametrize("config", [SMALL, SMALL_GPT2])
def test_the_closed_form_is_what_torch_counts(config: dict[str, object]) -> None:
    """torch counts matrix products: all of the formula but 6 per element of norms and biases."""
    model = built(job_of(config))
    length = 32
    tokens = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(input_ids=tokens).logits.sum().backward()
    geometry = describe_geometry(model)
    assert geometry is not None
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    expected = model_flops_per_token(
        ModelGeometry(
            multiplying_parameters=geometry.multiplying_parameters - vectors,
            block_parameters=0,
            layers=geometry.layers,
            attention_width=geometry.attention_width,
            sequence_length=length,
        )
    )
    assert counted.get_total_flops() == 2 * length * expected
