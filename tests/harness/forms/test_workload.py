"""Workloads of models that were never run: nothing but names and shapes."""

import pytest
import torch
from torch import nn

from harness.backends.registry import BUILT_IN, mesh_of
from harness.forms.families import FAMILIES, collectives, model_states
from harness.forms.layout import Attention, Layout, Tensor
from harness.forms.terms import STEP_PHASES
from harness.forms.workload import Workload
from tests.built_in import DATA_PARALLEL


def unbuilt_model() -> nn.Module:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        return nn.ModuleDict({"embedding": nn.Embedding(1000, 64), "blocks": blocks})


def layout_of(model: nn.Module) -> Layout:
    parameters = tuple(
        Tensor(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    )
    return Layout(
        parameters=parameters,
        decaying=frozenset(tensor.name for tensor in parameters if len(tensor.shape) > 1),
        blocks=tuple(f"blocks.{index}" for index in range(3)),
        attention=Attention(layers=3, heads=8, key_value_heads=8, head_size=8),
    )


@pytest.mark.parametrize("backend", DATA_PARALLEL)
def test_closed_forms_need_no_record(backend: str) -> None:
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    layout = layout_of(unbuilt_model())
    world_size = 1 if strategy.sharding == "single" else 8
    workload = Workload(
        layout=layout,
        strategy=strategy,
        world_size=world_size,
        shard_size=4 if strategy.sharding == "hybrid" else None,
        precision="bf16-mixed",
        mesh=mesh_of(backend, world_size),
        sequence_length=64,
    )
    assert model_states(workload).model_state_bytes >= 16 * layout.parameter_count / world_size
    volume = collectives(workload)
    assert volume.unknown is None
    sent = sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in STEP_PHASES)
    assert (sent > 0) == (world_size > 1)


def test_seventy_billion_parameters_are_planned_without_holding_any() -> None:
    """2 + 4 + 8 + 2 bytes per parameter over 64 ranks (FSDP: the fp32 weights are the masters: 4 + 4 + 8)."""
    hidden, layers = 8192, 80
    block = [(4 * hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    shapes = [(f"h.{layer}.{index}", shape) for layer in range(layers) for index, shape in enumerate(block)]
    layout = Layout(
        parameters=tuple(Tensor(name, shape, "float32") for name, shape in shapes),
        decaying=frozenset(name for name, _ in shapes),
        blocks=tuple(f"h.{layer}" for layer in range(layers)),
    )
    strategy = BUILT_IN["fsdp"].strategy
    assert strategy is not None
    workload = Workload(layout=layout, strategy=strategy, world_size=64, precision="bf16-mixed")
    counters = 4 * len(shapes)
    assert model_states(workload).model_state_bytes == 16 * layout.parameter_count // 64 + counters


def test_every_family_of_the_registry_has_closed_forms() -> None:
    assert {entry.strategy.family for entry in BUILT_IN.values() if entry.strategy} == set(FAMILIES)
