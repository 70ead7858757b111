"""Describes a model that is built on the meta device: shapes without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.backends.explain import suggestion
from harness.errors import HarnessError
from harness.forms.layout import Layout
from harness.record.workload import layout_of
from harness.spec import OptimizerSection
from harness.spec.model import CODE_SWITCH
from harness.worker.description import describe_geometry, describe_layout
from harness.worker.model_classes import in_fp32
from harness.worker.optimizer import decaying_names


@dataclass(frozen=True, kw_only=True)
class MetaModel:
    """What a configuration builds."""

    architecture: str
    config: dict[str, Any]
    layout: Layout
    multiplying_parameters: int
    layers: int
    attention_width: int


def describe_on_meta(config: Mapping[str, Any], source: str) -> MetaModel:
    """Build the causal language model that transformers makes of a configuration, on the meta device.

    Raises HarnessError for a type that transformers does not know, or that is no dense causal model.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(config)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING and values.get("auto_map"):
        raise HarnessError(
            f"{source}: model_type '{model_type}' needs custom code (auto_map), which does not run for "
            f"--model; give a job with --config that sets model.name and {CODE_SWITCH}: true"
        )
    if model_type not in CONFIG_MAPPING:
        raise HarnessError(
            f"{source}: model_type '{model_type}' is unknown to transformers. "
            f"{suggestion(model_type, list(CONFIG_MAPPING.keys()), most=3) or 'See its list of models'}"
        )
    try:
        built = CONFIG_MAPPING[model_type](**values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(built, trust_remote_code=False, **in_fp32())
    except Exception as error:  # whatever a model's class makes of values that it does not expect
        raise HarnessError(f"{source} cannot be built: {str(error).splitlines()[0]}") from error
    geometry = describe_geometry(model)
    if geometry is None:
        raise HarnessError(
            f"{source} is not covered: no dense decoder whose layers, heads and hidden size are known"
        )
    return MetaModel(
        architecture=type(model).__name__,
        config=built.to_dict(),
        layout=layout_of(describe_layout(model, decaying_names(model, OptimizerSection()))),
        multiplying_parameters=geometry.multiplying_parameters,
        layers=geometry.layers,
        attention_width=geometry.attention_width,
    )
