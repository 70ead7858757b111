"""Dropout of a live model, whatever its job says."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.worker.factories import configuration


def largest_dropout(model: Any) -> float:
    """Largest probability of a dropout module, or of one that the configuration names."""
    modules = [m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    config = configuration(model)
    configured = [
        float(value)
        for key, value in (config.to_dict() if config is not None else {}).items()
        if ("dropout" in key or key.endswith("pdrop"))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ]
    return max([*modules, *configured], default=0.0)
