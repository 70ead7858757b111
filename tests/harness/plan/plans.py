"""Scenarios of Llama geometries on A100s, for tests of the time model."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness.backends.registry import BUILT_IN
from harness.forms.layout import Layout, Tensor
from harness.job.job import Job
from harness.plan.hardware import Device, Fabric
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario

A100 = Device(
    name="A100-80",
    memory_bytes=80 * 2**30,
    context_bytes=2**29,
    memory_bandwidth=2039e9,
    peak_flops={"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
    link_bandwidth=300e9,
    link="NVLink",
    watts=400.0,
    source="data sheet",
)
INFINIBAND = Fabric(name="HDR", bandwidth_per_gpu=25e9, latency_seconds=14e-6, source="data sheet")


@cache
def llama(hidden: int = 4096, layers: int = 32, inner: int = 11008, vocabulary: int = 32000) -> PlannedModel:
    """Llama-2-7B, or the same with other widths; heads of 128."""
    blocks = tuple(f"model.layers.{index}" for index in range(layers))
    parameters = [Tensor("model.embed_tokens.weight", (vocabulary, hidden), "float32")]
    for block in blocks:
        attention = [f"{block}.self_attn.{name}_proj.weight" for name in "qkvo"]
        parameters += [Tensor(name, (hidden, hidden), "float32") for name in attention]
        parameters += [
            Tensor(f"{block}.mlp.{name}_proj.weight", (inner, hidden), "float32") for name in ("gate", "up")
        ]
        parameters += [
            Tensor(f"{block}.mlp.down_proj.weight", (hidden, inner), "float32"),
            Tensor(f"{block}.input_layernorm.weight", (hidden,), "float32"),
            Tensor(f"{block}.post_attention_layernorm.weight", (hidden,), "float32"),
        ]
    parameters += [
        Tensor("model.norm.weight", (hidden,), "float32"),
        Tensor("lm_head.weight", (vocabulary, hidden), "float32"),
    ]
    layout = Layout(
        parameters=tuple(parameters),
        decaying=frozenset(t.name for t in parameters if len(t.shape) > 1),
        blocks=blocks,
    )
    return PlannedModel(
        name="llama",
        source="test",
        architecture="LlamaForCausalLM",
        config={
            "hidden_size": hidden, "intermediate_size": inner, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128,
        },
        layout=layout,
        multiplying_parameters=layout.parameter_count - vocabulary * hidden,
        layers=layers,
        attention_width=hidden,
    )  # fmt: skip


def scenario(backend: str, world_size: int, **changes: Any) -> Scenario:
    """bf16-mixed, micro-batch 2 of 4096 tokens, eight A100s a node; `changes` of the scenario or the job."""
    training = {
        name: changes.pop(name) for name in ("precision", "activation_checkpointing") if name in changes
    }
    job = Job.model_validate(
        {
            "data": {"sequence_length": changes.pop("sequence_length", 4096)},
            "training": {"precision": "bf16-mixed"} | training,
        }
    )
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    values: dict[str, Any] = {
        "model": llama(),
        "ranks_per_node": min(8, world_size),
        "micro_batch_size": 2,
        "accumulation_steps": 1,
        "preset": "library-defaults",
        "device": A100,
        "fabric": INFINIBAND,
    }
    return Scenario(job=job, label=backend, strategy=strategy, world_size=world_size, **(values | changes))
