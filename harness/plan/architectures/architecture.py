"""One model type of transformers: the values of a configuration that decide shapes, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import HarnessError
from harness.forms.model.layout import Layout, Tensor, elements


@dataclass
class Tensors:
    """A model under construction; all parameters in fp32."""

    parameters: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    looked_up: list[Tensor] = field(default_factory=list)
    """Embedding tables that take part in no matrix product."""
    idle: int = 0
    """Parameters of experts that a token does not pass."""

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

    def experts(self, name: str, rows: int, columns: int, *, experts: int, active: int) -> None:
        """A weight of each expert, of which a token passes the `active` ones."""
        tensor = self.weight(name, experts, rows, columns)
        self.idle += tensor.numel * (experts - active) // experts

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
        self.idle += count * one.idle

    def output(self, name: str, tied_to: str, hidden: int, vocabulary: int, *, tied: bool) -> None:
        """The matrix that makes logits: its own, or the embedding's."""
        if tied:
            self.tied[f"{name}.weight"] = f"{tied_to}.weight"
        else:
            self.linear(name, hidden, vocabulary, bias=False)

    @property
    def multiplying(self) -> int:
        """Parameters that a token is multiplied with: not those that are looked up only, or idle."""
        return elements(self.parameters) - elements(self.looked_up) - self.idle

    def layout(self) -> Layout:
        """As closed forms take it; matrices decay."""
        return Layout(
            parameters=tuple(self.parameters),
            decaying=frozenset(tensor.name for tensor in self.parameters if len(tensor.shape) > 1),
            buffers=tuple(self.buffers),
            blocks=tuple(self.blocks),
            tied=self.tied,
        )


Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers 5 in closed form; a test compares each with the class on the meta device."""

    model_type: str
    class_name: str
    """Class in transformers, such as 'LlamaForCausalLM'."""
    build: Callable[[Values, Tensors], None]
    """Adds the tensors, in the order in which the class registers them."""
    required: Mapping[str, Any]
    """Values that a configuration must give -> what transformers takes in their absence."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Values that decide shapes too -> what transformers takes in their absence."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spelling that transformers accepts -> the name used here."""
    causal: bool = True
    """Whether it is a causal language model, which alone the harness trains."""

    def values(self, config: Values, *, given_whole: bool, where: str) -> dict[str, Any]:
        """The configuration under the names used here, with what transformers fills in.

        given_whole: False takes transformers' defaults for required values too, as for `model.config` of
        a job. `where` names the configuration in the message. Raises HarnessError for a missing value or
        one that is no positive whole number.
        """
        named = {self.aliases.get(key, key): value for key, value in config.items()}
        values = {**self.optional, **named}
        for key, default in self.optional.items():
            if named.get(key) is None and default is not None:
                values[key] = default
        for key, default in self.required.items():
            if named.get(key) is None:
                if given_whole:
                    raise HarnessError(
                        f"{where} lacks '{self._spellings(key)}', which a {self.model_type} needs"
                    )
                values[key] = default
            if not isinstance(values[key], int) or isinstance(values[key], bool) or values[key] < 1:
                raise HarnessError(
                    f"{where}: '{key}' was given {values[key]!r}; it must be a whole number of at least 1"
                )
        return values

    def _spellings(self, key: str) -> str:
        return "' or '".join((key, *(alias for alias, name in self.aliases.items() if name == key)))
