"""What FSDP1 and FSDP2 of torch 2.13 do alike: units that are gathered, reduced and given back or kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.forms import terms
from harness.forms.layout import DTYPE_BYTES
from harness.forms.workload import Role, Workload

REDUCED_AS_COMPUTED = "gradients are reduced in the dtype of the computation, not in fp32"
KEPT_BY_EVALUATION = "units that an evaluation left gathered are not gathered again"


@dataclass(frozen=True, kw_only=True)
class GatherUnit:
    """Modules whose weights are gathered at once."""

    elements: int
    padded: int
    """Elements with padding to whole shards."""
    kept: bool
    """Whether its weights stay gathered between forward and backward pass."""
    astray: bool = False
    """Whether further micro-steps gather it again at the end of their backward pass: torch's prefetch goes by
    the order of forward passes, and takes the last unit of the micro-step before for the next one needed. A
    micro-step that follows uses what was gathered; the end of the step drops it."""
    dtype: str | None = None
    """In which it is gathered; None: the compute dtype. Counts of elements are in this dtype."""
    reduced: tuple[int, int] | None = None
    """Elements whose gradients are reduced, and those with padding; None: all of them."""
    held_bytes: int = 0
    """What a rank of FSDP2 holds of it between uses, padding included."""


def blocks_without_gradient(workload: Workload) -> str | None:
    """Why the backward pass has no closed form; None: it goes through every block."""
    layout, units = workload.layout, dict(workload.layout.units())
    for name in layout.blocks:
        if name in units and all(map(layout.is_frozen, units[name])):
            return (
                f"{name} trains nothing; blocks before the first that does have no backward pass, and what "
                "FSDP gathers and prefetches for them is not modelled"
            )
    return None


def irregular_units(workload: Workload) -> str | None:
    """Why it is not known when units are gathered; None: each runs once, with a backward pass, or FSDP2
    follows their order."""
    calls = workload.layout.unit_calls
    if calls is None:
        return (
            "which blocks run, and how often, could not be determined: the loss does not run on tensors "
            "without values (torch's meta device), or blocks lie within blocks"
        )
    runs = Counter(name for name, _ in calls)
    if names := [name for name, count in runs.items() if count > 1]:
        return f"{names[0] or 'the model'} runs {runs[names[0]]} times; when it is gathered is not modelled"
    if calls:
        return "blocks run without a backward pass, or not at all; when they are gathered is not modelled"
    return None


def reduced_sizes(units: Sequence[GatherUnit]) -> list[tuple[int, int]]:
    """(elements, padded elements) of the gradients of each unit; units without any are left out."""
    found = [unit.reduced or (unit.elements, unit.padded) for unit in units]
    return [sizes for sizes in found if sizes[0]]


def gathers(
    workload: Workload,
    phase: str,
    term: str,
    units: Sequence[GatherUnit],
    *,
    passes: int = 1,
    again: bool = False,
) -> list[terms.Collective]:
    """Units gathered, each in its dtype; `again`: from what the forward pass left behind.

    `FSDPParamGroup.reshard` leaves pieces to a group of ranks after the forward pass where
    `reshard_after_forward` is a number, and `unshard` gathers them there.
    """
    role, found = shard_role(workload), []
    if again and workload.second_copy_ranks:
        role = workload.regathered_in
    kinds = dict.fromkeys(unit.dtype or workload.compute_dtype for unit in units)
    for dtype in kinds:
        alike = (unit for unit in units if (unit.dtype or workload.compute_dtype) == dtype)
        sizes = [(unit.elements, unit.padded) for unit in alike]
        found += terms.gathered(phase, term, sizes, dtype, role=role, passes=passes)
    return found


def shard_role(workload: Workload) -> Role:
    """The shard group is the world unless the mesh has replicas."""
    return "world" if workload.shards == workload.world_size else "shard"


def reduce_dtype(workload: Workload) -> str:
    """The policy's `reduce_dtype`, which like for like is fp32 when mixed; else the compute dtype.

    `_init_param_reduce_dtypes` (FSDP1, _flat_param.py), `foreach_reduce` (FSDP2, _fsdp_collectives.py).
    """
    pinned = workload.like_for_like and workload.strategy.sets_reduce_dtype
    asked = workload.options.get("reduce_dtype") == "fp32"
    return "float32" if asked or (workload.mixed and pinned) else workload.compute_dtype


def reduction_remarks(workload: Workload) -> list[tuple[str, str]]:
    """Why mixed precision sends fewer bytes of gradients than reductions in fp32 would."""
    low = workload.mixed and reduce_dtype(workload) != "float32"
    return [(terms.GRADIENTS, REDUCED_AS_COMPUTED)] if low else []


def gathers_and_reductions(
    workload: Workload, units: Sequence[GatherUnit], step: int, *, kept_within_step: bool
) -> list[terms.Collective]:
    """One step: weights gathered in every micro-step, gradients reduced in the last one or in each.

    The backward pass gives weights back; `kept_within_step`: it does so in the last micro-step only.
    """
    further = workload.accumulation_steps - 1
    back = [unit for unit in units if not unit.kept]
    # After an evaluation, units that keep their weights are still gathered.
    first = back if workload.follows_evaluation(step) else units
    again = 0 if kept_within_step else further
    straight, astray = ([unit for unit in units if unit.astray is is_so] for is_so in (False, True))
    found = [
        *gathers(
            workload, "forward", terms.FORWARD, first, again=workload.follows_evaluation(step)
        ),
        *gathers(workload, "forward", terms.FURTHER_FORWARD, straight, passes=again),
        *gathers(workload, "forward", terms.FURTHER_FORWARD, astray, passes=min(again, 1)),
        *gathers(workload, "backward", terms.BACKWARD, back, again=True),
        *gathers(workload, "backward", terms.FURTHER_BACKWARD, back, passes=further, again=True),
        *gathers(workload, "backward", terms.FURTHER_BACKWARD, astray, passes=further),
    ]  # fmt: skip
    return found + reductions(workload, units)


def all_reduced(workload: Workload, sizes: terms.Sizes) -> list[terms.Collective]:
    """Gradients of one step where every rank keeps all of each unit's."""
    return [
        collective
        for term, passes in terms.reducing_passes(workload.reductions)
        for collective in terms.gathered(
            "backward", term, sizes, reduce_dtype(workload), op="all_reduce", passes=passes
        )
    ]


