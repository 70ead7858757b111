"""Which rank holds the most model states, and the most weights gathered unit by unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from harness.forms.fsdp.fsdp1 import ALIGNMENT_BYTES, flat_unit, is_sharded
from harness.forms.model.layout import Layout, Tensor, ceil_to, elements
from harness.forms.part import local_workload
from harness.forms.pipeline import held
from harness.forms.workload import Workload
from harness.forms.zero.zero12 import START_ALIGNMENT_ELEMENTS


def peak_rank(workload: Workload) -> int:
    """The first rank with the largest model states.

    Nothing sharded: all are equal. FSDP2 and ZeRO-3 pad at the end of what they cut, so that rank 0 has most.
    FSDP1: every piece is as long, and the optimizer keeps no states of padding. ZeRO-1 and ZeRO-2: each
    rank keeps the whole gradient of every parameter that reaches into its partition, and zeros for padding.
    A pipeline: by the stages of each place. Of ranks that cut layers the first holds most of each.
    """
    family = workload.strategy.family
    if family == "pipeline":
        return _peak_place(workload)
    if family == "zero12-tensor":
        assert workload.mesh is not None
        return workload.mesh.group("data", 0)[_largest_straddling(local_workload(workload))]
    if family == "zero12":
        return _largest_straddling(workload)
    if family == "fsdp1" and is_sharded(workload):
        return _least_padding(workload)
    return 0


def _peak_place(workload: Workload) -> int:
    assert workload.mesh is not None
    places = workload.mesh.group("pipeline", 0)
    return max(places, key=lambda rank: (elements(held(replace(workload, rank=rank))), -rank))


def _largest_straddling(workload: Workload) -> int:
    layout, ranks = workload.layout, workload.world_size
    return layout.once(("most straddling", ranks), lambda: _most_straddling(layout, ranks))


def _most_straddling(layout: Layout, ranks: int) -> int:
    """A sweep over the partitions of each group, as `zero12` lays them out."""
    touched = [0] * ranks
    for group in layout.groups():
        piece = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks) // ranks
        for rank, size in enumerate(_touched(group, piece, ranks)):
            touched[rank] += size
    return touched.index(max(touched))


def _touched(group: list[Tensor], piece: int, ranks: int) -> list[int]:
    """Elements of all parameters that reach into each partition, and its padding."""
    ends = list(accumulate(tensor.numel for tensor in group))
    starts = [0, *ends]
    found = []
    for rank in range(ranks):
        begin, end = rank * piece, min((rank + 1) * piece, ends[-1])
        if begin >= end:
            found.append(piece)
            continue
        first = bisect_right(ends, begin)
        last = bisect_right(starts, end - 1) - 1
        found.append(ends[last] - starts[first] + piece - (end - begin))
    return found


def _least_padding(workload: Workload) -> int:
    """Of a shard group; groups are equal."""
    pieces = workload.shards
    padding: dict[int, int] = {}
    for _, tensors in workload.units():
        flat = flat_unit(tensors, workload.compute_dtype, pieces)
        length = flat.length // pieces
        position = 0
        for offset, tensor in zip(flat.offsets, flat.parameters, strict=True):
            _add(padding, position, offset, length)
            position = offset + tensor.numel
        _add(padding, position, flat.length, length)
    clean = next((rank for rank in range(pieces) if rank not in padding), None)
    return min(padding, key=lambda rank: (padding[rank], rank)) if clean is None else clean


def _add(padding: dict[int, int], begin: int, end: int, length: int) -> None:
    """Spread the padding from `begin` to `end` over the pieces in which it lies."""
    while begin < end:
        rank = begin // length
        stop = min(end, (rank + 1) * length)
        padding[rank] = padding.get(rank, 0) + stop - begin
        begin = stop


def most_gathered_bytes(workload: Workload, width: int, blocks_at_once: int) -> int:
    """Root and the `blocks_at_once` largest blocks, at `width` bytes per element.

    The root is gathered as long as the model computes, and its blocks one after the other (torch 2.13,
    `distributed/fsdp/_fully_shard`, `_fsdp_state.py`, and FSDP1's `_runtime_utils.py`). An upper bound: each
    parameter has the larger of FSDP2's padding of its rows and FSDP1's alignment, each unit FSDP1's padding.
    """
    sizes = {name: _unit_bytes(unit, workload.shards, width) for name, unit in workload.layout.units()}
    root = sizes.pop("", 0)
    return root + sum(sorted(sizes.values(), reverse=True)[:blocks_at_once])


def _unit_bytes(parameters: Sequence[Tensor], ranks: int, width: int) -> int:
    return (sum(_padded(parameter, ranks, width) for parameter in parameters) + ranks) * width


def _padded(parameter: Tensor, ranks: int, width: int) -> int:
    """Elements."""
    rows, row = parameter.rows
    return max(ceil_to(rows, ranks) * row, ceil_to(parameter.numel, ALIGNMENT_BYTES // width))
