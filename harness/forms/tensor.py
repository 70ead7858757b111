"""Layers cut over ranks: DTensor of torch 2.13 (`backends/tensor/backend.py`), alone, under FSDP2, and AutoTP
of DeepSpeed; and the workload of the ranks that hold the same part of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from harness.backends.mesh import Mesh
from harness.backends.tensor import plan
from harness.forms import zero3, zero12
from harness.forms.activations import SELECTIVE, blocks_between, recomputed_share
from harness.forms.fsdp import fsdp2
from harness.forms.layout import DTYPE_BYTES, Layout, Tensor
from harness.forms.single import replica_tensors, replica_terms
from harness.forms.terms import (
    GRADIENTS,
    NORM,
    OVERFLOW,
    Collective,
    ModelStates,
    Volume,
    gathered,
    over_steps,
    states,
    whole_sizes,
)
from harness.forms.workload import Workload
from harness.forms.zero0 import bucket_elements

FORWARD = "activations added up in the forward pass"
BACKWARD = "gradients of activations added up in the backward pass"
AGAIN = "activations added up to recompute blocks"
LOGITS = "logits gathered"
LENGTH_UNKNOWN = "the length of samples is not known, and so the size of activations"
FSDP2 = "fsdp2-tensor"
"""The family of FSDP2 around layers that are cut."""


def ranks_of(workload: Workload) -> int:
    """Ranks along 'tensor'."""
    return workload.mesh.size("tensor") if workload.mesh else 1


def cut(workload: Workload) -> Layout:
    """The model as one rank along 'tensor' holds it."""
    ranks = ranks_of(workload)

    def local(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=plan.local_shape(tensor.name, tensor.shape, ranks))

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
        if workload.mesh is not None and workload.mesh.size("data") > 1:
            sizes, dtype = whole_sizes(cut(workload).trained), workload.master_dtype
            found += gathered("backward", GRADIENTS, sizes, dtype, op="all_reduce", role="data")
        return [*found, norm("tensor")]

    if workload.sequence_length is None:
        return Volume(unknown=LENGTH_UNKNOWN)
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
    are added up (`harness/forms/activations.py`).
    """
    between = blocks_between(workload.activation_checkpointing)
    if between is None:
        return []
    blocks = tuple(f"{block}." for block in workload.layout.blocks[::between])
    last = f".{workload.recomputed_until}.weight"
    inside = (tensor for tensor in _weights(workload, *plan.ROWS) if tensor.name.startswith(blocks))
    rows = [tensor.shape[0] for tensor in inside if not tensor.name.endswith(last)]
    size = positions(workload) * sum(rows) * DTYPE_BYTES[workload.compute_dtype]
    dtype, count = workload.compute_dtype, passes * len(rows)
    return [Collective("backward", "all_reduce", dtype, AGAIN, passes * size, count, "tensor")]


def norm(role: str) -> Collective:
    """`backends/optimizer/gradients.py`: one fp64 sum of squares over the ranks that hold parts."""
    return Collective("step", "all_reduce", "float64", NORM, 8, role=role)


def activations(workload: Workload, passes: int) -> list[Collective]:
    """Forward: the embedding and each layer of `ROWS` add up their outputs, and logits are gathered.

    Backward: the gradient of what each group of `COLUMNS` and the output layer read is added up.
    """
    # FSDP2 casts weights and inputs of its units, autocast casts within each layer, so what is reduced on
    # either side of the cast is wide.
    dtype = workload.compute_dtype
    held = dtype if workload.strategy.family == FSDP2 else workload.master_dtype
    per_feature = passes * positions(workload)

    def added(phase: str, of: str, term: str, features: list[int], op: str = "all_reduce") -> Collective:
        size = per_feature * sum(features) * DTYPE_BYTES[of]
        return Collective(phase, op, of, term, size, passes * len(features), "tensor")

    found = [added("forward", dtype, FORWARD, [tensor.shape[0] for tensor in _weights(workload, *plan.ROWS)])]
    table = next(_weights(workload, *plan.VOCABULARY), None)
    if table is not None and is_cut(workload, table):
        found.append(added("forward", held, FORWARD, [table.shape[1]]))
        found.append(added("forward", dtype, LOGITS, [table.shape[0]], "all_gather"))
    # One weight for each module whose input is one DTensor: attention, feed-forward, output layer.
    readers: dict[str, Tensor] = {}
    for tensor in _weights(workload, *plan.COLUMNS):
        readers.setdefault(tensor.name.rsplit(".", 2)[0], tensor)
    for tensor in _weights(workload, *plan.VOCABULARY):
        if is_cut(workload, tensor):
            readers["output layer"] = tensor
    read = [tensor.shape[1] for tensor in readers.values()]
    return [*found, added("backward", held, BACKWARD, read), *recomputed(workload, passes)]


