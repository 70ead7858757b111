"""Models, data and losses of the shapes that people bring: small, and none a model of transformers."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional

from tests.axes.own_optimizer import lion as lion

Batch = dict[str, Tensor]
Compute = Callable[[nn.Module, Batch], Tensor]
FEATURES, CLASSES, LENGTH, WORDS = 7, 5, 9, 23
"""Odd on purpose: nothing divides by the ranks."""


def through(layers: Iterable[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


class Block(nn.Module):
    def __init__(self, width: int, *, statistics: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if statistics else nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.linear(self.norm(hidden)))


class Mlp(nn.Module):
    """`depth` blocks between two layers; each keyword changes the shape in one way.

    survival: share of each block that an evaluation takes.
    """

    def __init__(
        self, width: int = 13, depth: int = 2, shared: int = 1, unused: bool = False, frozen: str = "",
        scalar: bool = False, sides: int = 1, statistics: bool = False, survival: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.survival = nn.Linear(FEATURES, width), survival
        blocks = [Block(width, statistics=statistics) for _ in range(depth)]
        self.blocks = nn.ModuleList([block for one in blocks for block in [one] * shared])
        self.heads = nn.ModuleList([nn.Linear(width, CLASSES) for _ in range(sides)])
        if unused:
            self.pooler = nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.ones(1)) if scalar else None
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            after = block(hidden)
            hidden = after if self.training else hidden + self.survival * (after - hidden)
        logits = sum(head(hidden) for head in self.heads)
        return logits if self.temperature is None else logits * self.temperature


def kind(
    parts: Callable[..., dict[str, Any]] = dict, of: type[nn.Module] = nn.Module
) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Makes a forward pass a kind of model: of these parts, by name, beside those of `of`."""

    def model_of(forward: Callable[..., Any]) -> type[nn.Module]:
        def construct(self: nn.Module, **arguments: Any) -> None:
            of.__init__(self)
            for name, part in parts(**arguments).items():
                setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

        made = {"__init__": construct, "forward": forward, "__module__": forward.__module__}
        return type(forward.__name__, (of,), made)

    return model_of


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def at_rest(module: nn.Module) -> nn.Module:
    """Stays in evaluation mode whatever mode is asked for, as frozen encoders keep their normalisation."""
    module.eval().train = lambda mode=True: module
    return module


def sharing(owner: nn.Module, other: nn.Module) -> nn.Module:
    other.weight = owner.weight
    return other


# fmt: off
def of_images(fixed: bool = False, groups: int = 0) -> dict[str, Any]:
    norm = nn.GroupNorm(groups, 6) if groups else nn.BatchNorm2d(6)
    stem, inner = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
    blocks = [nn.Sequential(inner, at_rest(norm) if fixed else norm, nn.ReLU())]
    return {"stem": stem, "blocks": blocks, "head": nn.Linear(6, CLASSES)}


@kind(of_images)
def convolutions(self: Any, points: Tensor) -> Tensor:
    """fixed: BatchNorm keeps the statistics that it has, as in detectors."""
    hidden = self.stem(points.unflatten(-1, (1, FEATURES, 1)).expand(-1, -1, -1, 3))
    for block in self.blocks:
        hidden = hidden + block(hidden)
    return self.head(hidden.mean((2, 3)))


@kind(lambda kind="LSTM", sparse=False, vocabulary=WORDS: {
    "words": nn.Embedding(vocabulary, 10, padding_idx=0, sparse=sparse),
    "layers": getattr(nn, kind)(10, 11, num_layers=2, batch_first=True), "head": nn.Linear(11, WORDS),
})
def recurrent(self: Any, words: Tensor) -> Tensor:
    return self.head(self.layers(self.words(words))[0])


def of_sentences(tied: bool = True, layers: int = 2) -> dict[str, Any]:
    words, positions = nn.Embedding(WORDS, 12), nn.Parameter(torch.randn(LENGTH, 12) * 0.1)
    made = [nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True) for _ in range(layers)]
    head = nn.Linear(12, WORDS, bias=False)
    head = sharing(words, head) if tied else head
    return {"words": words, "positions": positions, "layers": made, "head": head}


