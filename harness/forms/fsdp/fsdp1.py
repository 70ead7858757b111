"""FullyShardedDataParallel (FSDP1) of torch 2.13 with original parameters, one flat parameter per unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.forms import terms
from harness.forms.fsdp.units import (
    KEPT_BY_EVALUATION,
    GatherUnit,
    all_reduced,
    blocks_without_gradient,
    gathers_and_reductions,
    irregular_units,
    norm,
    overflow,
    reduce_dtype,
    reduced_sizes,
    reduction_remarks,
)
from harness.forms.layout import DTYPE_BYTES, Tensor, ceil_to, elements
from harness.forms.single import ADAM_MOMENTS, FROZEN, buffer_terms, normalised_apart, step_counters
from harness.forms.workload import Workload
from harness.nested import grouped

ALIGNMENT_BYTES = 16
"""Of original parameters within a flat one (`_get_aligned_numel`, _flat_param.py)."""
ALIGNMENT = "alignment to 16 bytes and padding to the ranks"
FROZEN_NEIGHBOURS = "frozen weights in units with adapters"
FROZEN_REDUCED = "FSDP1 reduces the gradient of whole flat parameters, with the frozen weights of their units"
ROOT_KEPT = "the root unit is not resharded after the forward pass"


@dataclass(frozen=True)
class FlatUnit:
    """One flat parameter: where each original one begins, and the whole length in elements."""

    offsets: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    length: int


def flat_unit(
    parameters: Sequence[Tensor], compute_dtype: str, ranks: int, *, original: bool = True
) -> FlatUnit:
    """Lay out a unit as `FlatParamHandle._init_flat_param_and_metadata` does.

    With original parameters each begins at a multiple of 16 bytes, counted in the dtype of the forward pass;
    without them, one follows the other. The end is padded to a multiple of the ranks.
    """
    aligned = ALIGNMENT_BYTES // DTYPE_BYTES[compute_dtype] if original else 1
    offsets, position = [], 0
    for parameter in parameters:
        position = ceil_to(position, aligned)
        offsets.append(position)
        position += parameter.numel
    return FlatUnit(tuple(offsets), tuple(parameters), ceil_to(position, ranks))


def is_sharded(workload: Workload) -> bool:
    """Not with NO_SHARD, nor on one rank, where FSDP1 falls back to it (`_init_core_state`,
    _init_utils.py)."""
    return workload.strategy.sharding != "none" and workload.shards > 1


def model_states(workload: Workload) -> terms.ModelStates:
    """Closed form per rank, from torch 2.13, `distributed/fsdp/_flat_param.py`.

    Weights and gradients: the rank's piece of each flat parameter, padding included. Adam's moments: the
    parts of original parameters that fall into the piece (`_get_shard_metadata`); a parameter without a
    part has no gradient, so no state and no step counter. Without original parameters each flat parameter
    has one state of its whole piece. A flat parameter with any trained part has a
    gradient of its whole length, frozen parts included (`FlatParamHandle.flat_param`, requires_grad).
    """
    width = workload.master_bytes
    host = workload.offload == "cpu"
    trained = _parts(workload)
    whole, reduced = _piece(workload, _flat_units(workload)), _piece(workload, _reduced_units(workload))
    own = terms.Share(own=sum(trained.values()), padding=0, padding_name=ALIGNMENT)
    frozen = whole.own - own.own
    # Without original parameters the optimizer has the piece of each flat parameter, padding included.
    padded = 0 if workload.original_parameters else reduced.padding
    counted = len(trained) if workload.original_parameters else len(_reduced_units(workload))
    return terms.states(
        [
            *replace(whole, own=own.own).terms("weights", "own piece of each unit", width, host=host),
            terms.Term(kind="weights", name=FROZEN, bytes=frozen * width, host=host),
            *replace(reduced, own=own.own).terms("gradients", "own piece of each unit", width, host=host),
            terms.Term(kind="gradients", name=FROZEN_NEIGHBOURS, bytes=(reduced.own - own.own) * width,
                 host=host, extra=True),
            *replace(own, padding=padded).terms(
                "optimizer", "Adam's moments of own piece", ADAM_MOMENTS * width, host=host
            ),
            step_counters(counted, workload),
            *buffer_terms(workload),
        ]
    )  # fmt: skip


def host_reads(workload: Workload) -> int:
    """Bytes that offloaded weights, frozen ones too, take from the host in a step: all in each pass.

    `FlatParamHandle.reshard` (_flat_param.py) points to the piece on the host after each pass, also where the
    gathered weights are kept, and `pre_unshard` copies it as it is held to the device again.
    """
    held = _piece(workload, _flat_units(workload))
    return 2 * workload.accumulation_steps * (held.own + held.padding) * workload.master_bytes


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of the rank's part of each parameter, by group; those without a part have no gradient."""
    parts = _parts(workload)
    return [[parts[p.name] for p in group if p.name in parts] for group in workload.layout.update_groups()]


