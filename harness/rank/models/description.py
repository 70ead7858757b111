"""Describes the bare model for the record, as it is before a library touches it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from harness.backends.model.blocks import transformer_blocks
from harness.backends.model.precision import dtype_name
from harness.job.job import UpdateGroup
from harness.rank.factories import configuration
from harness.rank.models.changes import uses_checkpointing
from harness.rank.models.module_uses import REGULAR, ModuleUses
from harness.rank.models.optimizer import frozen_names
from harness.record import AttentionPart, GeometryPart, LayoutPart, ModelPart, SplitPart, TensorPart


@dataclass
class Built:
    """The model that a backend built; None until it did."""

    model: ModelPart | None = None
    layout: LayoutPart | None = None
    split: SplitPart | None = None
    update_of_part: float | None = None

    def describe(
        self,
        model: nn.Module,
        updated: Sequence[UpdateGroup],
        traced: ModuleUses = REGULAR,
        whole_because: str | None = None,
    ) -> None:
        """Note a model as it was built."""
        self.model = describe_model(model).model_copy(update={"whole_because": whole_because})
        self.layout = describe_layout(model, updated, traced)


def describe_model(model: nn.Module) -> ModelPart:
    """Facts about a whole model for the record: what was really built."""
    config = configuration(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return ModelPart(
        architecture=type(model).__name__,
        attention=getattr(config, "_attn_implementation", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tied_parameters=len(names) - len(list(model.parameters())),
        activation_checkpointing=uses_checkpointing(model),
        geometry=describe_geometry(model),
        config=config.to_diff_dict() if config is not None else {},
    )


def describe_geometry(model: Any) -> GeometryPart | None:
    """What `theory.flops` needs to know; None where its closed forms do not hold.

    They hold for decoders whose every token passes every parameter, so not for mixtures of experts, encoders
    or models of the user's own, and whose every parameter gets a gradient, so not for adapters.
    """
    config = configuration(model)
    if config is None or not is_decoder(type(model).__name__) or frozen_names(model):
        return None
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if any((getattr(config, name, None) or 0) > 1 for name in experts):
        return None
    if (sizes := _sizes(config)) is None:
        return None
    layers, heads, head_size = sizes
    output = model.get_output_embeddings()
    looked_up = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and (output is None or module.weight is not output.weight)
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return GeometryPart(
        multiplying_parameters=parameters - sum(looked_up.values()),
        layers=layers,
        attention_width=heads * head_size,
    )


def is_decoder(architecture: str) -> bool:
    """Whether a class of transformers predicts the next token from those before it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def describe_layout(
    model: nn.Module,
    updated: Sequence[UpdateGroup],
    traced: ModuleUses = REGULAR,
) -> LayoutPart:
    """The tensors of a bare model and its blocks, and what one step does with them."""

    def describe(named: Iterable[tuple[str, Tensor]]) -> list[TensorPart]:
        return [
            TensorPart(name=name, shape=list(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in named
        ]

    frozen = frozen_names(model)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return LayoutPart(
        parameters=describe(model.named_parameters()),
        decaying=sorted(updated[0].names) if updated else [],
        groups=[sorted(group.names) for group in updated] if len(updated) > 2 else [],
        buffers=describe(model.named_buffers()),
        blocks=list(transformer_blocks(model)),
        tied={
            name: first_names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name != first_names[id(parameter)]
        },
        frozen=sorted(frozen),
        without_gradient=traced.without_gradient if frozen or traced.without_gradient else [],
        attention=describe_attention(model),
        uses=traced.uses,
        unreached=traced.unreached,
        unit_calls=traced.unit_calls,
        read_outside=traced.read_outside,
        changed_in_passes=traced.changed_in_passes,
        evaluates_alike=traced.evaluates_alike,
        depends_on_data=traced.depends_on_data,
    )


def describe_attention(model: nn.Module) -> AttentionPart | None:
    """Heads by the model's configuration; None where it does not say, or is no decoder."""
    config = configuration(model)
    if config is None or not is_decoder(type(model).__name__):
        return None
    if (sizes := _sizes(config)) is None:
        return None
    layers, heads, size = sizes
    keys = getattr(config, "num_key_value_heads", None) or heads
    return AttentionPart(layers=layers, heads=heads, key_value_heads=keys, head_size=size)


def _sizes(config: Any) -> tuple[int, int, int] | None:
    """Layers, heads and the size of a head; None where the configuration does not say."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, hidden = (getattr(config, name, None) for name in names)
    if not layers or not heads or not hidden:
        return None
    return layers, heads, getattr(config, "head_dim", None) or hidden // heads
