"""The part of a model that one rank computes, as a model of its own, for geometry and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.backends.tensor.plan import HEADS, VOCABULARY
from harness.errors import HarnessError
from harness.forms import pipeline, tensor
from harness.forms.model.activations import ActivationProfile, Segment, Size
from harness.forms.part import local_workload
from harness.forms.workload import Workload
from harness.plan.model import PlannedModel

CUT_TYPES = ("llama", "mistral", "qwen2")
"""Types of models whose cut blocks are blocks of the same type with fewer heads and channels."""
EMBEDDING, HEAD = VOCABULARY
CUT_SETTINGS = (*HEADS, "intermediate_size")


def part_of(model: PlannedModel, workload: Workload) -> PlannedModel:
    """The model with the layers, heads and channels that the workload's rank computes."""
    if tensor.ranks_of(workload) > 1:
        return _cut(model, workload)
    if workload.strategy.facts.cuts_layers:
        return _staged(model, workload)
    return model


def local_config(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The configuration of a model whose blocks are what one of `ranks` along 'tensor' computes.

    Embedding and head keep all tokens. Raises HarnessError for a type whose blocks are not so divided.
    """
    kind = config.get("model_type")
    if kind not in CUT_TYPES:
        raise HarnessError(
            f"activations of cut layers are predicted for {', '.join(CUT_TYPES)}, not for {kind}"
        )
    heads = int(config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    keys = config.get("num_key_value_heads") or heads
    whole = {**config, "num_key_value_heads": keys}
    return {**whole, "head_dim": size, **{name: int(whole[name]) // ranks for name in CUT_SETTINGS}}


def local_profile(profile: ActivationProfile, workload: Workload) -> ActivationProfile:
    """The same profile with embedding and head cut by tokens: their weights, not what they compute.

    Logits are gathered, so that every rank has all of them (`backends/tensor/cut.py`). AutoTP cuts no
    embedding, nor a head that is tied to one.
    """
    ranks = tensor.ranks_of(workload)
    cut = _cut_tables(workload) if ranks > 1 else set()
    tied = bool(workload.layout.tied)
    return replace(
        profile,
        embedding=_divided(profile.embedding, ranks) if EMBEDDING in cut else profile.embedding,
        head=_divided(profile.head, ranks) if (EMBEDDING if tied else HEAD) in cut else profile.head,
    )


def _cut(model: PlannedModel, workload: Workload) -> PlannedModel:
    ranks = tensor.ranks_of(workload)
    layout = local_workload(workload).layout
    missing = workload.layout.parameter_count - layout.parameter_count
    looked_up = workload.layout.parameter_count - model.multiplying_parameters
    kept = looked_up // ranks if EMBEDDING in _cut_tables(workload) else looked_up
    return replace(
        model,
        config={**model.config, **{n: int(v) // ranks for n in CUT_SETTINGS if (v := model.config.get(n))}},
        layout=layout,
        multiplying_parameters=workload.layout.parameter_count - missing - kept,
        attention_width=model.attention_width // ranks,
    )


def _cut_tables(workload: Workload) -> set[str]:
    """Embedding and head, by the names of their layers, if ranks hold parts of them."""
    whole, held = workload.layout.parameters, local_workload(workload).layout.parameters
    layers = {a.name.split(".")[-2] for a, b in zip(whole, held, strict=True) if a.shape != b.shape}
    return layers & set(VOCABULARY)


def _staged(model: PlannedModel, workload: Workload) -> PlannedModel:
    cut, place = pipeline.cut_of(workload), pipeline.place_of(workload)
    stages = cut.of_rank(place)
    held = pipeline.held(workload)
    blocks = tuple(name for stage in stages for name in cut.blocks_of(stage))
    prefixes = tuple(f"{name}." for name in blocks)
    inside = sum(t.numel for t in held if t.name.startswith(prefixes))
    everywhere = tuple(f"{name}." for name in workload.layout.blocks)
    outside = model.multiplying_parameters - sum(
        t.numel for t in workload.layout.parameters if t.name.startswith(everywhere)
    )
    is_last = cut.stages - 1 in stages
    return replace(
        model,
        layout=replace(workload.layout, parameters=tuple(held), blocks=blocks),
        multiplying_parameters=inside + (outside if is_last else 0),
        layers=len(blocks),
    )


def _divided(segment: Segment, ranks: int) -> Segment:
    """With constants, which are those of the weights, divided."""

    def of(size: Size) -> Size:
        return Size((size.coefficients[0] // ranks, *size.coefficients[1:]))

    return segment.sized(of, of, of, of)
