"""Model states of ZeRO stage 3."""

from __future__ import annotations

from collections.abc import Iterable

from harness.backends.options import SUB_GROUP_ELEMENTS
from harness.forms.common_states import ADAM_MOMENTS, FROZEN, buffer_terms, step_counters
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.layout import Tensor, ceil_to
from harness.forms.terms import ModelStates, Share, Term, merged, states
from harness.forms.workload import Workload
from harness.forms.zero.stages import (
    FP32_SURPLUS,
    SECOND_FP32_COPY,
    bucket_elements,
    gradient_accumulation_bytes,
    reduce_dtype,
)
from harness.forms.zero.zero3.gathering import fetching

SECOND_COPY = "second copy within a group of ranks (hpZ)"
SECOND_COPY_PADDING = "padding of the second copy"
PERSISTENT_PARAMETERS = "parameters below the persistence threshold"
REDUCTION_BUCKET = "persistent reduction bucket"


def model_states(workload: Workload) -> ModelStates:
    """Closed form per rank, from DeepSpeed 0.19.8.

    `partition_parameters.py`, `_partition_param`: each parameter is padded to a multiple of N. `stage3.py`:
    `_create_fp16_partitions_with_defragmentation` lays the pieces into one buffer; `_create_fp32_partitions`
    copies them for the optimizer, in fp32 too (it compares a device with the name of one, which never
    agree); `_setup_for_real_optimizer` keeps a gradient of every piece, in the dtype in which micro-steps add
    up, and one reduction bucket for good.
    With the optimizer offloaded, `initialize_optimizer_states` keeps a second gradient on the host.
    Parameters up to the persistence threshold stay gathered.
    """
    width, trained = workload.compute_bytes, workload.master_bytes
    accumulated = gradient_accumulation_bytes(workload)
    offload = workload.offload != "none"
    pad = "padding of each parameter to N pieces"
    cut = _share(workload, workload.layout.trained, pad)
    fp32 = workload.precision == "fp32"
    masters = f"{SECOND_FP32_COPY} of own pieces" if fp32 else "masters of own pieces"
    return states(
        [
            *cut.terms("weights", "own pieces", width, host=workload.offloads_weights),
            *_frozen(workload, pad),
            *_second_copy(workload),
            Term(kind="gathered", name=PERSISTENT_PARAMETERS,
                 bytes=_persistent_elements(workload) * width, extra=True),
            *cut.terms("masters", masters, trained, host=offload, extra=fp32),
            Term(kind="gradients", name="own pieces", bytes=cut.own * width, host=offload),
            Term(kind="gradients", name=FP32_SURPLUS, bytes=cut.own * (accumulated - width), host=offload,
                 extra=True),
            Term(kind="gradients", name=pad, bytes=cut.padding * accumulated, host=offload, extra=True),
            Term(kind="gradients", name="second gradient for the offloaded optimizer",
                 bytes=(cut.own + cut.padding) * trained if offload else 0, host=True, extra=True),
            *cut.terms("optimizer", "Adam's moments of own pieces", ADAM_MOMENTS * trained, host=offload),
            step_counters(sub_groups(workload), workload),
            Term(kind="communication", name=REDUCTION_BUCKET,
                 bytes=bucket_elements(workload) * DTYPE_BYTES[reduce_dtype(workload)], extra=True),
            *buffer_terms(workload),
        ]
    )  # fmt: skip


def _frozen(workload: Workload, padding_name: str) -> list[Term]:
    """Pieces of weights that are not trained: cut as the others are (`Init._zero_init_param`)."""
    found: list[Term] = []
    ranks = workload.world_size
    for parameter in workload.layout.frozen_parameters:
        own = _own(parameter.numel, ranks, workload.rank)
        share = Share(own=own, padding=-(-parameter.numel // ranks) - own, padding_name=padding_name)
        width = workload.held_bytes(parameter)
        found += share.terms("weights", FROZEN, width, host=workload.offloads_weights)
    return merged(found)


def _second_copy(workload: Workload) -> list[Term]:
    """hpZ: pieces within the rank's group of all weights that are gathered and released, frozen ones too,
    from the forward pass to the update (`Init._partition_param_sec`)."""
    ranks = workload.second_copy_ranks
    if ranks is None:
        return []
    found: list[Term] = []
    for parameter in workload.layout.parameters:
        if fetching(workload).is_persistent(parameter):
            continue
        piece = ceil_to(parameter.numel, workload.world_size) // ranks
        own = max(0, min(parameter.numel - piece * (workload.rank % ranks), piece))
        share = Share(own=own, padding=piece - own, padding_name=SECOND_COPY_PADDING)
        width, host = workload.held_bytes(parameter), workload.offload == "cpu"
        found += share.terms("weights", SECOND_COPY, width, host=host, extra=True)
    return merged(found)


def _share(workload: Workload, parameters: Iterable[Tensor], padding_name: str) -> Share:
    """One rank's pieces of some parameters."""
    listed = list(parameters)
    own = sum(_own(parameter.numel, workload.world_size, workload.rank) for parameter in listed)
    return Share(own=own, padding=_pieces(workload, listed) - own, padding_name=padding_name)


def _own(count: int, ranks: int, rank: int) -> int:
    piece = -(-count // ranks)
    return max(0, min(count - piece * rank, piece))


def _persistent_elements(workload: Workload) -> int:
    """`parameter_offload.py`, `mark_persistent_parameters`: all up to the threshold, padded to N pieces,
    frozen ones too."""
    if workload.world_size == 1:
        return 0  # `NoGatherHandle`: the parameter is a view of its only piece
    kept = filter(fetching(workload).is_persistent, workload.layout.parameters)
    return sum(ceil_to(tensor.numel, workload.world_size) for tensor in kept)


def sub_groups(workload: Workload) -> int:
    """Parts of the optimizer's groups."""
    return len(updated_tensors(workload))


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each sub-group, padding included: one flat tensor that is stepped by itself
    (`_optimizer_step`)."""
    return [[_pieces(workload, group)] for group in _sub_groups(workload)]


def _sub_groups(workload: Workload) -> list[list[Tensor]]:
    """Parameters that are updated together: `_create_fp16_sub_groups` closes a sub-group at the size."""
    limit = int(workload.options.get("sub_group_size") or SUB_GROUP_ELEMENTS)
    found: list[list[Tensor]] = []
    for group in workload.layout.groups():
        members: list[Tensor] = []
        count = 0
        for parameter in group:
            members.append(parameter)
            count += _pieces(workload, [parameter])
            if count >= limit:
                found.append(members)
                members, count = [], 0
        if members:
            found.append(members)
    return found


def _pieces(workload: Workload, parameters: Iterable[Tensor]) -> int:
    """Elements of a rank's pieces, padding included."""
    return sum(-(-parameter.numel // workload.world_size) for parameter in parameters)
