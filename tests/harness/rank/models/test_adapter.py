from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.backends.base import Unsupported
from harness.backends.libraries import facts
from harness.errors import JobError
from harness.job.job import AdapterSection, Job
from harness.rank.data import DataFacts
from harness.rank.models.description import find_module_uses
from harness.rank.models.model import initial_values, is_adapter, model_config
from tests.docs.markdown import ROOT, tokens
from tests.harness.rank import small_models


def lora(config: dict, *, adapter: dict | None = None, **training) -> Job:
    section = AdapterSection(**{"kind": "lora", "rank": 2} | (adapter or {}))
    return small_models.job_of(config, **training).model_copy(update={"adapter": section})


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("architecture", ["tied llama", "gpt2"])
def test_parts_of_weights_equal_the_whole_model(architecture: str, precision: str, tmp_path: Path) -> None:
    source = small_models.source_of(lora(small_models.CONFIGS[architecture], precision=precision), tmp_path)
    small_models.assert_equal(small_models.filled(source), source())


def test_only_adapters_are_trained_and_b_is_zero() -> None:
    model = small_models.built(lora(small_models.LLAMA))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)} != set()
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert bool(parameter.any()) is (".lora_A." in name)


def test_adapters_do_not_change_the_model_before_they_are_trained() -> None:
    plain, adapted = (
        small_models.built(small_models.job_of(small_models.LLAMA)),
        small_models.built(lora(small_models.LLAMA)),
    )
    assert torch.equal(plain(input_ids=TOKENS).logits, adapted(input_ids=TOKENS).logits)
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_values_depend_on_seed_and_name_alone() -> None:
    name, shape = "model.layers.0.self_attn.q_proj.lora_A.default.weight", torch.Size((2, 8))
    values = initial_values(name, shape, 0)
    assert torch.equal(values, initial_values(name, shape, 0))
    assert not torch.equal(values, initial_values(name, shape, 1))
    assert not torch.equal(values, initial_values(name.replace("q_proj", "v_proj"), shape, 0))
    assert values.abs().max() <= 8**-0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_frozen_weights_are_held_in_the_dtype_asked_for(precision: str) -> None:
    model = small_models.built(lora(small_models.LLAMA, adapter={"base_dtype": "bf16"}, precision=precision))
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "why"), [("query", r"adapter\.targets: .*query"), ("embed_tokens", "linear layers only")]
)
def test_targets_that_the_model_lacks_or_that_are_not_linear_are_refused(target: str, why: str) -> None:
    with pytest.raises(JobError, match=why):
        small_models.built(lora(small_models.LLAMA, adapter={"targets": [target]}))


def test_no_gradient_flows_through_what_runs_before_the_first_adapter() -> None:
    job = lora(small_models.LLAMA, adapter={"targets": ["v_proj"]})
    config = model_config(job, DataFacts(vocabulary_size=small_models.VOCABULARY))
    without = find_module_uses(job, nn.Linear(1, 1), config, None).without_gradient
    assert without is not None
    assert {"model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj"} < {
        *without
    }
    assert "model.layers.0.self_attn.v_proj" not in without
    assert "model.layers.0.self_attn.o_proj" not in without
    assert not any(name.startswith("model.layers.1.") for name in without)


TOKENS = torch.arange(8)[None]


def test_peft_computes_with_the_documented_export_what_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    job = lora(small_models.CONFIGS["tied llama"], adapter={"rank": 8, "alpha": 16, "targets": ["q_proj"]})
    model = small_models.built(job).eval()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.3)
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").mkdir()
    for number, names in (("1", True), ("2", False)):
        part = {n: p.detach() for n, p in model.named_parameters() if n.startswith("model.layers.0") == names}
        save_file(part, f"checkpoint/model-0000{number}-of-00002.safetensors")
    (code,) = (block.content for block in tokens(ROOT / "docs/job-axes.md") if block.info == "python")
    exec(code, {})
    expected = model(input_ids=TOKENS).logits
    plain = small_models.built(small_models.job_of(small_models.CONFIGS["tied llama"])).eval()
    assert not torch.allclose(plain(input_ids=TOKENS).logits, expected, atol=1e-2)
    adapted = PeftModel.from_pretrained(plain, "adapter").eval()
    torch.testing.assert_close(adapted(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-6)


NF4 = {"base_dtype": "nf4", "targets": ["q_proj"]}


def test_without_bitsandbytes_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "installed_version", lambda _: None)
    with pytest.raises(Unsupported, match=r"nf4 needs bitsandbytes.*\[qlora\]"):
        small_models.built(lora(small_models.LLAMA, adapter=NF4))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_linear_layers_of_blocks_are_packed_and_adapters_are_not(precision: str) -> None:
    model = small_models.built(lora(small_models.LLAMA, adapter=NF4, precision=precision))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    packed = {name for name, dtype in dtypes.items() if dtype is torch.uint8}
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in packed
    assert "model.layers.1.mlp.down_proj.weight" in packed
    assert {"lm_head.weight", "model.embed_tokens.weight"}.isdisjoint(packed)
    assert all(dtype is torch.float32 for name, dtype in dtypes.items() if is_adapter(name))
    model(input_ids=TOKENS).logits.float().sum().backward()
    assert all((p.grad is not None) == is_adapter(n) for n, p in model.named_parameters())
