"""Closed forms of architectures against the models that transformers builds on the meta device."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from harness.job.job import OptimizerSection
from harness.plan.architectures import ARCHITECTURES
from harness.plan.model import PlannedModel
from harness.plan.models import catalogue_names, find_entry, from_config, load_model
from harness.rank.models.description import describe_geometry, describe_layout, is_decoder
from harness.rank.models.optimizer import update_groups
from harness.record import GeometryPart

pytestmark = pytest.mark.long(seconds=10)
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 2},
    {"model_type": "mistral", "tie_word_embeddings": True, "num_key_value_heads": 2},
    {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": 2},
    {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2},
    {"model_type": "phi", "qk_layernorm": True},
    {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0},
    {"model_type": "stablelm", "use_qkv_bias": True, "use_parallel_residual": True},
    {"model_type": "falcon", "ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    {"model_type": "gpt2", "n_inner": 100, "tie_word_embeddings": False},
    {"model_type": "gpt_bigcode", "multi_query": False},
    {"model_type": "opt", "enable_bias": False, "word_embed_proj_dim": 32},
    {"model_type": "falcon", "parallel_attn": False, "bias": True, "multi_query": False},
    {"model_type": "falcon", "num_ln_in_parallel_attn": 1, "new_decoder_architecture": True},
    {"model_type": "gpt_neox", "attention_bias": False, "rotary_pct": 0.5},
    {"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1},
]  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "d_model": 64, "n_embd": 64, "intermediate_size": 96, "ffn_dim": 96,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "num_heads": 4, "d_ff": 96, "d_kv": 16, "n_positions": 32, "max_position_embeddings": 32,
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def built(config: Mapping[str, Any]) -> Any:
    """The model that transformers makes of a configuration."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BertModel, T5ForConditionalGeneration

    values = dict(config)
    model_type = values.pop("model_type")
    of_type = {"bert": BertModel, "t5": T5ForConditionalGeneration}.get(model_type)
    with torch.device("meta"):
        settings = CONFIG_MAPPING[model_type](**values)
        return of_type(settings) if of_type else AutoModelForCausalLM.from_config(settings)


def assert_equal(planned: PlannedModel, model: Any) -> None:
    layout = describe_layout(model, update_groups(model, OptimizerSection()))
    ours, geometry = planned.layout, describe_geometry(model)
    assert planned.architecture == type(model).__name__
    assert [(t.name, list(t.shape), t.dtype) for t in ours.parameters] == [
        (t.name, t.shape, t.dtype) for t in layout.parameters
    ]
    assert sorted((t.name, list(t.shape), t.dtype) for t in ours.buffers) == sorted(
        (t.name, t.shape, t.dtype) for t in layout.buffers
    )
    assert list(ours.blocks) == layout.blocks
    assert ours.tied == layout.tied
    assert sorted(ours.decaying) == sorted(layout.decaying)
    if geometry is None and planned.idle_parameters:
        geometry = geometry_of_mixture(model)
    if geometry is None:  # an encoder, whose floating-point operations have no closed form
        assert not is_decoder(type(model).__name__)
        geometry = geometry_of_encoder(model)
    assert planned.multiplying_parameters == geometry.multiplying_parameters
    assert (planned.layers, planned.attention_width) == (geometry.layers, geometry.attention_width)


def geometry_of_mixture(model: Any) -> GeometryPart:
    """From its modules: what a token passes, the width of what its queries make."""
    config = model.config
    experts = {id(p): p for m in model.modules() if hasattr(m, "gate_up_proj") for p in m.parameters()}
    idle = sum(p.numel() * (p.shape[0] - config.num_experts_per_tok) // p.shape[0] for p in experts.values())
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    queries = (m for name, m in model.named_modules() if name.endswith(".q_proj"))
    return GeometryPart(
        multiplying_parameters=sum(p.numel() for p in model.parameters()) - looked_up - idle,
        layers=config.num_hidden_layers,
        attention_width=next(queries).out_features,
    )


def geometry_of_encoder(model: Any) -> GeometryPart:
    """From its modules: the layers of its encoder, the width of what their queries make.

    An embedding multiplies if the output has its weight, too.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up = sum(weight.numel() for key, weight in tables.items() if key not in linear)
    encoder = model.get_encoder() if hasattr(model, "shared") else model.encoder
    (layers,) = (child for child in encoder.children() if isinstance(child, nn.ModuleList) and len(child))
    queries = (m for name, m in layers.named_modules() if name.endswith((".query", ".SelfAttention.q")))
    return GeometryPart(
        multiplying_parameters=sum(p.numel() for p in model.parameters()) - looked_up,
        layers=len(layers),
        attention_width=next(queries).out_features,
    )


@pytest.mark.parametrize("name", catalogue_names())
def test_a_model_of_the_catalogue_has_the_tensors_that_transformers_builds(name: str) -> None:
    """With up to seven layers, which Gemma 3 needs to have both kinds of attention; the rest repeat."""
    config = dict(find_entry(name)[1]["config"])
    for key in LAYERS:
        if key in config:
            config[key] = min(config[key], 7)
    assert_equal(from_config(config, name=name, source=name), built(config))


@pytest.mark.parametrize("name", ["Llama-3.1-405B", "gemma-3-27b", "falcon-40b", "bloom-560m", "t5-11b"])
def test_a_model_with_all_its_layers_has_the_tensors_that_transformers_builds(name: str) -> None:
    assert_equal(load_model(name), built(find_entry(name)[1]["config"]))


@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: f"{config['model_type']}-{list(config)[1]}")
def test_variants_have_the_tensors_that_transformers_builds(config: dict[str, Any]) -> None:
    allowed = ARCHITECTURES[config["model_type"]]
    sizes = {key: value for key, value in SMALL.items() if key in allowed.required}
    complete = sizes | config
    assert_equal(from_config(complete, name="variant", source="variant", given_whole=False), built(complete))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    config = {"model_type": model_type}
    assert_equal(from_config(config, name="default", source="default", given_whole=False), built(config))