@kind(of_sentences)
def encoder(self: Any, words: Tensor) -> Tensor:
    """torch's own transformer layers, with positions as a parameter of the root and a tied output."""
    return self.head(through(self.layers, self.words(words) + self.positions))


@kind(lambda experts=4, always=False: {
    "always": always, "first": nn.Linear(FEATURES, 8), "router": nn.Linear(8, experts),
    "experts": [Block(8) for _ in range(experts)], "head": nn.Linear(8, CLASSES),
})
def experts(self: Any, points: Tensor) -> Tensor:
    """Each sample goes to one of four experts, chosen by its data; some may idle, or run on no sample."""
    hidden = self.first(points)
    share = self.router(hidden).softmax(-1)
    best, chosen = share.max(-1)
    mixed = torch.zeros_like(hidden)
    for index, expert in enumerate(self.experts):
        rows = (chosen == index).nonzero().flatten()
        if self.always or len(rows):
            mixed = mixed.index_add(0, rows, (expert(hidden[rows]) * best[rows, None]).to(mixed.dtype))
    return self.head(hidden + mixed)


@kind(lambda width=6: {"encoder": nn.Linear(FEATURES, width), "bias": nn.Parameter(torch.zeros(FEATURES))})
def autoencoder(self: Any, points: Tensor) -> Tensor:
    """The decoder reads the encoder's weight, transposed, outside of its module."""
    hidden = torch.tanh(self.encoder(points))
    return functional.linear(hidden, self.encoder.weight.t(), self.bias)


@kind(lambda: {
    "matrices": nn.ParameterDict({n: torch.randn(FEATURES, FEATURES) * 0.3 for n in ("in", "out")}),
    "gains": nn.ParameterList([torch.ones(FEATURES) for _ in range(3)]), "head": nn.Linear(FEATURES, CLASSES),
})
def named(self: Any, points: Tensor) -> Tensor:
    """Parameters in a dictionary and a list, which no module of their own calls."""
    for name in ("in", "out"):
        points = torch.tanh(points @ self.matrices[name])
    for gain in self.gains:
        points = points * gain
    return self.head(points)


def chain(self: Any, points: Tensor) -> Tensor:
    for block in self.blocks:
        points = torch.relu(block(points))
    return self.head(points)


