from pathlib import Path

import pytest
import torch
from torch import nn

from harness.errors import JobError
from harness.job.job import AdapterSection, Job
from harness.rank.data import DataFacts
from harness.rank.models.adapter import add_adapters, initial_values, is_adapter
from harness.rank.models.description import find_module_uses
from harness.rank.models.model import build_model, model_config
from tests.harness.rank.loading.models import CONFIGS, LLAMA, VOCABULARY, job_of, source_of
from tests.harness.rank.loading.test_source import assert_equal, filled


def lora(config: dict, *, adapter: dict | None = None, **training) -> Job:
    section = AdapterSection(kind="lora", rank=2, **(adapter or {}))
    return job_of(config, **training).model_copy(update={"adapter": section})


def built(job: Job) -> nn.Module:
    return build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("architecture", ["tied llama", "gpt2"])
def test_parts_of_weights_equal_the_whole_model(architecture: str, precision: str, tmp_path: Path) -> None:
    source = source_of(lora(CONFIGS[architecture], precision=precision), tmp_path)
    assert_equal(filled(source), source())


def test_only_adapters_are_trained_and_b_is_zero() -> None:
    model = built(lora(LLAMA))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)} != set()
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert bool(parameter.any()) is (".lora_A." in name)


def test_adapters_do_not_change_the_model_before_they_are_trained() -> None:
    tokens = torch.arange(8)[None]
    plain, adapted = built(job_of(LLAMA)), built(lora(LLAMA))
    assert torch.equal(plain(input_ids=tokens).logits, adapted(input_ids=tokens).logits)


def test_values_depend_on_seed_and_name_alone() -> None:
    name, shape = "model.layers.0.self_attn.q_proj.lora_A.default.weight", torch.Size((2, 8))
    values = initial_values(name, shape, 0)
    assert torch.equal(values, initial_values(name, shape, 0))
    assert not torch.equal(values, initial_values(name, shape, 1))
    assert not torch.equal(values, initial_values(name.replace("q_proj", "v_proj"), shape, 0))
    assert values.abs().max() <= 8**-0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_frozen_weights_are_held_in_the_dtype_asked_for(precision: str) -> None:
    model = built(lora(LLAMA, adapter={"base_dtype": "bf16"}, precision=precision))
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)


def test_targets_that_the_model_lacks_are_refused() -> None:
    job = lora(LLAMA, adapter={"targets": ["query"]})
    with pytest.raises(JobError, match=r"adapter\.targets: .*query"):
        built(job)


def test_embeddings_are_refused() -> None:
    with pytest.raises(JobError, match="linear layers only"):
        built(lora(LLAMA, adapter={"targets": ["embed_tokens"]}))


def test_the_model_without_an_adapter_is_left_alone() -> None:
    job, model = job_of(LLAMA), nn.Linear(1, 1)
    add_adapters(job, model)
    assert model.weight.requires_grad


def test_no_gradient_flows_through_what_runs_before_the_first_adapter() -> None:
    job = lora(LLAMA, adapter={"targets": ["v_proj"]})
    config = model_config(job, DataFacts(vocabulary_size=VOCABULARY))
    without = find_module_uses(job, nn.Linear(1, 1), config, None).without_gradient
    assert without is not None
    assert {"model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj"} < {
        *without
    }
    assert "model.layers.0.self_attn.v_proj" not in without
    assert "model.layers.0.self_attn.o_proj" not in without
    assert not any(name.startswith("model.layers.1.") for name in without)