def positions(workload: Workload) -> int:
    assert workload.sequence_length is not None
    return workload.micro_batch_size * workload.sequence_length


def is_cut(workload: Workload, tensor: Tensor) -> bool:
    """Whether ranks along 'tensor' hold different parts of a parameter."""
    return plan.cut_dimension(tensor.name, tensor.shape, ranks_of(workload)) is not None


# DeepSpeed AutoTP 0.19.8 (`backends/tensor/autotp.py`): layers cut along 'tensor', ZeRO along 'data'.


@dataclass(frozen=True)
class CutForms:
    """Closed forms of FSDP2 or ZeRO across ranks that hold the same part of each layer."""

    inner: ModuleType

    def model_states(self, workload: Workload) -> ModelStates:
        """Model states of the family for the model that one rank along 'tensor' holds."""
        found: ModelStates = self.inner.model_states(self._part(workload))
        return found

    def updated_tensors(self, workload: Workload) -> list[list[int]]:
        """Elements of each tensor that this rank's optimizer updates, by group."""
        found: list[list[int]] = self.inner.updated_tensors(self._part(workload))
        return found

    def collectives(self, workload: Workload) -> Volume:
        """The family's of that model along 'shard' or 'data'; activations, norms and flags along 'tensor'."""
        if workload.sequence_length is None:
            return Volume(unknown=LENGTH_UNKNOWN)
        inner: Volume = self.inner.collectives(self._part(workload))
        if self.inner is fsdp2:
            found = [replace(part, role="shard") for part in inner.collectives if part.term != NORM]
        else:
            found = [replace(part, role="data") for part in inner.collectives]
            both = (part for part in inner.collectives if part.term in (NORM, OVERFLOW))
            found += [replace(part, role="tensor") for part in both]

        def step(workload: Workload, _: int) -> list[Collective]:
            if self.inner is not fsdp2:
                return _autotp_activations(workload, workload.accumulation_steps)
            return [*activations(workload, workload.accumulation_steps), norm("world")]

        found += over_steps(workload, step)
        return replace(inner, collectives=tuple(found), unknown=inner.unknown or why_unknown(workload))

    def _part(self, workload: Workload) -> Workload:
        return local_workload(workload) if self.inner is fsdp2 else zero_workload(workload)


fsdp2_tensor, zero12_tensor, zero3_tensor = CutForms(fsdp2), CutForms(zero12), CutForms(zero3)


def zero_workload(workload: Workload) -> Workload:
    """One rank of those that share states, as ZeRO sees it."""
    mesh, layout = workload.mesh, workload.layout
    assert mesh is not None
    ranks, place = mesh.size("tensor"), mesh.coordinates(workload.rank)["tensor"]

    def local(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=plan.autotp_local_shape(tensor.name, tensor.shape, ranks, place))

    return replace(
        workload,
        layout=layout.once(
            ("autotp", ranks, place), lambda: replace(layout, parameters=tuple(map(local, layout.parameters)))
        ),
        strategy=workload.strategy.underneath,
        # By the preset no larger than the model before it is cut.
        options={**workload.options, "reduce_bucket_size": bucket_elements(workload)},
        world_size=mesh.size("data"),
        rank=mesh.coordinates(workload.rank)["data"],
        mesh=None,
    )


def _autotp_activations(workload: Workload, passes: int) -> list[Collective]:
    """Forward: each layer of `ROWS` adds up its outputs; an untied output layer gathers its logits.

    Backward: each layer of `COLUMNS`, and that output layer, adds up the gradient of what it read, by itself
    (`ColumnParallel.backward`, module_inject/layers.py).
    """
    assert workload.mesh is not None
    dtype, ranks = workload.compute_dtype, workload.mesh.size("tensor")
    per_feature = passes * positions(workload) * DTYPE_BYTES[dtype]

    def added(phase: str, term: str, features: list[int], op: str = "all_reduce") -> Collective:
        return Collective(
            phase, op, dtype, term, per_feature * sum(features), passes * len(features), "tensor"
        )

    readers = [tensor.shape[1] for tensor in _weights(workload, *plan.COLUMNS, plan.OUTPUT)]
    found = [added("forward", FORWARD, [tensor.shape[0] for tensor in _weights(workload, *plan.ROWS)])]
    # Logits are gathered from parts that are padded to the largest.
    output = [ranks * max(plan.part_sizes(t.shape[0], ranks)) for t in _weights(workload, plan.OUTPUT)][:1]
    found += [added("forward", LOGITS, output, "all_gather")] if output else []
    return [*found, added("backward", BACKWARD, readers), *recomputed(workload, passes)]