def of_square_layers(norm: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    layers = [norm(nn.Linear(FEATURES, FEATURES)) for _ in range(2)]
    return {"blocks": layers, "head": nn.Linear(FEATURES, CLASSES)}


@kind(lambda: of_square_layers(nn.utils.parametrizations.weight_norm))
def normalised(self: Any, points: Tensor) -> Tensor:
    """Weights that are computed of others, as weight_norm does."""
    return chain(self, points)


@kind(lambda: of_square_layers(nn.utils.parametrizations.spectral_norm))
def spectral(self: Any, points: Tensor) -> Tensor:
    """Each pass moves the vectors by which it divides weights."""
    return chain(self, points)


@kind(lambda: {
    "down": [nn.Linear(a, b) for a, b in pairwise((FEATURES, 11, 5))],
    "up": [nn.Linear(5, 11), nn.Linear(22, FEATURES)], "head": nn.Linear(FEATURES, CLASSES),
})
def unet(self: Any, points: Tensor) -> Tensor:
    wide = torch.relu(self.down[0](points))
    narrow = torch.relu(self.down[1](wide))
    up = torch.cat([torch.relu(self.up[0](narrow)), wide], -1)
    return self.head(torch.relu(self.up[1](up)))


@kind(lambda: {"seen": nn.Buffer(torch.zeros(FEATURES))}, Mlp)
def counting(self: Any, points: Tensor) -> Tensor:
    """Keeps a running mean of its inputs in a buffer, which no loss reads."""
    if self.training:
        self.seen.lerp_(points.detach().mean(0), 0.1)
    return Mlp.forward(self, points)


def copied(first: nn.Module, second: nn.Module) -> nn.Module:
    second.load_state_dict(first.state_dict())
    return frozen(second)


@kind(lambda: {
    "policy": (policy := recurrent(kind="GRU")), "reference": copied(policy, recurrent(kind="GRU")),
})
def preferences(self: Any, words: Tensor, reference: bool) -> Tensor:
    """A policy and its frozen copy: four forward passes a step, as DPO makes."""
    logits = (self.reference if reference else self.policy)(words)[:, :-1]
    return logits.log_softmax(-1).gather(-1, words[:, 1:, None]).sum((1, 2))


@kind(lambda: {
    "first": nn.Linear(FEATURES, 8), "head": nn.Linear(8, CLASSES), "blocks": [Block(8), Block(8)],
})
def toggled(self: Any, points: Tensor) -> Tensor:
    """Two branches, of which the sign of the batch's first value chooses one."""
    hidden = self.first(points)
    return self.head(self.blocks[int(points[0, 0] > 0)](hidden))


@kind(lambda: {
    "first": nn.Linear(1, 6), "blocks": [nn.Linear(12, 6) for _ in range(3)], "head": nn.Linear(6, CLASSES),
})
def graph(self: Any, points: Tensor) -> Tensor:
    """Messages between the features of a sample, as between nodes of a ring."""
    nodes = self.first(points[..., None])
    for block in self.blocks:
        nodes = torch.relu(block(torch.cat([nodes, nodes.roll(1, 1)], -1)))
    return self.head(nodes.mean(1))


class Checkpointed(Mlp):
    """Recomputes its blocks by itself."""

    def __init__(self, reentrant: bool = False, shared: int = 1) -> None:
        super().__init__(shared=shared)
        self.reentrant = reentrant

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.heads[0](hidden)


@kind(lambda: {"left": Mlp(), "right": Mlp(), "scale": nn.Parameter(torch.full((1,), 1.5))})
def towers(self: Any, points: Tensor) -> tuple[Tensor, Tensor]:
    """Two encoders whose outputs a contrastive loss compares, as CLIP does."""
    left, right = self.left(points), self.right(points.flip(-1))
    return self.scale.exp() * functional.normalize(left, dim=-1), functional.normalize(right, dim=-1)


def of_turns() -> dict[str, Any]:
    words, blocks = nn.Embedding(WORDS, 12), [Block(12), Block(12)]
    angles = torch.outer(torch.arange(LENGTH), 0.1 ** torch.arange(6))
    turns = nn.Buffer(torch.polar(torch.ones_like(angles), angles))
    return {"words": words, "blocks": blocks, "turns": turns, "head": nn.Linear(12, WORDS)}


@kind(of_turns)
def rotary(self: Any, words: Tensor) -> Tensor:
    """Turns its embeddings by complex numbers in a buffer, as LLaMA's own code does."""
    pairs = torch.view_as_complex(self.words(words).float().unflatten(-1, (-1, 2)))
    return self.head(through(self.blocks, torch.view_as_real(pairs * self.turns).flatten(-2)))


def turn(self: Any, hidden: Tensor) -> Tensor:
    pairs = torch.view_as_complex(hidden.float().unflatten(-1, (4, 2)))
    return torch.relu(torch.view_as_real(pairs @ self.turns).flatten(-2))


def complex_matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) * 0.3)


@kind(lambda: {"first": nn.Linear(FEATURES, 8), "head": nn.Linear(8, CLASSES), "turns": complex_matrix()})
def turning(self: Any, points: Tensor) -> Tensor:
    """Multiplies by a complex matrix that is trained."""
    return self.head(turn(self, self.first(points)))


Turn = kind(lambda: {"turns": complex_matrix()})(turn)


