"""Collects the tensors of a model in the order in which transformers registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from harness.forms.layout import Layout, Tensor, elements


@dataclass
class Tensors:
    """A model under construction; all parameters in fp32."""

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    looked_up: list[Tensor] = field(default_factory=list)
    """Embedding tables that take part in no matrix product."""

    def weight(self, name: str, *shape: int) -> Tensor:
        """One parameter."""
        tensor = Tensor(name, shape, "float32")
        self.parameters.append(tensor)
        return tensor

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        """`nn.Linear`."""
        self.weight(f"{name}.weight", outputs, inputs)
        if bias:
            self.weight(f"{name}.bias", outputs)

    def norm(self, name: str, size: int, *, bias: bool) -> None:
        """`nn.LayerNorm`, or without bias an RMS norm."""
        self.weight(f"{name}.weight", size)
        if bias:
            self.weight(f"{name}.bias", size)

    def embedding(self, name: str, rows: int, width: int, *, multiplies: bool = False) -> None:
        """`nn.Embedding`; one that `multiplies` is the output's matrix too."""
        tensor = self.weight(f"{name}.weight", rows, width)
        if not multiplies:
            self.looked_up.append(tensor)

    def buffer(self, name: str, *shape: int, dtype: str = "float32") -> None:
        """One buffer."""
        self.buffers.append(Tensor(name, shape, dtype))

    def repeat(self, prefix: str, count: int, block: Callable[[Tensors], None]) -> None:
        """`count` equal blocks named `prefix`.0, `prefix`.1 and so on."""
        one = Tensors()
        block(one)
        for index in range(count):
            name = f"{prefix}.{index}"
            self.blocks.append(name)
            self.parameters += [Tensor(f"{name}.{t.name}", t.shape, t.dtype) for t in one.parameters]
            self.looked_up += [Tensor(f"{name}.{t.name}", t.shape, t.dtype) for t in one.looked_up]

    def output(self, name: str, tied_to: str, hidden: int, vocabulary: int, *, tied: bool) -> None:
        """The matrix that makes logits: its own, or the embedding's."""
        if tied:
            self.tied[f"{name}.weight"] = f"{tied_to}.weight"
        else:
            self.linear(name, hidden, vocabulary, bias=False)

    @property
    def multiplying(self) -> int:
        """Parameters that are not looked up only."""
        return elements(self.parameters) - elements(self.looked_up)

    def layout(self) -> Layout:
        """As closed forms take it; matrices decay."""
        return Layout(
            parameters=tuple(self.parameters),
            decaying=frozenset(tensor.name for tensor in self.parameters if len(tensor.shape) > 1),
            buffers=tuple(self.buffers),
            blocks=tuple(self.blocks),
            tied=self.tied,
        )
