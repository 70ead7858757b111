"""Tensor parallelism with DTensor of torch 2.13 (`backends/tensor/cut.py`), layers cut over ranks."""

from __future__ import annotations

from dataclasses import replace

from harness.backends.tensor.plan import COLUMNS, ROWS, VOCABULARY, cut_dimension, local_shape
from harness.forms.common_states import replica_tensors, replica_terms
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.activations import SELECTIVE, blocks_between
from harness.forms.model.layout import Layout, Tensor
from harness.forms.terms import (
    GRADIENTS,
    NORM,
    Collective,
    ModelStates,
    Volume,
    gathered,
    over_steps,
    states,
    whole_sizes,
)
from harness.forms.workload import Workload

FORWARD = "activations added up in the forward pass"
BACKWARD = "gradients of activations added up in the backward pass"
AGAIN = "activations added up to recompute blocks"
LOGITS = "logits gathered"
FSDP2 = "fsdp2-tensor"
"""The family of FSDP2 around layers that are cut."""


def ranks_of(workload: Workload) -> int:
    """Ranks along 'tensor'."""
    return workload.mesh.size("tensor") if workload.mesh else 1


def cut(workload: Workload) -> Layout:
    """The model as one rank along 'tensor' holds it."""
    ranks = ranks_of(workload)

    def local(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=local_shape(tensor.name, tensor.shape, ranks))

    layout = workload.layout
    return layout.once(
        ("tensor", ranks), lambda: replace(layout, parameters=tuple(map(local, layout.parameters)))
    )