@kind(lambda: {"first": nn.Linear(FEATURES, 8), "head": nn.Linear(8, CLASSES), "blocks": [Turn(), Turn()]})
def turned(self: Any, points: Tensor) -> Tensor:
    """Complex matrices in blocks that hold nothing else."""
    return self.head(through(self.blocks, self.first(points)))


class Stages(Mlp):
    """Its blocks lie in lists of a list."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.blocks = nn.ModuleList([nn.ModuleList([self.blocks[0]]), nn.ModuleList(self.blocks[1:])])

    def forward(self, points: Tensor) -> Tensor:
        blocks = (block for stage in self.blocks for block in stage)
        return self.heads[0](through(blocks, self.first(points)))


class Exiting(Mlp):
    """Stops at the first block behind which some value of the batch is beyond a limit; says so to nobody."""

    def __init__(self, limit: float, depth: int = 3) -> None:
        super().__init__(depth=depth)
        self.limit = limit

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = block(hidden)
            if hidden.abs().max().item() > self.limit:
                break
        return self.heads[0](hidden)


@kind(lambda always=False: {"always": always}, Mlp)
def repeating(self: Any, points: Tensor) -> Tensor:
    """Its first block runs once or twice, as a value of the batch says; always: twice whatever it says."""
    hidden = self.first(points)
    for _ in range(1 + int(self.always or points[0, 0].item() > 0)):
        hidden = self.blocks[0](hidden)
    return self.heads[0](self.blocks[1](hidden))


@kind(lambda least=0.0: {"gate": nn.Linear(13, 1), "least": least}, Mlp)
def gated(self: Any, points: Tensor) -> Tensor:
    """A block that runs for the samples alone that a gate lets through, if there are any."""
    hidden = self.first(points)
    share = torch.sigmoid(self.gate(hidden))
    rows = (share[:, 0] > self.least).nonzero().flatten()
    if len(rows):
        hidden = hidden.index_add(0, rows, (share[rows] * self.blocks[0](hidden[rows])).to(hidden.dtype))
    return self.heads[0](self.blocks[1](hidden) * share)


@kind(lambda: {"second": nn.Linear(CLASSES, CLASSES)}, Mlp)
def evaluated(self: Any, points: Tensor) -> Tensor:
    """A second head that evaluations alone run."""
    found = Mlp.forward(self, points)
    return found if self.training else found + 0.1 * self.second(found)


@kind(lambda: {"mean": nn.Buffer(torch.zeros(FEATURES)), "scale": nn.Buffer(torch.ones(FEATURES))})
def scaling(self: Any, points: Tensor) -> Tensor:
    """A module that holds buffers alone."""
    return (points - self.mean) / self.scale


def learn(self: Any, points: Tensor) -> Tensor:
    with torch.no_grad():
        known = self.teacher(points)
    return self.student(points) + 0.1 * known


@kind(lambda: {"student": Mlp(), "teacher": frozen(Mlp())})
def taught(self: Any, points: Tensor) -> Tensor:
    """A frozen teacher beside the student, both of which each step runs."""
    return learn(self, points)


@kind(lambda: {
    "student": Mlp(),
    "teacher": frozen(at_rest(
        nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.2), nn.Linear(9, CLASSES))
    )),
})
def resting(self: Any, points: Tensor) -> Tensor:
    """A frozen teacher whose dropout rests."""
    return learn(self, points)


@kind(lambda: {"student": (student := Mlp()), "teacher": copied(student, Mlp())})
def followed(self: Any, points: Tensor) -> Tensor:
    """The teacher follows the student as a moving average, which the forward pass keeps up, as BYOL does."""
    if self.training:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(other.detach(), 0.1)
    return learn(self, points)


@kind(of=Mlp)
def replaced(self: Any, points: Tensor) -> Tensor:
    """Calls a block with weights that it computes."""
    hidden = self.first(points)
    doubled = {name: 2 * value for name, value in self.blocks[0].named_parameters()}
    hidden = torch.func.functional_call(self.blocks[0], doubled, (hidden,))
    return self.heads[0](self.blocks[1](hidden))


@kind(lambda none=False, whole=False: {
    "none": nn.Parameter(torch.ones(0, 3)) if none else None,
    "whole": nn.Parameter(torch.ones(())) if whole else None,
}, Mlp)
def odd(self: Any, points: Tensor) -> Tensor:
    """A parameter without dimension, and one without an element, as asked for."""
    found = Mlp.forward(self, points)
    return found if self.whole is None else found * self.whole


@kind(lambda: {"calls": 0}, Mlp)
def wavering(self: Any, points: Tensor) -> Tensor:
    """Its blocks take another way each time, the recomputation included."""
    def recomputed(hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.blocks[0](hidden) * hidden.exp() if self.calls % 3 else self.blocks[0](hidden)

    hidden = torch.utils.checkpoint.checkpoint(recomputed, self.first(points), use_reentrant=False)
    return self.heads[0](hidden)


@kind(of=Mlp)
def widened(self: Any, points: Tensor) -> Tensor:
    """Computes its last layer's input in fp32, whatever dtype the weights have."""
    return self.heads[0](self.blocks[0](self.first(points)).float())


