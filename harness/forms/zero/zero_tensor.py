"""DeepSpeed AutoTP 0.19.8 (`backends/tensor/autotp.py`): layers cut along 'tensor', ZeRO along 'data'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from harness.backends.tensor.plan import (
    COLUMNS,
    OUTPUT,
    ROWS,
    autotp_local_shape,
    part_sizes,
)
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.layout import Layout, Tensor
from harness.forms.tensor import BACKWARD, FORWARD, LOGITS, positions, recomputed, why_unknown
from harness.forms.terms import NORM, OVERFLOW, Collective, ModelStates, Volume, over_steps
from harness.forms.workload import Workload
from harness.forms.zero import zero3, zero12
from harness.forms.zero.stages import bucket_elements


@dataclass(frozen=True)
class ZeroTensor:
    """Closed forms of one family of ZeRO across ranks that hold the same part of each layer."""

    inner: ModuleType

    def model_states(self, workload: Workload) -> ModelStates:
        """Those of ZeRO with the model that one rank along 'tensor' holds."""
        found: ModelStates = self.inner.model_states(zero_workload(workload))
        return found

    def updated_tensors(self, workload: Workload) -> list[list[int]]:
        """Elements of each flat tensor that this rank's optimizer updates."""
        found: list[list[int]] = self.inner.updated_tensors(zero_workload(workload))
        return found

    def collectives(self, workload: Workload) -> Volume:
        """ZeRO's of that model along 'data', and activations, norms and flags along 'tensor'."""
        if workload.sequence_length is None:
            return Volume(unknown="the length of samples is not known, and so the size of activations")
        along_data: Volume = self.inner.collectives(zero_workload(workload))

        def step(workload: Workload, _: int) -> list[Collective]:
            return _activations(workload, workload.accumulation_steps)

        found = [replace(part, role="data") for part in along_data.collectives]
        found += [
            replace(part, role="tensor") for part in along_data.collectives if part.term in (NORM, OVERFLOW)
        ]
        found += over_steps(workload, step)
        return replace(
            along_data,
            collectives=tuple(found),
            unknown=along_data.unknown or why_unknown(workload),
        )


zero12_tensor, zero3_tensor = ZeroTensor(zero12), ZeroTensor(zero3)
UNDERNEATH = {"zero12-tensor": "zero12", "zero3-tensor": "zero3"}
"""Family of AutoTP -> that of ZeRO across the ranks that hold the same parts."""


def zero_workload(workload: Workload) -> Workload:
    """One rank of those that share states, as ZeRO sees it."""
    mesh = workload.mesh
    assert mesh is not None
    return replace(
        workload,
        layout=_cut(workload),
        strategy=replace(workload.strategy, family=UNDERNEATH[workload.strategy.family]),
        # By the preset no larger than the model before it is cut.
        options={**workload.options, "reduce_bucket_size": bucket_elements(workload)},
        world_size=mesh.size("data"),
        rank=mesh.coordinates(workload.rank)["data"],
        mesh=None,
    )


def _cut(workload: Workload) -> Layout:
    """The model as one rank along 'tensor' holds it."""
    mesh = workload.mesh
    assert mesh is not None
    ranks, place = mesh.size("tensor"), mesh.coordinates(workload.rank)["tensor"]

    def local(tensor: Tensor) -> Tensor:
        return replace(tensor, shape=autotp_local_shape(tensor.name, tensor.shape, ranks, place))

    layout = workload.layout
    return layout.once(
        ("autotp", ranks, place), lambda: replace(layout, parameters=tuple(map(local, layout.parameters)))
    )


def _activations(workload: Workload, passes: int) -> list[Collective]:
    """Forward: each layer of `ROWS` adds up its outputs; an untied output layer gathers its logits.

    Backward: each layer of `COLUMNS`, and that output layer, adds up the gradient of what it read, by itself
    (`ColumnParallel.backward`, module_inject/layers.py).
    """
    dtype = workload.compute_dtype
    readers = list(_weights(workload, *COLUMNS, OUTPUT))
    size = sum(tensor.shape[1] for tensor in readers) * positions(workload) * DTYPE_BYTES[dtype]
    return [
        *_forward(workload, passes),
        Collective(
            phase="backward", op="all_reduce", dtype=dtype, term=BACKWARD, role="tensor",
            payload_bytes=passes * size, calls=passes * len(readers),
        ),
        *recomputed(workload, passes),
    ]  # fmt: skip


def _forward(workload: Workload, passes: int) -> list[Collective]:
    dtype = workload.compute_dtype
    per_feature = passes * positions(workload) * DTYPE_BYTES[dtype]
    rows, output = list(_weights(workload, *ROWS)), list(_weights(workload, OUTPUT))
    found = [
        Collective(
            phase="forward", op="all_reduce", dtype=dtype, term=FORWARD, role="tensor",
            payload_bytes=per_feature * sum(tensor.shape[0] for tensor in rows), calls=passes * len(rows),
        )
    ]  # fmt: skip
    if output:
        found.append(
            Collective(
                phase="forward", op="all_gather", dtype=dtype, term=LOGITS, role="tensor",
                payload_bytes=per_feature * _padded(workload, output[0], 0), calls=passes,
            )
        )  # fmt: skip
    return found


def _padded(workload: Workload, tensor: Tensor, dimension: int) -> int:
    """A dimension once it was gathered from parts that are padded to the largest."""
    assert workload.mesh is not None
    ranks = workload.mesh.size("tensor")
    return ranks * max(part_sizes(tensor.shape[dimension], ranks))


def _weights(workload: Workload, *layers: str) -> Iterator[Tensor]:
    for tensor in workload.layout.parameters:
        module, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in layers:
            yield tensor