def reductions(workload: Workload, units: Sequence[GatherUnit]) -> list[terms.Collective]:
    """Gradients of one step, reduced in its last micro-step or in each."""
    role, sizes, dtype = shard_role(workload), reduced_sizes(units), reduce_dtype(workload)
    found: list[terms.Collective] = []
    for term, passes in terms.reducing_passes(workload.reductions):
        found += terms.gathered("backward", term, sizes, dtype, op="reduce_scatter", role=role, passes=passes)
        if role == "shard":
            across = terms.REPLICAS if term == terms.GRADIENTS else term
            found += _across_replicas(workload, units, across, passes)
    return found


def _across_replicas(
    workload: Workload, units: Sequence[GatherUnit], term: str, passes: int
) -> list[terms.Collective]:
    """Each rank all-reduces its reduced shard of every unit with the ranks that hold the same.

    `_reduce_grad` over `_inter_node_pg` (FSDP1, _runtime_utils.py), `foreach_reduce` (FSDP2).
    """
    dtype, shards = reduce_dtype(workload), workload.shards
    width = DTYPE_BYTES[dtype]
    reduced = reduced_sizes(units)
    total = passes * (sum(padded for _, padded in reduced) // shards * width)
    exact = passes * (sum(count for count, _ in reduced) * width // shards)
    found = [terms.Collective("backward", "all_reduce", dtype, term, exact, passes * len(reduced), "replica")]
    if total > exact:
        found.append(
            terms.Collective("backward", "all_reduce", dtype, terms.PADDING, total - exact, 0, "replica")
        )
    return found


def overflow(workload: Workload, role: Role) -> list[terms.Collective]:
    """GradScaler's flag, in fp16 alone."""
    if workload.precision != "fp16-mixed":
        return []
    return [terms.Collective("step", "all_reduce", "float32", terms.OVERFLOW, 4, role=role)]


def norm(workload: Workload) -> terms.Collective:
    """`backends/optimizer/gradients.py`, global_norm: an fp64 sum of squares over a shard group.

    Trainer has the library clip: FSDP1's `clip_grad_norm_` reduces one fp32 number;
    `torch.nn.utils.clip_grad_norm_` stacks norms of DTensors, and each is reduced for itself.
    """
    dtype, numbers = "float64", 1
    if workload.strategy.route == "trainer":
        is_flat, layout = workload.strategy.of_family.flat_gradients, workload.layout
        dtype, numbers = ("float32", 1) if is_flat else (workload.master_dtype, len(layout.trained))
    size = numbers * DTYPE_BYTES[dtype]
    return terms.Collective("step", "all_reduce", dtype, terms.NORM, size, role=shard_role(workload))
