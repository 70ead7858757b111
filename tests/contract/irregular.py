"""On real ranks: steps of models whose modules do not each run once, with a backward pass."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import Backend, SetupContext, World
from harness.job.job import Job, UpdateGroup
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.description import Built, find_module_uses
from harness.rank.models.losses import loss_function
from harness.rank.models.optimizer import build_optimizer, frozen_names, update_groups
from harness.rank.probes.communication import CommunicationCounter
from tests.contract.cases import GLOBAL_BATCH, PROBED_STEP, shared_folder
from tests.contract.deeds import Counted, held_kinds
from tests.sweep.models import Block, through

WIDTH = 32


class FrozenEncoder(nn.Module):
    """The backward pass ends at the connector."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(8, WIDTH), Block(WIDTH), Block(WIDTH))
        self.connector = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.vision.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(through(self.blocks, self.connector(self.vision(features)))).squeeze(-1)


class SharedBlock(nn.Module):
    """One block stands in the list three times; two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, block = nn.Linear(8, WIDTH), Block(WIDTH)
        self.blocks = nn.ModuleList([block, block, block, Block(WIDTH)])
        self.encoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder.weight = self.encoder.weight
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = through(self.blocks, self.first(features))
        return self.last(self.decoder(torch.tanh(self.encoder(hidden)))).squeeze(-1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(through(self.blocks, self.first(features))).squeeze(-1)


class UnusedHead(Plain):
    """A head that does not run, and one whose output is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler, self.dropped = nn.Linear(WIDTH, WIDTH), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        self.dropped(features)
        return super().forward(features)


class Parameters(Plain):
    """Parameters in containers that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict(
            {"in": nn.Parameter(torch.ones(8)), "out": nn.Parameter(torch.ones(1))}
        )

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features * self.scales["in"]) * self.scales["out"]


class IdleExpert(Plain):
    """Routing reads values; in every batch of every rank the second expert is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        chosen = 0 if features.abs().sum().item() >= 0 else 1
        return super().forward(self.experts[chosen](features))


class Returned(Plain):
    """Modules return weights of theirs, to the model and to the loss."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(9)), nn.Parameter(torch.zeros(8))

        def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
            return features * self.weight[:8] + self.bias, self.weight

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.log_variance = self.Scale(), nn.Parameter(torch.zeros(3))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        scaled, weight = self.scale(features)
        return super().forward(scaled) * weight[8], self.log_variance


class Recurrent(nn.Module):
    """No list of equal modules: one unit of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.layers(features[..., None])[0][:, -1]).squeeze(-1)


class Convolutions(nn.Module):
    """The same of layers of two kinds in a row, one of them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 5, 3), nn.Tanh(), nn.Conv1d(5, 3, 3), nn.GroupNorm(1, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.layers(features[:, None]).mean(-1)).squeeze(-1)


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
    "frozen encoder": Irregular(FrozenEncoder),
    "frozen encoder, accumulated": Irregular(FrozenEncoder, accumulation_steps=2),
    "shared block": Irregular(SharedBlock),
    "shared block, accumulated": Irregular(SharedBlock, accumulation_steps=2),
    "unused head": Irregular(UnusedHead),
    "parameters": Irregular(Parameters),
    "returned weights": Irregular(Returned, loss="weighed"),
    "returned weights, accumulated": Irregular(Returned, loss="weighed", accumulation_steps=2),
    "four passes": Irregular(Plain, loss="preference"),
    "idle expert": Irregular(IdleExpert),
    "recurrent": Irregular(Recurrent, accumulation_steps=2),
    "convolutions": Irregular(Convolutions),
    "one unit, four passes": Irregular(Convolutions, loss="preference"),
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
class CountedStep(Counted):
    """And what the rank held after its backward pass."""

    kinds: dict[str, int]


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
    updated: list[tuple[UpdateGroup, ...]] = []
    frozen: list[frozenset[str]] = []
    loss: list[Any] = []

    def note(model: nn.Module) -> None:
        example = {key: torch.stack([row[key] for row in samples()[:2]]) for key in samples()[0]}
        updated.append(update_groups(model, job.optimizer))
        frozen.append(frozen_names(model))
        loss.append(loss_function(job, model))
        built.describe(model, updated[-1], find_module_uses(job, model, None, example))

    folder = shared_folder("irregular")
    source = JobModelSource(job, None, world, loading="full", folder=folder, on_built=note)
    context = SetupContext(
        world=world, precision="fp32", gradient_clipping=None, preset="like-for-like",
        micro_batch_size=GLOBAL_BATCH // world.data_size // case.accumulation_steps,
        accumulation_steps=case.accumulation_steps, compute_loss=lambda model, batch: loss[-1](model, batch),
    )  # fmt: skip
    with counter.counting("setup"):
        engine = backend.prepare(
            source, lambda named: build_optimizer(named, job.optimizer, updated[-1], frozen[-1]), context
        )
    engine.train(True)
    kinds: dict[str, int] | None = None
    for step, parts in enumerate(_batches(case, world)):
        probed = step == PROBED_STEP
        if probed:
            counter.start()
        for index, batch in enumerate(parts):
            counter.phase = "forward"
            value = engine.forward(batch)
            counter.phase = "backward"
            engine.backward(value, last_micro_step=index == case.accumulation_steps - 1)
        if probed:
            kinds = held_kinds(engine)
        counter.phase = "step"
        engine.step(1e-3)
        if probed:
            counter.stop()
    assert built.layout is not None
    assert built.model is not None
    assert kinds is not None
    found = CountedStep(built.layout, built.model, engine.effective(), counter.rows(), kinds)
    engine.close()
    return found