def model_states(workload: Workload) -> ModelStates:
    """Closed form per rank: a replica of what the rank holds of each layer."""
    return states(replica_terms(replace(workload, layout=cut(workload))))


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of what the rank holds of each parameter, by group."""
    return replica_tensors(replace(workload, layout=cut(workload)))


def collectives(workload: Workload) -> Volume:
    """Activations over 'tensor' in every micro-step, gradients over 'data' in the last one."""

    def step(workload: Workload, _: int) -> list[Collective]:
        found = activations(workload, workload.accumulation_steps)
        return [*found, *_gradients(workload), norm("tensor")]

    if workload.sequence_length is None:
        return Volume(unknown="the length of samples is not known, and so the size of activations")
    return Volume(collectives=tuple(over_steps(workload, step)), unknown=why_unknown(workload))


def why_unknown(workload: Workload) -> str | None:
    """Why the activations that cross are not known; None: they are."""
    if workload.activation_checkpointing == SELECTIVE:
        return "where recomputation that keeps matrix products stops in a block is not modelled"
    if workload.activation_checkpointing and workload.recomputed_until is None:
        return "in which module of a block recomputation stops is not modelled for this architecture"
    return None


def recomputed(workload: Workload, passes: int) -> list[Collective]:
    """What the forward passes of blocks add up once more in the backward pass.

    Recomputation stops in the last layer that saves its input, which is one of `ROWS`: before its outputs
    are added up (`harness/forms/model/activations.py`).
    """
    between = blocks_between(workload.activation_checkpointing)
    if between is None:
        return []
    blocks = tuple(f"{block}." for block in workload.layout.blocks[::between])
    last = f".{workload.recomputed_until}.weight"
    rows = [
        tensor.shape[0]
        for tensor in workload.layout.parameters
        if _is_weight(tensor) and _layer(tensor) in ROWS
        and tensor.name.startswith(blocks) and not tensor.name.endswith(last)
    ]  # fmt: skip
    size = positions(workload) * sum(rows) * DTYPE_BYTES[workload.compute_dtype]
    return [
        Collective(
            phase="backward", op="all_reduce", dtype=workload.compute_dtype, term=AGAIN, role="tensor",
            payload_bytes=passes * size, calls=passes * len(rows),
        )
    ]  # fmt: skip


def norm(role: str) -> Collective:
    """`backends/optimizer/gradients.py`: one fp64 sum of squares over the ranks that hold parts."""
    return Collective(phase="step", op="all_reduce", dtype="float64", term=NORM, payload_bytes=8, role=role)


def activations(workload: Workload, passes: int) -> list[Collective]:
    """Forward: the embedding and each layer of `ROWS` add up their outputs, and logits are gathered.

    Backward: the gradient of what each group of `COLUMNS` and the output layer read is added up.
    """
    forward = _forward(workload, passes)
    back = _weights_dtype(workload)
    width = DTYPE_BYTES[back]
    hidden = [_inputs(tensor) for tensor in _readers(workload)]
    return [
        *forward,
        Collective(
            phase="backward", op="all_reduce", dtype=back, term=BACKWARD, role="tensor",
            payload_bytes=passes * positions(workload) * sum(hidden) * width, calls=passes * len(hidden),
        ),
        *recomputed(workload, passes),
    ]  # fmt: skip


def _forward(workload: Workload, passes: int) -> list[Collective]:
    per_feature, width = passes * positions(workload), DTYPE_BYTES[workload.compute_dtype]
    weights = [tensor for tensor in workload.layout.parameters if _is_weight(tensor)]
    rows = [tensor.shape[0] for tensor in weights if _layer(tensor) in ROWS]
    found = [
        Collective(
            phase="forward", op="all_reduce", dtype=workload.compute_dtype, term=FORWARD, role="tensor",
            payload_bytes=per_feature * sum(rows) * width, calls=passes * len(rows),
        )
    ]  # fmt: skip
    table = next((t for t in workload.layout.parameters if _layer(t) in VOCABULARY), None)
    if table is not None and is_cut(workload, table):
        held = _weights_dtype(workload)
        found += [
            Collective(
                phase="forward", op="all_reduce", dtype=held, term=FORWARD, role="tensor",
                payload_bytes=per_feature * table.shape[1] * DTYPE_BYTES[held], calls=passes,
            ),
            Collective(
                phase="forward", op="all_gather", dtype=workload.compute_dtype, term=LOGITS, role="tensor",
                payload_bytes=per_feature * table.shape[0] * width, calls=passes,
            ),
        ]  # fmt: skip
    return found


def _gradients(workload: Workload) -> list[Collective]:
    mesh = workload.mesh
    if mesh is None or mesh.size("data") == 1:
        return []
    sizes = whole_sizes(cut(workload).trained)
    return gathered("backward", GRADIENTS, sizes, workload.master_dtype, op="all_reduce", role="data")


def _readers(workload: Workload) -> list[Tensor]:
    """One weight for each module whose input is one DTensor: attention, feed-forward, output layer."""
    found: dict[str, Tensor] = {}
    for tensor in workload.layout.parameters:
        module = tensor.name.rpartition(".")[0]
        if _layer(tensor) in COLUMNS and _is_weight(tensor):
            found.setdefault(module.rpartition(".")[0], tensor)
        elif _layer(tensor) in VOCABULARY and is_cut(workload, tensor):
            found["output layer"] = tensor
    return list(found.values())


def _inputs(tensor: Tensor) -> int:
    return tensor.shape[1]


def _weights_dtype(workload: Workload) -> str:
    """Dtype in which activations reach layers and leave the embedding: FSDP2 casts weights and inputs of its
    units, autocast casts within each layer, so what is reduced on either side of the cast is wide."""
    return workload.compute_dtype if workload.strategy.family == FSDP2 else workload.master_dtype


def positions(workload: Workload) -> int:
    assert workload.sequence_length is not None
    return workload.micro_batch_size * workload.sequence_length


def is_cut(workload: Workload, tensor: Tensor) -> bool:
    """Whether ranks along 'tensor' hold different parts of a parameter."""
    return cut_dimension(tensor.name, tensor.shape, ranks_of(workload)) is not None


def _layer(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0].rpartition(".")[2]


def _is_weight(tensor: Tensor) -> bool:
    return tensor.name.endswith(".weight")
