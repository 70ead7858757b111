"""One model type of transformers: the values of a configuration that decide shapes, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import HarnessError
from harness.planning.architectures.tensors import Tensors

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
