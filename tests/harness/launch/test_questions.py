"""What a launcher asks processes of its fork server."""

from __future__ import annotations

import json

import pytest

from harness.errors import HarnessError
from harness.forms.activations import from_json
from tests.forkserver import launcher

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def test_a_forked_process_traces_a_model() -> None:
    profile = from_json(json.loads(launcher().trace(json.dumps({"config": CONFIG, "variant": {}}))))
    assert profile.block.saved


def test_a_model_that_cannot_be_traced_is_named_in_one_line() -> None:
    request = json.dumps({"config": {"model_type": "no such model"}, "variant": {}})
    with pytest.raises(HarnessError, match=r"activations of a no such model cannot be traced without data"):
        launcher().trace(request)
