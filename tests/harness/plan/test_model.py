from dataclasses import replace

import pytest

from harness.forms.model.layout import Attention
from harness.plan.model import decoder, heads_of
from harness.plan.models import load_model
from tests.harness.plan.plans import llama


def test_every_weight_of_the_blocks_is_a_product() -> None:
    model = decoder(llama(4096, 2, 11008))
    assert sum(m.rows * m.columns * m.count for m in model.matrices) == 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert [(m.rows, m.columns, m.count) for m in model.last] == [(4096, 11008, 2)]
    # The last norm counts among what multiplies.
    assert model.head_rows == 32000 + 1


@pytest.mark.parametrize("name", ["gpt2", "bloom-560m", "llama-2-7b", "qwen2.5-7b", "opt-1.3b", "pythia-1b"])
def test_models_of_the_catalogue_have_a_geometry(name: str) -> None:
    planned = load_model(name)
    model = decoder(planned)
    multiplied = sum(m.rows * m.columns * m.count for m in model.matrices) + model.head_rows * model.hidden
    assert multiplied == pytest.approx(planned.multiplying_parameters, rel=0.01)
    assert model.layers == len(planned.layout.blocks)


def test_rms_norms_move_more_than_layer_norms() -> None:
    opt, llama_like = decoder(load_model("opt-1.3b")), decoder(load_model("llama-2-7b"))
    assert opt.traffic.forward / opt.hidden < 20 < llama_like.traffic.forward / llama_like.hidden


def test_a_gelu_in_several_kernels_moves_more_than_one_kernel() -> None:
    model = load_model("gpt2")
    fused = replace(model, config={**model.config, "activation_function": "gelu"})
    difference = decoder(model).traffic.forward - decoder(fused).traffic.forward
    assert difference == (19 - 2) * 4 * 768


def test_heads_are_read_from_a_configuration() -> None:
    config = {
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    }  # fmt: skip
    assert heads_of(config) == Attention(layers=3, heads=8, key_value_heads=2, head_size=8)
    assert heads_of({"n_layer": 2, "n_head": 4, "n_embd": 32}) == Attention(
        layers=2, heads=4, key_value_heads=4, head_size=8
    )
    assert heads_of({"n_layer": 2}) is None
