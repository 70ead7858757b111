"""DistributedDataParallel of torch 2.13, natively, through Accelerate and through Trainer."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forms.layout import Tensor, elements
from harness.forms.single import replica_terms
from harness.forms.terms import (
    BUFFERS,
    Collective,
    ModelStates,
    Term,
    Volume,
    gathered,
    over_steps,
    reducing_passes,
    states,
)
from harness.forms.workload import Workload
from harness.nested import totals

BUCKET_BYTES = 25 * 2**20
"""`bucket_cap_mb` of DistributedDataParallel.__init__."""
FIRST_BUCKET_BYTES = 2**20
"""`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, the smaller first bucket once they are rebuilt."""
REBUILT = "bucket order broadcast"
USED_PARAMETERS = "map of used parameters"
ROOM = "buckets' space for parameters without a gradient"
BUCKETS_BESIDE_GRADIENTS = "DDP's buckets, beside the gradients"


def model_states(workload: Workload) -> ModelStates:
    """A whole replica, and unless `gradient_as_bucket_view` makes gradients views of them, DDP's buckets.

    The buckets hold every gradient once more, without padding (torch 2.13,
    `csrc/distributed/c10d/reducer.cpp`, `Reducer::initialize_buckets`); like-for-like sets the view, for
    which Trainer has no argument.
    """
    terms, views = replica_terms(workload), views_buckets(workload)
    if wraps(workload) and views:
        # Gradients are parts of buckets, which have room for those that never come.
        left_out = workload.layout.trained_count - elements(workload.layout.reached)
        room = Term(kind="gradients", name=ROOM, bytes=left_out * workload.master_bytes, extra=True)
        terms += [room] if left_out else []
    if wraps(workload) and not views:
        size = workload.layout.trained_count * workload.master_bytes
        terms.append(Term(kind="communication", name=BUCKETS_BESIDE_GRADIENTS, bytes=size, extra=True))
    return states(terms)


def views_buckets(workload: Workload) -> bool:
    """Whether gradients are views of buckets, so that nothing is copied into them."""
    return workload.like_for_like and workload.strategy.of_route.sets_bucket_view


def wraps(workload: Workload) -> bool:
    """Whether the model is in DDP: through Accelerate one rank is on the CPU only."""
    several = workload.world_size > 1 or workload.device == "cpu"
    return several or workload.strategy.route == "native"


def collectives(workload: Workload) -> Volume:
    """Gradients all-reduced once per step in the dtype of the weights, buffers broadcast before it; or both
    in every micro-step.

    `torch/nn/parallel/distributed.py`: under `no_sync` neither gradients nor buffers cross the wire
    (`_pre_forward`, `_post_forward`, `will_sync_module_buffers`), so accumulation changes nothing.
    """
    return Volume(collectives=tuple(over_steps(workload, _step)))


def _step(workload: Workload, step: int) -> list[Collective]:
    reductions = _reductions(workload)
    rebuilds = step == (1 if reductions == 1 else 0) and not _searches(workload)
    found: list[Collective] = []
    if rebuilds:
        # After the first reduction the buckets follow the order in which gradients came:
        # `Reducer::sync_bucket_indices` (reducer.cpp) broadcasts, as int32, the index of every parameter and
        # the number of buckets, then the size of each bucket.
        numbers = len(workload.layout.trained) + 1 + bucket_count(workload)
        found += gathered("forward", REBUILT, [(numbers, numbers)], "int32", op="broadcast", calls=2)
    # `require_forward_param_sync` is left true by the last forward pass that synchronised; the forward
    # passes of an evaluation leave it false.
    broadcasts = reductions - workload.follows_evaluation(step)
    # `_sync_buffers`: all buffers, coalesced by dtype (`broadcast_buffers` is true by default).
    found += broadcasts * [
        Collective("forward", "broadcast", dtype, BUFFERS, size)
        for dtype, size in _by_dtype(workload.layout.buffers).items()
    ]
    for dtype, size in _by_dtype(workload.layout.trained).items():
        # Before the buckets are rebuilt there is one of unlimited size.
        one_bucket = (step == 0 and reductions == 1) or size <= FIRST_BUCKET_BYTES
        found += [
            Collective("backward", "all_reduce", dtype, term, size * passes, passes if one_bucket else None)
            for term, passes in reducing_passes(reductions)
        ]
    return found + _used_parameters(workload, step)


def _searches(workload: Workload) -> bool:
    """Whether DDP looks for unused parameters in each step; it never rebuilds its buckets then.

    `Reducer::should_rebuild_buckets` and `dynamic_graph_find_unused` (reducer.hpp).
    """
    return bool(workload.options.get("find_unused_parameters")) and not workload.options.get("static_graph")


def _reductions(workload: Workload) -> int:
    """Reductions per step: one rank under Trainer reduces in every micro-step, if only to itself.

    `Accelerator.no_sync` (accelerate 1.15) does nothing for one process, though on the CPU DDP wraps it.
    """
    alone = workload.world_size == 1 and workload.strategy.route == "trainer"
    return workload.accumulation_steps if alone else workload.reductions


def _used_parameters(workload: Workload, step: int) -> list[Collective]:
    """Where DDP searches in each step, and in the first of a static graph.

    `Reducer::all_reduce_local_used_map` (reducer.cpp) then reduces one int32 per parameter. Trainer sets
    `find_unused_parameters` for models of transformers unless it is told otherwise.
    """
    by_trainer = workload.strategy.route == "trainer" and not workload.like_for_like
    first_of_static = bool(workload.options.get("static_graph")) and step == 0
    if not (by_trainer or _searches(workload) or first_of_static):
        return []
    count = len(workload.layout.trained)
    passes = 1 if first_of_static else _reductions(workload)
    return gathered("backward", USED_PARAMETERS, [(count, count)], "int32", op="all_reduce", passes=passes)


def bucket_count(workload: Workload) -> int:
    """Buckets when gradients come in the reverse order of the parameters.

    `compute_bucket_assignment_by_size` (reducer.cpp) closes a bucket, per dtype, once it has reached its
    limit: FIRST_BUCKET_BYTES for the first, BUCKET_BYTES for the others.
    """
    open_bytes: dict[str, int] = {}
    limits: dict[str, int] = {}
    closed = 0
    for tensor in reversed(workload.layout.trained):
        size = open_bytes.get(tensor.dtype, 0) + tensor.bytes
        if size >= limits.get(tensor.dtype, FIRST_BUCKET_BYTES):
            closed, size = closed + 1, 0
            limits[tensor.dtype] = BUCKET_BYTES
        open_bytes[tensor.dtype] = size
    return closed + sum(size > 0 for size in open_bytes.values())


def _by_dtype(tensors: Sequence[Tensor]) -> dict[str, int]:
    return totals((tensor.dtype, tensor.bytes) for tensor in tensors)