@kind(lambda: {"norm": at_rest(nn.BatchNorm1d(FEATURES, affine=False))}, Mlp)
def settled(self: Any, points: Tensor) -> Tensor:
    """A normalisation that rests."""
    return Mlp.forward(self, self.norm(points))


class TiedBlocks(Mlp):
    """Two blocks, which are units of their own, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        sharing(self.blocks[0].linear, self.blocks[1].linear)


@kind(lambda: {"first": nn.LazyLinear(8), "head": nn.Linear(8, CLASSES)})
def lazy(self: Any, points: Tensor) -> Tensor:
    """Its first layer takes its size from the first batch."""
    return self.head(torch.relu(self.first(points)))


def of_hooked() -> dict[str, Any]:
    norm: Any = nn.utils.weight_norm
    stem, *blocks = (norm(nn.Conv1d(inputs, 6, 3, padding=1)) for inputs in (1, 6, 6))
    return {"stem": stem, "blocks": blocks, "head": nn.Linear(6, CLASSES)}


@kind(of_hooked)
def oldnorm(self: Any, points: Tensor) -> Tensor:
    """Convolutions whose weights hooks compute before each pass, as `nn.utils.weight_norm` does."""
    hidden = torch.relu(self.stem(points[:, None]))
    for block in self.blocks:
        hidden = hidden + torch.relu(block(hidden))
    return self.head(hidden.mean(-1))


def of_words_and_out() -> dict[str, Any]:
    words, out = nn.Embedding(WORDS, 10), nn.Linear(10, WORDS, bias=False)
    return {"parts": nn.ModuleDict({"words": words, "middle": Block(10), "out": sharing(words, out)})}


@kind(of_words_and_out)
def dictionary(self: Any, words: Tensor) -> Tensor:
    """A weight that two entries of a ModuleDict share."""
    return self.parts["out"](self.parts["middle"](self.parts["words"](words)))


@kind(lambda: {
    "words": nn.Embedding(WORDS, 8), "convolution": nn.Conv1d(8, 10, 3, padding=2),
    "gru": nn.GRU(10, 9, batch_first=True), "head": nn.Linear(9, WORDS),
})
def convolvedgru(self: Any, words: Tensor) -> Tensor:
    hidden = self.convolution(self.words(words).transpose(1, 2))[..., :-2].transpose(1, 2)
    return self.head(self.gru(torch.relu(hidden))[0])


@kind(lambda: {
    "words": nn.Embedding(WORDS, 8, padding_idx=0), "layers": nn.LSTM(8, 9, batch_first=True),
    "head": nn.Linear(9, WORDS),
})
def packed(self: Any, words: Tensor) -> Tensor:
    """Runs over what is no padding only."""
    lengths = (words != 0).sum(1).clamp(min=1).cpu()
    given = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, True, enforce_sorted=False)
    length = words.shape[1]
    out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(given)[0], True, total_length=length)
    return self.head(out)


@kind(lambda: {
    "words": nn.Embedding(WORDS, 12), "norm": nn.RMSNorm(12), "head": nn.Linear(12, WORDS),
    "attention": nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True),
})
def attending(self: Any, words: Tensor) -> Tensor:
    """torch's attention, with a bias that is one more key."""
    hidden = self.words(words)
    later = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool, device=words.device).triu(1)
    found, _ = self.attention(hidden, hidden, hidden, attn_mask=later, need_weights=False)
    return self.head(self.norm(hidden + found))


