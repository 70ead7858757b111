"""The model of a plan: its tensors and geometry, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.forms.layout import Layout


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model as its configuration describes it."""

    name: str
    source: str
    """Where the configuration comes from: the catalogue's entry, a folder, a file."""
    architecture: str
    """Class in transformers, such as 'LlamaForCausalLM'."""
    config: Mapping[str, Any]
    """Values of the Hugging Face configuration."""
    layout: Layout
    """Parameters in fp32, as every run builds them."""
    multiplying_parameters: int
    """Parameters that take part in matrix products: all but embedding tables that are only looked up."""
    layers: int
    attention_width: int
    """Heads times head size."""
    whole_because: str | None = None
    """Why every rank builds it whole, whatever `runtime.loading` asks for."""

    @property
    def parameters(self) -> int:
        return self.layout.parameter_count
