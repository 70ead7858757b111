"""What programs behind published runs keep and compute otherwise than our job, as `programs.yaml` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Any

from benchmarks.published.losses import LogitBytes, with_loss
from harness.forms.activations import SELECTIVE, ActivationProfile, Saved, Segment, Size
from harness.forms.layout import Layout, Tensor, elements
from harness.forms.tensor import WHOLE_GRADIENTS
from harness.job.job import ALL_LINEAR, AdapterSection
from harness.plan.model import DEFAULT_TARGETS, OUTPUT_PROJECTIONS, packed_inputs
from harness.plan.profiles import saved_by_token
from harness.plan.scenario import OtherCode, Scenario


@dataclass(frozen=True, kw_only=True)
class Program(OtherCode):
    """A program of others."""

    loss: LogitBytes | None = None
    """None: the job's own."""
    recomputed: tuple[str, ...] = ()
    """Of a block, what selective checkpointing computes again although it is a matrix product."""
    keeps_packed_inputs: bool = False
    """Layers of 4 bits keep their input: bitsandbytes before 0.43.2 (its pull request 1270)."""
    keeps_graph: bool = False
    """The graph of a step, with what its layers of 4 bits keep, lives until the next loss is computed."""
    keeps_unpacked: bool = False
    """What is unpacked of 4 bits lives until the layer's backward pass, rather than being unpacked again."""
    unpacks_in_fp16: bool = False
    """What is unpacked lies there in fp16 before it is cast to bf16: twice its bytes (of the head)."""
    caches: tuple[str, ...] = ()
    """Of a block, what computes keys and values that live until the loss is computed."""
    joined_attention: bool = False
    """Queries, keys and values are one product with one adapter, which lives on with the values; fewer heads
    of keys are copied out for each of the queries' (litgpt, model.py and lora.py)."""
    traced_with: Mapping[str, Any] = field(default_factory=dict)
    """Values of the model's configuration with which transformers keeps what the program does."""
    reduces_in_fp32: bool = False
    """Gradients are reduced, and added up over micro-steps, in fp32 (FSDP)."""
    reshards_root: bool = False
    """FSDP2's root gives its weights back after the forward pass, as blocks do."""
    wraps_layers: bool = False
    """FSDP wraps every module with parameters of its own, each layer and norm, rather than blocks."""
    copies_weights_first: bool = False
    """Masters are widened from a copy of the weights in their own dtype, not copied once they are wide:
    DeepSpeed's stage3.py before 0.19 (`clone().float()`)."""
    keeps_block_inputs: bool = False
    """What a block computed again from, and the gradient of that, live until the backward pass is over: FSDP1
    hangs a hook on the inputs of units that are frozen (`_register_post_backward_reshard_only_hook`), whose
    closure holds the leaf that reentrant checkpointing makes of them (torch, `register_multi_grad_hook`)."""
    keeps_reduced_shards: bool = False
    """A shard that is copied to the host stays on the device until the backward pass is over (FSDP1)."""

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "reduce_dtype": "fp32" if self.reduces_in_fp32 else None,
            "reshards_root": self.reshards_root or None,
            "wraps_layers": self.wraps_layers or None,
            "copied_first": 2 if self.copies_weights_first else None,
            "keeps_reduced_shards": self.keeps_reduced_shards or None,
            WHOLE_GRADIENTS: {},  # KempnerForge leaves the embedding whole, the others do not add up
        }
        return super().options | {name: value for name, value in found.items() if value is not None}

    @property
    def computes_loss(self) -> bool:
        return self.loss is not None

    def traced(self, scenario: Scenario) -> tuple[Mapping[str, Any], AdapterSection]:
        model, adapter = scenario.model, scenario.job.adapter
        config = {**model.config, **self.traced_with}
        if self.joined_attention:
            config |= equal_heads(config)
            if adapter.is_present:
                targets = joined_targets(model.layout, adapter, str(config.get("model_type")))
                adapter = adapter.model_copy(update={"targets": targets})
        return config, adapter

    def kept(self, profile: ActivationProfile, scenario: Scenario) -> ActivationProfile:
        layout, adapter = scenario.model.layout, scenario.job.adapter
        checkpointing, width = (
            scenario.job.training.activation_checkpointing,
            scenario.workload().compute_bytes,
        )
        found = profile if self.loss is None else with_loss(profile, self.loss)
        inputs: dict[str, int] = {}
        if self.joined_attention and not equal_heads(scenario.model.config):
            inputs |= joined_outputs(layout)
        if self.caches:
            names = tuple(f".{module}.weight" for module in self.caches)
            found = with_caches(
                found, width * sum(t.shape[0] for t in layout.parameters if t.name.endswith(names))
            )
        unpacked = 0
        if adapter.is_quantised:
            model_type = str(scenario.model.config.get("model_type"))
            if self.keeps_packed_inputs:
                inputs |= packed_inputs(layout, adapter, model_type)
            if self.keeps_graph:
                every = sum(packed_inputs(layout, adapter, model_type, alone=False).values())
                found = replace(found, lingering=Size((0, 0, 0, width * every * len(layout.blocks), 0, 0)))
            if self.packs_head:
                copies = 2 if self.unpacks_in_fp16 else 1
                found = with_head(found, Size((copies * width * packed_head(layout), 0, 0, 0, 0, 0)))
            unpacked = width * elements(_linear(layout, layout.blocks[:1])) if self.keeps_unpacked else 0
        more = saved_by_token(inputs, width)
        if unpacked:
            more += (Saved(module="unpacked weights", size=Size((unpacked, 0, 0, 0, 0, 0))),)
        if self.recomputed and checkpointing == SELECTIVE:
            found = recomputing(found, self.recomputed)
        found = found.with_block(more, until_backward=checkpointing is not True)
        retained = found.block.held.times(2 if self.keeps_block_inputs and checkpointing is True else 0)
        return replace(found, retained=retained)