@kind(lambda: {
    "first": nn.Linear(FEATURES, 12), "weight": nn.Parameter(torch.randn(7, 2) * 0.3),
    "blocks": [Block(12)], "head": nn.Linear(12, CLASSES),
})
def fourier(self: Any, points: Tensor) -> Tensor:
    """Multiplies frequencies by complex numbers that are kept as pairs."""
    frequencies = torch.fft.rfft(self.first(points).float())
    hidden = torch.fft.irfft(frequencies * torch.view_as_complex(self.weight.float()), n=12)
    return self.head(through(self.blocks, hidden))


@kind(lambda: {
    "first": nn.Linear(FEATURES, 8), "router": nn.Linear(8, 3),
    "experts": [Block(8) for _ in range(3)], "head": nn.Linear(8, CLASSES),
})
def switch(self: Any, points: Tensor) -> Tensor:
    """Each sample goes to its best expert; every expert runs on all samples, masked."""
    hidden = self.first(points)
    share = self.router(hidden).softmax(-1)
    gates = share * functional.one_hot(share.argmax(-1), 3).to(share.dtype)
    mixed = [gate[:, None] * one(hidden) for gate, one in zip(gates.unbind(-1), self.experts, strict=True)]
    return self.head(hidden + sum(mixed))


@kind(of=Mlp)
def depth(self: Any, points: Tensor) -> Tensor:
    """Stochastic depth that each sample's own numbers draw; evaluations scale blocks instead."""
    hidden = self.first(points)
    stays = ((points[:, :1] * 1000).long() % 5 > 0).to(hidden.dtype)
    for block in self.blocks:
        hidden = hidden + (block(hidden) - hidden) * (stays if self.training else 0.8)
    return self.heads[0](hidden)


class LowRank(nn.Module):
    """An adapter of one's own: a frozen layer and two thin ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.up = frozen(nn.Linear(inputs, outputs)), nn.Linear(2, outputs, bias=False)
        self.down = nn.Linear(inputs, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


@kind(lambda: {"blocks": [LowRank(FEATURES, FEATURES) for _ in range(3)], "head": LowRank(FEATURES, CLASSES)})
def adapters(self: Any, points: Tensor) -> Tensor:
    return chain(self, points)


@kind(lambda: {
    "first": nn.Linear(FEATURES, 9), "blocks": [Block(9), Block(9)], "classes": nn.Linear(9, CLASSES),
    "points": nn.Linear(9, FEATURES), "weights": nn.Parameter(torch.zeros(2)),
})
def tasks(self: Any, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two tasks with the weights of their losses."""
    hidden = through(self.blocks, self.first(points))
    return self.classes(hidden), self.points(hidden), self.weights


@kind(of=Mlp)
def clamped(self: Any, points: Tensor) -> Tensor:
    """Keeps weights within bounds before each training pass, as critics of GANs do."""
    if self.training:
        with torch.no_grad():
            for parameter in self.heads.parameters():
                parameter.clamp_(-0.2, 0.2)
    return Mlp.forward(self, points)


@kind(lambda: {
    "words": nn.Embedding(WORDS, 10, max_norm=1.0), "head": nn.Linear(10, WORDS), "blocks": [Block(10)],
})
def renormed(self: Any, words: Tensor) -> Tensor:
    """An embedding whose passes shorten the rows that they read."""
    return self.head(through(self.blocks, self.words(words)))


OTHERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp, "checkpointed": Checkpointed, "stages": Stages, "exiting": Exiting, "tied": TiedBlocks,
    "scaled": lambda: nn.Sequential(scaling(), nn.Linear(FEATURES, 9), nn.ReLU(), nn.Linear(9, CLASSES)),
    "linear": lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)),
    "prelu": lambda: nn.Sequential(nn.Linear(FEATURES, 9), nn.PReLU(), nn.Linear(9, CLASSES)),
}
# fmt: on


def model(kind: str = "mlp", **arguments: Any) -> nn.Module:
    return (OTHERS.get(kind) or globals()[kind])(**arguments)


def points(count: int = 96) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(count, FEATURES, generator=generator)
    return [{"points": p, "class_of": (p[:2] > 0).long().sum() + 2 * (p[2] > 1).long()} for p in made]


def sentences(count: int = 96, padded: bool = False) -> list[Batch]:
    """Words and the labels of each, with padding of different lengths."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    found = []
    for index, words in enumerate(made):
        length = 2 + index % (LENGTH - 2) if padded else LENGTH
        words[length:] = 0
        labels = words.roll(-1)
        labels[length - 1 :] = -100
        found.append({"words": words, "labels": labels, "worse": words.flip(0)})
    return found


def loss(compute: Callable[..., Tensor]) -> Callable[..., Compute]:
    """Makes a factory of a loss, which takes the arguments beside the model and its batch."""
    return lambda **arguments: lambda model, batch: compute(model, batch, **arguments)


@loss
def of_classes(model: nn.Module, batch: Batch, smoothing: float = 0.0, auxiliary: float = 0.0) -> Tensor:
    """auxiliary: weight of a second term, the mean square of the logits."""
    logits = model(batch["points"])
    loss = functional.cross_entropy(logits, batch["class_of"], label_smoothing=smoothing)
    return loss + auxiliary * logits.square().mean()


def of_points(kind: str = "mse_loss") -> Compute:
    """Of an output that should equal the input."""
    return lambda model, batch: getattr(functional, kind)(model(batch["points"]), batch["points"])


@loss
def of_words(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over labels that are not padding."""
    logits = model(batch["words"]).flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


@loss
def of_preferences(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        known = [model(words, True) for words in (batch["words"], batch["worse"])]
    better, worse = (model(words, False) for words in (batch["words"], batch["worse"]))
    return -functional.logsigmoid(better - worse - known[0] + known[1]).mean()


@loss
def of_pairs(model: nn.Module, batch: Batch, gathered: bool = False, with_gradient: bool = True) -> Tensor:
    """Each sample among all others of the batch, both ways; gathered: of the step, wherever they are."""
    sides = list(model(batch["points"]))
    if gathered and dist.is_initialized() and dist.get_world_size() > 1:
        for index, side in enumerate(sides):
            parts = [torch.zeros_like(side) for _ in range(dist.get_world_size())]
            if with_gradient:
                parts = list(all_gather(side))
            else:
                dist.all_gather(parts, side.detach())
                parts[dist.get_rank()] = side
            sides[index] = torch.cat(parts)
    logits = sides[0] @ sides[1].T
    own = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2


@loss
def of_weighted(model: nn.Module, batch: Batch) -> Tensor:
    """A mean by weights of the classes, which a batch holds in other shares than its parts."""
    logits = model(batch["points"])
    weight = 2.0 ** torch.arange(CLASSES).to(logits)
    return functional.cross_entropy(logits, batch["class_of"], weight=weight)


@loss
def of_mixed(model: nn.Module, batch: Batch, random: bool = False) -> Tensor:
    """Each sample mixed with another one of the batch."""
    share = float(torch.rand(())) if random else 0.7
    points, classes = batch["points"], batch["class_of"]
    logits = model(share * points + (1 - share) * points.flip(0))
    mixed = functional.cross_entropy(logits, classes), functional.cross_entropy(logits, classes.flip(0))
    return share * mixed[0] + (1 - share) * mixed[1]


@loss
def of_slopes(model: nn.Module, batch: Batch) -> Tensor:
    """With a penalty on the gradient of the output with respect to the input, as WGAN-GP has it."""
    given = batch["points"].requires_grad_()
    logits = model(given)
    (slope,) = torch.autograd.grad(logits.sum(), given, create_graph=True)
    return functional.cross_entropy(logits, batch["class_of"]) + (slope.norm(dim=-1) - 1).square().mean()


@loss
def twice(model: nn.Module, batch: Batch) -> Tensor:
    """The same model on two views of a sample, and their distance."""
    views = [model(batch["points"]), model(batch["points"].flip(-1))]
    loss = sum(functional.cross_entropy(view, batch["class_of"]) for view in views)
    return loss + functional.mse_loss(*views)


@loss
def of_lengths(model: nn.Module, batch: Batch) -> Tensor:
    """With an L2 penalty that the loss computes of the weights."""
    loss = functional.cross_entropy(model(batch["points"]), batch["class_of"])
    return loss + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())


