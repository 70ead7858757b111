"""A catalogue's model says its heads, so what attention exchanges is planned in closed form."""

from harness.forms.model.layout import Attention
from harness.plan.model import heads_of


def test_heads_are_read_from_a_configuration() -> None:
    config = {
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    }  # fmt: skip
    assert heads_of(config) == Attention(layers=3, heads=8, key_value_heads=2, head_size=8)
    assert heads_of({"n_layer": 2, "n_head": 4, "n_embd": 32}) == Attention(
        layers=2, heads=4, key_value_heads=4, head_size=8
    )
    assert heads_of({"n_layer": 2}) is None