def _weights(workload: Workload, *layers: str) -> Iterator[Tensor]:
    for tensor in workload.layout.parameters:
        module, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in layers:
            yield tensor


def local_workload(workload: Workload) -> Workload:
    """The workload of the ranks that hold the same part of each layer; itself where none is cut.

    Its model is what one rank holds, its ranks those with samples of their own.
    """
    mesh = workload.mesh
    if mesh is None or mesh.size("tensor") == 1:
        return workload
    if workload.strategy.zero_stage is not None:
        return zero_workload(workload)
    tables = () if workload.layout.tied else _weights(workload, plan.VOCABULARY[0])
    whole = {table.name: ranks_of(workload) for table in tables if is_cut(workload, table)}
    return replace(
        workload,
        layout=cut(workload),
        options={WHOLE_GRADIENTS: whole, **workload.options},
        strategy=workload.strategy.underneath,
        world_size=mesh.data_size,
        shard_size=mesh.size("shard") if mesh.size("shard") > 1 else None,
        rank=mesh.data_rank(workload.rank),
        mesh=Mesh.data_parallel(mesh.data_size),
    )


WHOLE_GRADIENTS = "whole_gradients"
"""Parameters whose gradients are so many times what a rank holds, until FSDP2 reduces them: no rule cuts that
of an embedding by rows (torch 2.13, distributed/tensor/_ops/_embedding_ops.py)."""
KEYS = "keys and values gathered for attention"
ROTATED = "keys and values passed on around the ring"
GRADIENTS_OF_KEYS = "gradients of keys and values passed on around the ring"
EXCHANGED = "queries, keys, values and results exchanged"
POSITIONS = "positions gathered"
UNKNOWN_HEADS = "the model does not say its heads, so what attention exchanges is not known"
FROZEN = "which attention needs gradients where weights are frozen is not modelled"
KEPT = "what selective checkpointing keeps of attention that ranks divide is not modelled"
MESH_AXIS = "sequence"


def with_attention(workload: Workload, volume: Volume) -> Volume:
    """The volume of the strategy underneath, and what attention adds to it."""
    if workload.strategy.sequence is None or volume.unknown is not None:
        return volume
    attention = workload.layout.attention
    if attention is None or workload.layout.frozen:
        return replace(volume, unknown=FROZEN if attention else UNKNOWN_HEADS)
    if workload.activation_checkpointing == SELECTIVE:
        return replace(volume, unknown=KEPT)
    ranks, micro, dtype = workload.ranks_per_sample, workload.micro_batch_size, workload.compute_dtype
    assert workload.part_length is not None
    tokens, width = micro * workload.part_length, DTYPE_BYTES[dtype]
    # Of each block and pass: operation, dtype, term, bytes and calls.
    if workload.strategy.sequence == "exchange":
        # Queries, keys, values, results; fewer heads of keys than ranks are repeated first. It is its own
        # backward pass. `UlyssesSPAttentionHF.forward`: int64 positions of one sample, which all share.
        heads = attention.heads + max(attention.key_value_heads, ranks)
        exchanged = "all_to_all", dtype, EXCHANGED, 2 * heads * tokens * attention.head_size * width, 4
        positions = DTYPE_BYTES["int64"] * tokens // micro * ranks
        forward, backward = [("all_gather", "int64", POSITIONS, positions, 1), exchanged], [exchanged]
    else:
        # Heads of keys are not repeated for queries that share them. `_templated_ring_attention`: gathered
        # in one call, or passed on until all ranks had them. They come round once more in the backward pass;
        # their gradients, in fp32, come round and go home (`_templated_ring_attention_backward`).
        keys_and_values = 2 * tokens * attention.key_value_heads * attention.head_size
        around = "all_gather", dtype, KEYS, keys_and_values * width * ranks, 1
        if workload.options.get("rotation") == "all-to-all":
            around = "permute", dtype, ROTATED, keys_and_values * width * (ranks - 1), ranks - 1
        home = "permute", "float32", GRADIENTS_OF_KEYS, 4 * keys_and_values * ranks, ranks
        forward, backward = [around], [around, home]
    role = "world" if ranks == workload.world_size else MESH_AXIS
    passes = len(workload.steps) * workload.accumulation_steps
    recomputed = int(recomputed_share(workload.activation_checkpointing, attention.layers) * attention.layers)
    blocks = attention.layers
    found = [
        Collective(phase, op, of, term, size * times * passes, calls * times * passes, role)
        for phase, each, times in (
            ("forward", forward, blocks), ("backward", forward, recomputed), ("backward", backward, blocks),
        )
        for op, of, term, size, calls in each
        if times * passes
    ]  # fmt: skip
    return replace(volume, collectives=(*volume.collectives, *found))