def collectives(workload: Workload) -> terms.Volume:
    """Sharded: units are gathered and reduce-scattered. NO_SHARD all-reduces the flat gradient of each
    unit (`_reduce_grad_no_shard`).

    Under `no_sync` nothing is reduced, and `_should_free_in_backward` (_runtime_utils.py) frees the
    weights only where the strategy reshards after forward: the others gather once per step.
    """
    reshards = workload.strategy.facts.reshards
    units = _units(workload, reshards=reshards)
    # `ShardedGradScaler.unscale_` reduces its flag over its process group, by default the world.
    flag = overflow(workload, "world")
    kept = not (reshards or workload.reduces_each)
    if not is_sharded(workload):
        moved = [*all_reduced(workload, reduced_sizes(units)), *flag] * len(workload.steps)
        return terms.Volume(collectives=tuple(moved))

    def step(workload: Workload, index: int) -> list[terms.Collective]:
        moved = gathers_and_reductions(workload, units, index, kept_within_step=kept)
        return [*moved, norm(workload), *flag]

    found = terms.over_steps(workload, step)
    remarks = reduction_remarks(workload)
    units_reduced = (flat.parameters for flat in _reduced_units(workload))
    if any(workload.layout.is_frozen(tensor) for unit in units_reduced for tensor in unit):
        remarks.append((terms.GRADIENTS, FROZEN_REDUCED))
    remarks += [(terms.BACKWARD, ROOT_KEPT)] if reshards else []
    if workload.evaluation_every:
        remarks.append((terms.FORWARD, KEPT_BY_EVALUATION))
    unknown = irregular_units(workload) or blocks_without_gradient(workload)
    if normalised_apart(workload) and reduce_dtype(workload) != "float32":
        unknown = unknown or "FSDP1 reduces gradients of BatchNorm in fp32 apart; that was not derived"
    return terms.Volume(collectives=tuple(found), remarks=tuple(remarks), unknown=unknown)


def _wrapped(workload: Workload) -> Iterator[tuple[str, list[Tensor], str]]:
    """Units and the dtypes that they are gathered in."""
    apart = normalised_apart(workload)
    for unit, tensors in workload.units():
        places = ((tensor.name.rpartition(".")[0], tensor) for tensor in tensors)
        inside = grouped((place if place in apart else "", tensor) for place, tensor in places)
        for module, held in inside.items():
            yield module or unit, held, "float32" if module else workload.compute_dtype


def _pieces(workload: Workload) -> int:
    return workload.shards if is_sharded(workload) else 1


def _parts(workload: Workload) -> dict[str, int]:
    """Elements of each trained parameter in the rank's piece of its unit; of those that have any."""
    parts = _all_parts(workload, _flat_units(workload))
    return {name: part for name, part in parts.items() if name not in workload.layout.frozen}


def _all_parts(workload: Workload, units: Sequence[FlatUnit]) -> dict[str, int]:
    pieces, parts = _pieces(workload), {}
    for flat in units:
        length = flat.length // pieces
        begin = length * (workload.shard_rank if pieces > 1 else 0)
        for offset, parameter in zip(flat.offsets, flat.parameters, strict=True):
            part = min(offset + parameter.numel, begin + length) - max(offset, begin)
            if part > 0:
                parts[parameter.name] = part
    return parts


def _piece(workload: Workload, units: Sequence[FlatUnit]) -> terms.Share:
    """The rank's piece of flat parameters."""
    own = sum(_all_parts(workload, units).values())
    held = sum(flat.length // _pieces(workload) for flat in units)
    return terms.Share(own=own, padding=held - own, padding_name=ALIGNMENT)


def _flat_units(workload: Workload) -> list[FlatUnit]:
    """NO_SHARD pads the end of a unit to the ranks of the world all the same."""
    ranks = workload.shards if is_sharded(workload) else workload.world_size
    original = workload.original_parameters
    return [flat_unit(tensors, dtype, ranks, original=original) for _, tensors, dtype in _wrapped(workload)]


def _reduced_units(workload: Workload) -> list[FlatUnit]:
    """Units that have a gradient: at least one parameter of them is trained."""
    return [flat for flat in _flat_units(workload) if _is_reduced(workload, flat.parameters)]


def _is_reduced(workload: Workload, tensors: Sequence[Tensor]) -> bool:
    return any(not workload.layout.is_frozen(tensor) for tensor in tensors)


def _units(workload: Workload, *, reshards: bool) -> list[GatherUnit]:
    """The root keeps its weights whatever the strategy."""
    named = zip(_wrapped(workload), _flat_units(workload), strict=True)
    return [
        GatherUnit(
            elements=elements(tensors), padded=flat.length, kept=not (reshards and name),
            reduced=None if _is_reduced(workload, tensors) else (0, 0), dtype=dtype,
        )
        for (name, tensors, dtype), flat in named
    ]  # fmt: skip
