"""On real ranks: steps of models whose modules do not each run once, with a backward pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import Backend, Effective, World
from harness.forms.layout import Layout
from harness.job.job import Job, UpdateGroup
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.description import Built, find_module_uses
from harness.rank.models.losses import loss_function
from harness.rank.probes.communication import CommunicationCounter
from harness.record import ModelPart
from tests.contract.cases import GLOBAL_BATCH, PROBED_STEP, engine_of, shared_folder, step_of
from tests.contract.deeds import held_kinds
from tests.sweep.models import Block, frozen, kind, sharing, through

WIDTH = 32


# fmt: off
@kind(lambda: {
    "first": nn.Linear(8, WIDTH), "blocks": [Block(WIDTH) for _ in range(3)], "last": nn.Linear(WIDTH, 1),
})
def plain(self: Any, features: Tensor) -> Tensor:
    return self.last(through(self.blocks, self.first(features))).squeeze(-1)


@kind(lambda: {
    "vision": frozen(nn.Sequential(nn.Linear(8, WIDTH), Block(WIDTH), Block(WIDTH))),
    "connector": nn.Linear(WIDTH, WIDTH), "blocks": [Block(WIDTH) for _ in range(3)],
    "head": nn.Linear(WIDTH, 1),
})
def frozen_encoder(self: Any, features: Tensor) -> Tensor:
    """The backward pass ends at the connector."""
    return self.head(through(self.blocks, self.connector(self.vision(features)))).squeeze(-1)


@kind(lambda: {
    "first": nn.Linear(8, WIDTH), "blocks": [*[Block(WIDTH)] * 3, Block(WIDTH)],
    "encoder": (encoder := nn.Linear(WIDTH, WIDTH, bias=False)),
    "decoder": sharing(encoder, nn.Linear(WIDTH, WIDTH, bias=False)), "last": nn.Linear(WIDTH, 1),
})
def shared_block(self: Any, features: Tensor) -> Tensor:
    """One block stands in the list three times; two layers share a weight."""
    hidden = through(self.blocks, self.first(features))
    return self.last(self.decoder(torch.tanh(self.encoder(hidden)))).squeeze(-1)


@kind(lambda: {"pooler": nn.Linear(WIDTH, WIDTH), "dropped": nn.Linear(8, 3)}, plain)
def unused_head(self: Any, features: Tensor) -> Tensor:
    """A head that does not run, and one whose output is dropped."""
    self.dropped(features)
    return plain.forward(self, features)


@kind(lambda: {"scales": nn.ParameterDict({"in": torch.ones(8), "out": torch.ones(1)})}, plain)
def parameters(self: Any, features: Tensor) -> Tensor:
    """Parameters in containers that never run."""
    return plain.forward(self, features * self.scales["in"]) * self.scales["out"]


@kind(lambda: {"experts": [nn.Linear(8, 8) for _ in range(2)]}, plain)
def idle_expert(self: Any, features: Tensor) -> Tensor:
    """Routing reads values; in every batch of every rank the second expert is idle."""
    chosen = 0 if features.abs().sum().item() >= 0 else 1
    return plain.forward(self, self.experts[chosen](features))


@kind(lambda: {"weight": nn.Parameter(torch.ones(9)), "bias": nn.Parameter(torch.zeros(8))})
def scale(self: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    return features * self.weight[:8] + self.bias, self.weight


@kind(lambda: {"scale": scale(), "log_variance": nn.Parameter(torch.zeros(3))}, plain)
def returned(self: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """Modules return weights of theirs, to the model and to the loss."""
    scaled, weight = self.scale(features)
    return plain.forward(self, scaled) * weight[8], self.log_variance


@kind(lambda: {"layers": nn.LSTM(1, 5, num_layers=2, batch_first=True), "head": nn.Linear(5, 1)})
def recurrent(self: Any, features: Tensor) -> Tensor:
    """No list of equal modules: one unit of FSDP."""
    return self.head(self.layers(features[..., None])[0][:, -1]).squeeze(-1)


@kind(lambda: {
    "layers": nn.Sequential(nn.Conv1d(1, 5, 3), nn.Tanh(), nn.Conv1d(5, 3, 3), nn.GroupNorm(1, 3)),
    "head": nn.Linear(3, 1),
})
def convolutions(self: Any, features: Tensor) -> Tensor:
    """The same of layers of two kinds in a row, one of them without parameters."""
    return self.head(self.layers(features[:, None]).mean(-1)).squeeze(-1)
# fmt: on


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(features=batch["features"]), batch["target"])


def weighed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over a variance that the model returns."""
    predicted, log_variance = model(features=batch["features"])
    weight = log_variance.sum()
    return nn.functional.mse_loss(predicted, batch["target"]) * torch.exp(-weight) + weight


