"""The engine that reads a DeepSpeed engine as a script set it up."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from harness.backends.base import Engine, SetupContext
from harness.backends.zero_engine import ZeroEngine


def zero(engine: Any, context: SetupContext) -> tuple[Engine, str | None]:
    """The engine that reads it, and the built-in backend of the same stage."""
    stage = int(engine.zero_optimization_stage())
    config = json.loads(json.dumps(engine._config._param_dict, default=str))
    return ZeroEngine(engine, context, config, stage, count_of(engine.module)), f"zero{stage}"


def count_of(module: nn.Module) -> int:
    """Parameters of the whole model; stage 3 leaves pieces of them in place."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