def _linear(layout: Layout, blocks: tuple[str, ...]) -> list[Tensor]:
    """Weights of the linear layers of blocks, which QLoRA packs."""
    inside = tuple(f"{block}." for block in blocks)
    named = (t for t in layout.parameters if t.name.startswith(inside) and t.name.endswith(".weight"))
    return [tensor for tensor in named if len(tensor.shape) == 2]


def _same(size: Size) -> Size:
    return size


def recomputing(profile: ActivationProfile, modules: tuple[str, ...]) -> ActivationProfile:
    """The same where modules of a block, which ours keeps, are there again in the block's backward pass."""
    saved = tuple(one for one in profile.block.saved if not one.module.endswith(modules))
    gone = sum((one.size for one in profile.block.saved if one not in saved), Size())
    growth, held = profile.block.forward_growth - gone, profile.block.held - gone
    return replace(profile, block=replace(profile.block, saved=saved, forward_growth=growth, held=held))


def with_caches(profile: ActivationProfile, each: int) -> ActivationProfile:
    """The same with so many bytes a token that blocks hand on and that live as long as the model's output:
    until the loss is computed. What of them is there while blocks compute is left out."""
    more = partial(add, Size((0, 0, 0, each, 0, 0)))
    head, loss = (Segment.sized(of, _same, more, _same) for of in (profile.head, profile.loss))
    return replace(profile, head=head, loss=loss)


def with_head(profile: ActivationProfile, beside: Size) -> ActivationProfile:
    """The same with more while the head computes, such as its unpacked weights."""
    return replace(profile, head=profile.head.sized(_same, *[partial(add, beside)] * 2))


def equal_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration gives keys as many heads as queries have; empty where they have them."""
    if config.get("model_type") == "falcon":
        one = config.get("multi_query", True) and not config.get("new_decoder_architecture")
        return {"multi_query": False} if one else {}
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return {"num_key_value_heads": heads} if heads and keys and keys < heads else {}


def packed_head(layout: Layout) -> int:
    """Elements of an output projection of its own; 0: the embedding's weight serves."""
    named = (t for t in layout.parameters if t.name.rpartition(".")[0] in OUTPUT_PROJECTIONS)
    return elements(tensor for tensor in named if len(tensor.shape) == 2)


KEYS_AND_VALUES = ("k_proj", "v_proj")


def joined_targets(layout: Layout, adapter: AdapterSection, model_type: str) -> list[str]:
    """Adapted layers where one adapter serves queries, keys and values."""
    targets = adapter.targets or DEFAULT_TARGETS.get(model_type, [])
    if targets == [ALL_LINEAR]:
        targets = list(dict.fromkeys(t.name.split(".")[-2] for t in _linear(layout, layout.blocks)))
    return [t for t in targets if t not in KEYS_AND_VALUES or "q_proj" not in targets]


def joined_outputs(layout: Layout) -> dict[str, int]:
    """Of layers of a block, each with its width, what lies in one tensor with the values and so lives on."""
    names = (f"{layout.blocks[0]}.self_attn.{name}.weight" for name in ("q_proj", "k_proj"))
    widths = {t.name: t.shape[0] for t in layout.parameters if len(t.shape) == 2}
    return {f"{name} beside values": widths[name] for name in names if name in widths}
