"""Layouts of real architectures, built without weights."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.forms.layout import Layout
from harness.job.job import OptimizerSection
from harness.rank.models.description import describe_layout
from harness.rank.models.optimizer import update_groups

BLOOM_560M = {
    "model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16,
}  # fmt: skip
BLOOM_SMALL = {"model_type": "bloom", "vocab_size": 259, "hidden_size": 40, "n_layer": 3, "n_head": 4}
LLAMA_SMALL = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 36, "intermediate_size": 52,
    "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": False,
}  # fmt: skip


def layout_of(config: dict[str, Any]) -> Layout:
    """The layout of a model with this configuration."""
    return _layout(tuple(sorted(config.items())))


@cache
def _layout(items: tuple[tuple[str, Any], ...]) -> Layout:
    values = dict(items)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return describe_layout(model, update_groups(model, OptimizerSection()))
