"""Writes a model's folder that brings its own classes: a small causal model that transformers lacks."""

from __future__ import annotations

import json
from pathlib import Path

CONFIGURATION = """
from transformers import PreTrainedConfig


class ToyConfig(PreTrainedConfig):
    model_type = "toy_of_a_test"

    def __init__(self, vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=64, **rest):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**rest)
"""

MODELING = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_toy import ToyConfig


class ToyBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ToyForCausalLM(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "model"
    _no_split_modules = ["ToyBlock"]

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ToyBlock(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, use_cache=None, **rest):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(x))
"""


def write_model_with_code(folder: Path) -> Path:
    """The folder, without weights: a job takes `model.weights: random`."""
    folder.mkdir(parents=True)
    (folder / "configuration_toy.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_toy.py").write_text(MODELING, encoding="utf-8")
    document = {
        "model_type": "toy_of_a_test",
        "architectures": ["ToyForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_toy.ToyConfig",
            "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder
