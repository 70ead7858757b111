"""Jobs of the user's own whose losses are no sums over samples, and one whose loss is."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

Compute = Callable[[nn.Module, dict[str, Tensor]], Tensor]
WIDTH = 16


class Block(nn.Module):
    def __init__(self, *, statistics: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.linear(self.norm(hidden)))


class Towers(nn.Module):
    """Two encoders of which a contrastive loss compares the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        encoded = (self.blocks[0](self.first(left)), self.blocks[1](self.second(right)))
        return functional.normalize(encoded[0], dim=-1), functional.normalize(encoded[1], dim=-1)


class Classifier(nn.Module):
    def __init__(
        self, *, statistics: bool = False, pooler: bool = False, frozen: bool = False, survival: float = 1.0
    ) -> None:
        super().__init__()
        self.survival = survival
        if pooler:
            self.pooler = nn.Linear(WIDTH, WIDTH)
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([Block(statistics=statistics), Block(statistics=statistics)])
        self.first.requires_grad_(not frozen)

    def forward(self, left: Tensor) -> Tensor:
        hidden = self.first(left)
        for block in self.blocks:
            after = block(hidden)
            hidden = after if self.training else hidden + self.survival * (after - hidden)
        return self.head(hidden)


def towers() -> nn.Module:
    return Towers()


def classifier(
    statistics: bool = False, pooler: bool = False, frozen: bool = False, survival: float = 1.0
) -> nn.Module:
    """pooler: with a layer that the loss does not use; frozen: whose first layer is not trained; survival:
    share of each block that an evaluation takes."""
    return Classifier(statistics=statistics, pooler=pooler, frozen=frozen, survival=survival)


def samples(count: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(count, 8, generator=generator)
    return [{"left": p, "right": p.flip(0), "class_of": (p[0] > 0).long() + 2 * (p[1] > 0)} for p in points]


def contrastive() -> Compute:
    """Each sample among all others of the batch."""

    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        left, right = model(batch["left"], batch["right"])
        return functional.cross_entropy(4 * left @ right.T, torch.arange(len(left), device=left.device))

    return compute


def gathered(with_gradient: bool = True) -> Compute:
    """Each sample among all others of the step, wherever they are."""

    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        sides = list(model(batch["left"], batch["right"]))
        if dist.is_initialized() and dist.get_world_size() > 1:
            for index, own in enumerate(sides):
                parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
                if with_gradient:
                    parts = list(all_gather(own))
                else:
                    dist.all_gather(parts, own.detach())
                    parts[dist.get_rank()] = own
                sides[index] = torch.cat(parts)
        logits = 4 * sides[0] @ sides[1].T
        return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    return compute


def mean() -> Compute:
    return lambda model, batch: functional.cross_entropy(model(batch["left"]), batch["class_of"])


def weighted() -> Compute:
    """A mean by weights of the classes, which a batch holds in other shares than its parts."""
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0])

    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["left"])
        return functional.cross_entropy(logits, batch["class_of"], weight=weight.to(logits))

    return compute


def mixup(random: bool = False) -> Compute:
    """Each sample mixed with another one of the batch."""

    def compute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        share = float(torch.rand(())) if random else 0.7
        points, classes = batch["left"], batch["class_of"]
        logits = model(share * points + (1 - share) * points.flip(0))
        mixed = functional.cross_entropy(logits, classes), functional.cross_entropy(logits, classes.flip(0))
        return share * mixed[0] + (1 - share) * mixed[1]

    return compute


def settings_of(loss: str, model: str = "classifier", **arguments: object) -> tuple[str, ...]:
    """A job of these factories; arguments of the model, or `loss_...` of the loss."""
    module, of_loss = __name__, {}
    for name in [name for name in arguments if name.startswith("loss_")]:
        of_loss[name.removeprefix("loss_")] = arguments.pop(name)
    return (
        "task=custom", f"model.factory={module}:{model}", f"data.factory={module}:samples",
        f"loss.factory={module}:{loss}", "loss.reduction=mean", "loss.targets=samples",
        *(f"model.arguments.{name}={str(value).lower()}" for name, value in arguments.items()),
        *(f"loss.arguments.{name}={str(value).lower()}" for name, value in of_loss.items()),
    )  # fmt: skip
