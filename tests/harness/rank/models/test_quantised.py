import pytest
import torch

from harness.backends.base import Unsupported
from harness.backends.libraries import facts
from harness.rank.models.adapter import is_adapter
from tests.harness.rank.loading.models import LLAMA
from tests.harness.rank.models.test_adapter import built, lora

NF4 = {"base_dtype": "nf4", "targets": ["q_proj"]}


def test_without_bitsandbytes_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "installed_version", lambda _: None)
    with pytest.raises(Unsupported, match=r"nf4 needs bitsandbytes.*\[qlora\]"):
        built(lora(LLAMA, adapter=NF4))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_linear_layers_of_blocks_are_packed_and_adapters_are_not(precision: str) -> None:
    model = built(lora(LLAMA, adapter=NF4, precision=precision))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    packed = {name for name, dtype in dtypes.items() if dtype is torch.uint8}
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in packed
    assert "model.layers.1.mlp.down_proj.weight" in packed
    assert {"lm_head.weight", "model.embed_tokens.weight"}.isdisjoint(packed)
    assert all(dtype is torch.float32 for name, dtype in dtypes.items() if is_adapter(name))
    loss = model(input_ids=torch.arange(8)[None]).logits.float().sum()
    loss.backward()
    assert all((p.grad is not None) == is_adapter(n) for n, p in model.named_parameters())