@loss
def of_scores(model: nn.Module, batch: Batch, name: str = "heads.0.bias") -> Tensor:
    """Reads a weight of the model beside the other figures, outside of its module."""
    weight = next(p for full, p in model.named_parameters() if full.endswith(name))
    return functional.cross_entropy(model(batch["points"]) * torch.sigmoid(weight), batch["class_of"])


@loss
def of_similar(model: nn.Module, batch: Batch) -> Tensor:
    """Looks words up in the model's embedding, outside of its module."""
    table = next(p for name, p in model.named_parameters() if name.endswith("words.weight"))
    return of_words()(model, batch) + functional.embedding(batch["words"], table).square().sum()


def of_history() -> Compute:
    """Adds a part of the loss before, whose graph is gone."""
    last: list[Tensor] = []

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        loss = functional.cross_entropy(model(batch["points"]), batch["class_of"])
        before, last[:] = [0.1 * one for one in last], [loss]
        return sum(before, start=loss)

    return compute


def of_first() -> Compute:
    """Calls a layer of the model, and not the model."""
    return lambda model, batch: model.first(batch["points"]).square().mean()


@loss
def of_tasks(model: nn.Module, batch: Batch) -> Tensor:
    """Both, each over the exponential of its weight."""
    logits, points, weights = model(batch["points"])
    losses = (
        functional.cross_entropy(logits, batch["class_of"]),
        functional.mse_loss(points, batch["points"]),
    )
    return sum(torch.exp(-w) * loss + w for w, loss in zip(weights, losses, strict=True))


@loss
def of_triplets(model: nn.Module, batch: Batch) -> Tensor:
    """The farthest sample of the same class against the nearest of another."""
    found = functional.normalize(model(batch["points"]).float(), dim=-1)
    apart, same = torch.cdist(found, found), batch["class_of"][:, None] == batch["class_of"]
    nearest = apart.masked_fill(same, 10.0).min(1).values
    return functional.relu((apart * same).max(1).values - nearest + 0.5).mean()


@loss
def of_most(model: nn.Module, batch: Batch) -> Tensor:
    """The mean without the hardest sample of a batch."""
    losses = functional.cross_entropy(model(batch["points"]), batch["class_of"], reduction="none")
    return losses.sort().values[:-1].mean()


@loss
def of_scores_slopes(model: nn.Module, batch: Batch) -> Tensor:
    """With the squared gradient of the score with respect to inputs, as R1 has it."""
    given = batch["points"].detach().requires_grad_()
    logits = model(given)
    (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), given, create_graph=True)
    loss = functional.cross_entropy(logits, batch["class_of"])
    return loss + 0.5 * slope.square().sum(-1).mean()


def adafactor(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """Means of rows and columns: of a flat part it has none."""
    return torch.optim.Adafactor(groups)