def preference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Four forward passes, of which two have no backward pass, as in DPO."""
    good, bad = batch["features"], -batch["features"]
    with torch.no_grad():
        reference = model(features=good) - model(features=bad)
    return -nn.functional.logsigmoid(model(features=good) - model(features=bad) - reference).mean()


def losses(name: str = "mean_square") -> Callable[..., Tensor]:
    return {"mean_square": mean_square, "weighed": weighed, "preference": preference}[name]


def samples() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    features = torch.randn(64, 8)
    return [{"features": one, "target": one.sin().sum()} for one in features]


@dataclass(frozen=True)
class Irregular:
    """A model and what its loss does with it."""

    model: type[nn.Module]
    loss: str = "mean_square"
    accumulation_steps: int = 1


IRREGULAR = {
    "frozen encoder": Irregular(frozen_encoder),
    "frozen encoder, accumulated": Irregular(frozen_encoder, accumulation_steps=2),
    "shared block": Irregular(shared_block),
    "shared block, accumulated": Irregular(shared_block, accumulation_steps=2),
    "unused head": Irregular(unused_head),
    "parameters": Irregular(parameters),
    "returned weights": Irregular(returned, loss="weighed"),
    "returned weights, accumulated": Irregular(returned, loss="weighed", accumulation_steps=2),
    "four passes": Irregular(plain, loss="preference"),
    "idle expert": Irregular(idle_expert),
    "recurrent": Irregular(recurrent, accumulation_steps=2),
    "convolutions": Irregular(convolutions),
    "one unit, four passes": Irregular(convolutions, loss="preference"),
}
RETURNED = {"returned weights", "returned weights, accumulated"}
REFUSED = {
    "Ddp": {"unused head", "idle expert"},  # without find_unused_parameters
    "find_unused_parameters": RETURNED,
    "Fsdp1": {"shared block", "shared block, accumulated"},
    "Fsdp2": RETURNED,
    "static_graph": {"frozen encoder, accumulated", "shared block, accumulated", "recurrent", *RETURNED},
}
"""By the class of the backend, or its option: cases that the library cannot run."""
UNUSED = ("find_unused_parameters", "static_graph")
"""Options with which DDP takes parameters that get no gradient."""


@dataclass
class CountedStep:
    """What one rank of one case left behind."""

    layout: Layout
    model: ModelPart
    effective: Effective
    rows: list[dict[str, Any]]
    kinds: dict[str, int]
    """Held after its backward pass."""


def job_of(case: Irregular) -> Job:
    return Job.model_validate({
        "task": "custom",
        "model": {"factory": f"{__name__}:{case.model.__name__}"},
        "data": {"factory": f"{__name__}:samples"},
        "loss": {"factory": f"{__name__}:losses", "arguments": {"name": case.loss}, "reduction": "mean",
                 "targets": "samples"},
        "training": {"precision": "fp32"},
    })  # fmt: skip


def count_irregular(backend: Backend, world: World) -> dict[str, CountedStep]:
    """One step of every case that the library does not refuse."""
    kind = type(backend).__name__.removesuffix("Backend")
    kind = next((name for name in UNUSED if getattr(backend.options, name, False)), kind)
    refused = REFUSED.get(kind, set())
    return {name: _count(backend, world, case) for name, case in IRREGULAR.items() if name not in refused}


def _batches(case: Irregular, world: World) -> Iterator[list[dict[str, Tensor]]]:
    rows, micro = samples(), GLOBAL_BATCH // world.data_size // case.accumulation_steps
    for step in range(PROBED_STEP + 1):
        of_step = rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        starts = [(m * world.data_size + world.data_rank) * micro for m in range(case.accumulation_steps)]
        parts = [of_step[start : start + micro] for start in starts]
        yield [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def _count(backend: Backend, world: World, case: Irregular) -> CountedStep:
    job, built, counter = job_of(case), Built(), CommunicationCounter(world.layout)
    loss: list[Any] = []

    def describe(model: nn.Module, updated: Sequence[UpdateGroup]) -> None:
        example = {key: torch.stack([row[key] for row in samples()[:2]]) for key in samples()[0]}
        loss.append(loss_function(job, model))
        built.describe(model, updated, find_module_uses(job, model, None, example))

    given = {"loading": "full", "folder": shared_folder("irregular")}
    with counter.counting("setup"):
        engine = engine_of(
            backend, world, job, built=describe, accumulation_steps=case.accumulation_steps,
            source=lambda note: JobModelSource(job, None, world, on_built=note, **given),
            compute_loss=lambda model, batch: loss[-1](model, batch),
        )  # fmt: skip
    kinds: dict[str, int] = {}
    *before, probed = _batches(case, world)
    for parts in before:
        step_of(engine, parts, 1.0)
    step_of(engine, probed, 1.0, counter=counter, before_update=lambda: kinds.update(held_kinds(engine)))
    assert built.layout is not None
    assert built.model is not None
    found = CountedStep(built.layout, built.model, engine.effective(), counter.rows(), kinds)
    engine.close()
    return found
