"""Dropout of a live model, whatever its job or script says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

OF_HEADS = ("summary_", "classifier_", "cls_")
"""Begin settings of heads that a model may not have; one that it has holds a module."""


def largest_dropout(model: nn.Module) -> float:
    """Largest probability of a dropout that works in training.

    That of a module, one that a module keeps as a number (attention kernels take it), or one that a Hugging
    Face configuration names, at any depth of what wraps the model.
    """
    return max(_probabilities(model), default=0.0)


def _probabilities(model: nn.Module) -> Iterator[float]:
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield float(module.p)
        # Not by getattr: FSDP1 and torch.compile have the attributes of what they wrap.
        own = vars(module)
        yield from _named(own)
        config: Any = own.get("config")
        if hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield from _named(config.to_dict())


def _named(values: Mapping[str, Any]) -> Iterator[float]:
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith(OF_HEADS):
            continue
        if "dropout" in key or key.endswith("pdrop"):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
                yield float(value)
