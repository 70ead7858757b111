"""More models and losses of the shapes that people bring, small as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import CLASSES, FEATURES, WORDS, Batch, Block, Compute, Mlp
from .models import of_classes as of_classes
from .models import of_words as of_words
from .models import points as points
from .models import sentences as sentences


class OldNorm(nn.Module):
    """Convolutions whose weights hooks compute before each pass, as `nn.utils.weight_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        norm: Any = nn.utils.weight_norm
        self.stem = norm(nn.Conv1d(1, 6, 3, padding=1))
        self.blocks = nn.ModuleList([norm(nn.Conv1d(6, 6, 3, padding=1)) for _ in range(2)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(points[:, None]))
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.head(hidden.mean(-1))


class Spectral(nn.Module):
    """Each pass moves the vectors by which it divides weights."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.blocks = nn.ModuleList([norm(nn.Linear(FEATURES, FEATURES)) for _ in range(2)])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        for block in self.blocks:
            points = torch.relu(block(points))
        return self.head(points)


class Dictionary(nn.Module):
    """A weight that two entries of a ModuleDict share."""

    def __init__(self) -> None:
        super().__init__()
        words, out = nn.Embedding(WORDS, 10), nn.Linear(10, WORDS, bias=False)
        self.parts = nn.ModuleDict({"words": words, "middle": Block(10), "out": out})
        out.weight = words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.parts["out"](self.parts["middle"](self.parts["words"](words)))


class ConvolvedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.convolution = nn.Embedding(WORDS, 8), nn.Conv1d(8, 10, 3, padding=2)
        self.gru, self.head = nn.GRU(10, 9, batch_first=True), nn.Linear(9, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.convolution(self.words(words).transpose(1, 2))[..., :-2].transpose(1, 2)
        return self.head(self.gru(torch.relu(hidden))[0])


class Packed(nn.Module):
    """Runs over what is no padding only."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.layers, self.head = nn.LSTM(8, 9, batch_first=True), nn.Linear(9, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        lengths = (words != 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, True, enforce_sorted=False)
        length = words.shape[1]
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], True, total_length=length)
        return self.head(out)


class Attending(nn.Module):
    """torch's attention, with a bias that is one more key."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, 12), nn.RMSNorm(12), nn.Linear(12, WORDS)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        later = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool, device=words.device).triu(1)
        found, _ = self.attention(hidden, hidden, hidden, attn_mask=later, need_weights=False)
        return self.head(self.norm(hidden + found))


class Fourier(nn.Module):
    """Multiplies frequencies by complex numbers that are kept as pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(FEATURES, 12), nn.Parameter(torch.randn(7, 2) * 0.3)
        self.blocks, self.head = nn.ModuleList([Block(12)]), nn.Linear(12, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.first(points).float())
        hidden = torch.fft.irfft(frequencies * torch.view_as_complex(self.weight.float()), n=12)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Resting(nn.Module):
    """A frozen teacher whose dropout rests: it is kept in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.2), nn.Linear(9, CLASSES))
        self.teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> Resting:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, points: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(points)
        return self.student(points) + 0.1 * taught


class Switch(nn.Module):
    """Each sample goes to its best expert; every expert runs on all samples, masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(FEATURES, 8), nn.Linear(8, 3)
        self.experts, self.head = nn.ModuleList([Block(8) for _ in range(3)]), nn.Linear(8, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        share = self.router(hidden).softmax(-1)
        gates = share * functional.one_hot(share.argmax(-1), 3).to(share.dtype)
        mixed = [
            gate[:, None] * one(hidden) for gate, one in zip(gates.unbind(-1), self.experts, strict=True)
        ]
        return self.head(hidden + sum(mixed))


class SampledDepth(Mlp):
    """Stochastic depth that each sample's own numbers draw; evaluations scale blocks instead."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        stays = ((points[:, :1] * 1000).long() % 5 > 0).to(hidden.dtype)
        for block in self.blocks:
            hidden = hidden + (block(hidden) - hidden) * (stays if self.training else 0.8)
        return self.heads[0](hidden)


class LowRank(nn.Module):
    """An adapter of one's own: a frozen layer and two thin ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.up = nn.Linear(inputs, outputs), nn.Linear(2, outputs, bias=False)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class OwnAdapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LowRank(FEATURES, FEATURES) for _ in range(3)])
        self.head = LowRank(FEATURES, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        for block in self.blocks:
            points = torch.relu(block(points))
        return self.head(points)


class Tasks(nn.Module):
    """Two tasks with the weights of their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(FEATURES, 9), nn.ModuleList([Block(9), Block(9)])
        self.classes, self.points = nn.Linear(9, CLASSES), nn.Linear(9, FEATURES)
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.classes(hidden), self.points(hidden), self.weights


class Clamped(Mlp):
    """Keeps weights within bounds before each training pass, as critics of GANs do."""

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for parameter in self.heads.parameters():
                    parameter.clamp_(-0.2, 0.2)
        return super().forward(points)


class Renormed(nn.Module):
    """An embedding whose passes shorten the rows that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 10, max_norm=1.0), nn.Linear(10, WORDS)
        self.blocks = nn.ModuleList([Block(10)])

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Codebook(nn.Module):
    """Nearest codes of a buffer that follows what was near them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, points: Tensor) -> Tensor:
        found = self.encoder(points).float()
        nearest = torch.cdist(found, self.codes).argmin(-1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, 0.05 * (found.detach() - code))
        return self.decoder(found + (code - found).detach())


MODELS: dict[str, Callable[..., nn.Module]] = {
    "oldnorm": OldNorm, "spectral": Spectral, "dictionary": Dictionary, "convolvedgru": ConvolvedGru,
    "packed": Packed, "attending": Attending, "fourier": Fourier, "resting": Resting, "switch": Switch,
    "depth": SampledDepth, "adapters": OwnAdapters, "tasks": Tasks,
    "clamped": Clamped, "renormed": Renormed, "codebook": Codebook, "mlp": Mlp,
}  # fmt: skip


def model(kind: str) -> nn.Module:
    return MODELS[kind]()


def of_tasks() -> Compute:
    """Both, each over the exponential of its weight."""

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        logits, points, weights = model(batch["points"])
        losses = (
            functional.cross_entropy(logits, batch["class_of"]),
            functional.mse_loss(points, batch["points"]),
        )
        return sum(torch.exp(-w) * loss + w for w, loss in zip(weights, losses, strict=True))

    return compute


def of_triplets() -> Compute:
    """The farthest sample of the same class against the nearest of another."""

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        found = functional.normalize(model(batch["points"]).float(), dim=-1)
        apart, same = torch.cdist(found, found), batch["class_of"][:, None] == batch["class_of"]
        nearest = apart.masked_fill(same, 10.0).min(1).values
        return functional.relu((apart * same).max(1).values - nearest + 0.5).mean()

    return compute


def of_most() -> Compute:
    """The mean without the hardest sample of a batch."""

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(model(batch["points"]), batch["class_of"], reduction="none")
        return losses.sort().values[:-1].mean()

    return compute


def of_scores_slopes() -> Compute:
    """With the squared gradient of the score with respect to inputs, as R1 has it."""

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        given = batch["points"].detach().requires_grad_()
        logits = model(given)
        (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), given, create_graph=True)
        loss = functional.cross_entropy(logits, batch["class_of"])
        return loss + 0.5 * slope.square().sum(-1).mean()

    return compute
