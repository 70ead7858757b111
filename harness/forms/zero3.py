"""DeepSpeed ZeRO stage 3: when it gathers weights, which it keeps gathered, its states and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from harness.backends.options import SUB_GROUP_ELEMENTS
from harness.backends.presets import ZERO3_DEFAULTS, ZERO_LIMITS
from harness.forms.activations import SELECTIVE, blocks_between
from harness.forms.layout import DTYPE_BYTES, READ_ELSEWHERE, RETURNED, Layout, Tensor, Use, ceil_to, derived
from harness.forms.single import ADAM_MOMENTS, buffer_terms, cut_frozen, step_counters
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    NORM,
    OVERFLOW,
    UPDATED,
    Collective,
    ModelStates,
    Share,
    Term,
    Underived,
    Volume,
    gathered,
    merged,
    over_steps,
    states,
)
from harness.forms.workload import Role, Workload
from harness.forms.zero0 import (
    FP32_SURPLUS,
    SECOND_FP32_COPY,
    bucket_calls,
    bucket_elements,
    gradient_accumulation_bytes,
    preset_values,
    reduce_dtype,
)

OPTIONS = (*ZERO3_DEFAULTS, "stage3_prefetch_bucket_size", "leaf_module", "memory_efficient_linear")
"""Options of the backend that decide what is gathered when, and what that costs."""


@dataclass(frozen=True, kw_only=True)
class GatherLimits:
    """Limits in elements, as `PartitionedParameterCoordinator` (DeepSpeed 0.19.8) takes them."""

    persistence: int
    live: int
    reuse: int
    ahead: int
    parameters: int
    """Of the model."""
    blocks: tuple[str, ...]
    """Leaf modules: names of those that are gathered at once."""

    @cached_property
    def gathers_each_use(self) -> bool:
        """Whether each module's weights come for its own use and go after it."""
        return not self.reuse and not (self.live and self.ahead)

    @cached_property
    def keeps_for_backward(self) -> bool:
        """Whether everything that the forward pass gathers stays until the backward pass has used it.

        By reuse: no two uses are further apart than all uses together. By prefetch too: what is
        there already when the fetch queue passes its next use is not released (`__params_to_release`), and
        with room for the whole model the queue passes all uses at once.
        """
        uses = 2 * self.parameters
        if self.blocks:
            return False  # not derived: the reuse scan looks into all children of what it compares with
        return self.reuse >= uses or (self.live >= uses and self.ahead > self.parameters)

    def is_persistent(self, tensor: Tensor) -> bool:
        """`mark_persistent_parameters` (parameter_offload.py)."""
        return tensor.numel <= self.persistence

    def unit(self, tensor: Tensor) -> str:
        """The module with which a parameter is gathered."""
        block = next((name for name in self.blocks if tensor.name.startswith(f"{name}.")), None)
        return block or tensor.name.rpartition(".")[0]


@derived
def fetching(workload: Workload) -> GatherLimits:
    """Options as typed, else the preset's values, else the library's."""

    def value(name: str) -> int:
        given = workload.options.get(name)
        return int(preset_values(workload).get(name, ZERO_LIMITS[name]) if given is None else given)

    return GatherLimits(
        persistence=value("stage3_param_persistence_threshold"),
        live=value("stage3_max_live_parameters"),
        reuse=value("stage3_max_reuse_distance"),
        ahead=value("stage3_prefetch_bucket_size"),
        parameters=workload.layout.parameter_count,
        blocks=tuple(workload.layout.blocks) if workload.options.get("leaf_module") == "blocks" else (),
    )


def own_settings(workload: Workload) -> list[str]:
    """Options given that decide about gathering."""
    return [name for name in OPTIONS if workload.options.get(name) is not None]


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
    # Padded to N pieces, frozen ones too; a rank alone has views of its only piece (`NoGatherHandle`).
    kept = filter(fetching(workload).is_persistent, workload.layout.parameters)
    persistent = sum(ceil_to(t.numel, workload.world_size) for t in kept if workload.world_size > 1)
    return states(
        [
            *cut.terms("weights", "own pieces", width, host=workload.offloads_weights),
            # Cut as the others are (`Init._zero_init_param`).
            *cut_frozen(
                workload, partial(_share, workload, padding_name=pad), host=workload.offloads_weights
            ),
            *_second_copy(workload),
            Term(kind="gathered", name=PERSISTENT_PARAMETERS,
                 bytes=persistent * width, extra=True),
            *cut.terms("masters", masters, trained, host=offload, extra=fp32),
            Term(kind="gradients", name="own pieces", bytes=cut.own * width, host=offload),
            Term(kind="gradients", name=FP32_SURPLUS, bytes=cut.own * (accumulated - width), host=offload,
                 extra=True),
            Term(kind="gradients", name=pad, bytes=cut.padding * accumulated, host=offload, extra=True),
            Term(kind="gradients", name="second gradient for the offloaded optimizer",
                 bytes=(cut.own + cut.padding) * trained if offload else 0, host=True, extra=True),
            *cut.terms("optimizer", "Adam's moments of own pieces", ADAM_MOMENTS * trained, host=offload),
            step_counters(len(updated_tensors(workload)), workload),
            Term(kind="communication", name=REDUCTION_BUCKET,
                 bytes=bucket_elements(workload) * DTYPE_BYTES[reduce_dtype(workload)], extra=True),
            *buffer_terms(workload),
        ]
    )  # fmt: skip


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


def _share(workload: Workload, parameters: Sequence[Tensor], padding_name: str) -> Share:
    """One rank's pieces of some parameters."""
    pieces = [(t.numel, -(-t.numel // workload.world_size)) for t in parameters]
    own = sum(max(0, min(numel - piece * workload.rank, piece)) for numel, piece in pieces)
    return Share(own=own, padding=sum(piece for _, piece in pieces) - own, padding_name=padding_name)


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each sub-group, padding included: one flat tensor that is stepped by itself
    (`_optimizer_step`); `_create_fp16_sub_groups` closes a sub-group at the size."""
    limit = int(workload.options.get("sub_group_size") or SUB_GROUP_ELEMENTS)
    found: list[list[int]] = []
    for group in workload.layout.update_groups():
        count = 0
        for parameter in group:
            count += -(-parameter.numel // workload.world_size)
            if count >= limit:
                found.append([count])
                count = 0
        if count:
            found.append([count])
    return found


SHARED_TERM = "shared weights gathered at each use"


def uses_of(layout: Layout, tensor: Tensor) -> tuple[Use, ...] | None:
    """Uses of a parameter; None: one, or one by each of its names."""
    return None if layout.uses is None else layout.uses.get(tensor.name)


def uses_unknown(workload: Workload) -> str | None:
    """Why it is not known how often weights are gathered that are gathered at each use; None: it is."""
    layout = workload.layout
    if layout.uses is None:
        return (
            "which modules of the model run, and how often, could not be determined: its loss does not run "
            "on tensors without values (torch's meta device), or it recomputes modules by itself"
        )
    elsewhere = [name for name, uses in layout.uses.items() if READ_ELSEWHERE in uses]
    if elsewhere:
        return (
            f"'{elsewhere[0]}' is read outside of the module that owns it, by another or by the loss; when "
            "ZeRO-3 gathers such a parameter is not modelled"
        )
    early = [name for name, uses in layout.uses.items() if RETURNED in uses and uses[0] != RETURNED]
    if early and 0 in workload.steps:
        return (
            f"how often the first forward pass gathers '{early[0]}', which a module returns, is not modelled"
        )
    names = Counter(layout.tied.values())
    for first, further in names.items():
        if further > 1 and first not in layout.uses:
            return (
                f"'{first}' is the weight of more than two modules: which run, and which find it gathered by "
                "another in the backward pass, is not known from their names"
            )
    blocks = tuple(f"{block}." for block in layout.blocks)
    if workload.activation_checkpointing and any(name.startswith(blocks) for name in layout.uses):
        return "what ZeRO-3 gathers to recompute a block whose weights are shared is not modelled"
    return None


def stays_gathered(layout: Layout, tensor: Tensor) -> bool:
    """Whether ZeRO-3 keeps a weight from its first use until the update: its module returns it, and whoever
    it is given to may read it at any time (`is_external_param`, `_post_forward_module_hook` in
    parameter_offload.py, `release_sub_module`; released by `partition_all_parameters`)."""
    return RETURNED in (uses_of(layout, tensor) or ())


def shared_gathers(
    workload: Workload, phase: str, fetched: Sequence[Tensor], passes: int, *, first: Role = "world"
) -> list[Collective]:
    """Gathers in one pass of a phase of parameters with uses of their own; `first`: first use's group."""
    layout, found = workload.layout, []
    counted: set[str] = set()
    for tensor in fetched:
        uses = uses_of(layout, tensor)
        if uses is None or stays_gathered(layout, tensor):
            continue
        times = _gathers(uses, backward=phase == "backward")
        if not times:
            continue
        module = tensor.name.rpartition(".")[0]
        size = tensor.numel, ceil_to(tensor.numel, workload.world_size)
        for count, role in ((1, first), (times - 1, workload.regathered_in)):
            found += gathered(
                phase,
                SHARED_TERM,
                [size] * count,
                workload.held_dtype(tensor),
                # A module gathers all of its parameters in one call.
                calls=0 if module in counted else count,
                passes=passes,
                role=role,
            )
        counted.add(module)
    return found


def _gathers(uses: Sequence[Use], *, backward: bool) -> int:
    """A module gathers what it finds released, and releases it behind itself.

    In the backward pass what releases hangs on the module's inputs (`_post_backward_module_hook`,
    parameter_offload.py): without a gradient there, as for token ids, the weight stays gathered until the
    pass has ended (`release_backward_leftovers`), and other modules find it. So it does in all but the last
    run of a module, whose count of open gradients each run begins anew (`ds_grads_remaining`).
    """
    if not backward:
        return len(uses)
    times = 0
    for use in reversed(uses):
        if use == "forward only":
            continue
        times += 1
        if use in ("inputs without gradient", "earlier run of its module"):
            break
    return times


TRACED_FROM_PASS = 2
"""Forward passes until the fetch trace is complete and its agreement among the ranks was checked."""
TRACE_CHECK = Underived(
    phase="forward",
    dtypes=("int64",),
    reason="in its first two forward passes ZeRO-3 broadcasts its trace of modules to compare it between the "
    "ranks (assert_ints_same_as_other_ranks), 8 bytes for each module that ran, those without parameters "
    "too, which a job does not tell",
)
RECOMPUTED = "weights gathered to recompute activations"
TIED_TERM = "tied weights gathered at each use"
GATHERED_ONCE = "weights stay gathered for the backward pass (max_reuse_distance, max_live_parameters)"
FLOW_UNKNOWN = (
    "with frozen weights ZeRO-3 gathers for the backward pass only what gradients flow through, which could "
    "not be determined for this model"
)
PERSISTENT = "parameters below the persistence threshold stay gathered, and are gathered after the update"


def collectives(workload: Workload) -> Volume:
    """Weights gathered module by module, gradients reduce-scattered in every micro-step.

    `PartitionedParameterCoordinator` fetches what a module needs and is not there, and releases it after
    the module unless it persists or is used again within the reuse distance
    (partitioned_param_coordinator.py).
    """
    if unknown := _unknown(workload):
        return Volume(unknown=unknown)
    found, how = over_steps(workload, _step), fetching(workload)
    remarks = [(FORWARD, PERSISTENT)] if how.persistence else []
    remarks += [(BACKWARD, GATHERED_ONCE)] if how.keeps_for_backward else []
    underived = (TRACE_CHECK,) if _traces(workload) else ()
    return Volume(collectives=tuple(found), remarks=tuple(remarks), underived=underived)


def _traces(workload: Workload) -> bool:
    """Whether steps that are counted are among those in which the trace is recorded and checked.

    Until it is complete each module gives back everything it gathered, persistent parameters too
    (`release_sub_module`): like for like that is what happens anyway.
    """
    steps = workload.steps
    runs = sum(not name for name, _ in workload.layout.unit_calls or ())
    if runs > 1:
        return True  # each run of the whole model is one, and passes that differ begin the trace anew
    return bool(steps) and steps[0] * workload.accumulation_steps < TRACED_FROM_PASS


def _unknown(workload: Workload) -> str | None:
    how = fetching(workload)
    gives_back = how.gathers_each_use and not how.persistence
    plain = not (workload.activation_checkpointing or workload.evaluation_every)
    if _traces(workload) and not (gives_back and plain):
        return (
            "ZeRO-3 records its trace of modules in the first two forward passes, gathers otherwise than "
            "later meanwhile, and checks it between the ranks; count later steps (measure.warmup_steps)"
        )
    if workload.layout.without_gradient is None:
        return FLOW_UNKNOWN
    if workload.layout.frozen and workload.second_copy_ranks:
        return "from which step on frozen weights have a second copy (hpz) is not modelled"
    if workload.layout.frozen and workload.activation_checkpointing:
        return "what ZeRO-3 gathers to recompute blocks with frozen weights is not modelled"
    if workload.activation_checkpointing and how.blocks:
        return "what ZeRO-3 gathers to recompute a block that it gathers at once is not modelled"
    if workload.activation_checkpointing == SELECTIVE:
        return "where recomputation that keeps matrix products stops in a block is not modelled"
    if how.gathers_each_use and workload.activation_checkpointing and workload.recomputed_until is None:
        return (
            "recomputation stops in the module of a block that runs last and leaves its weights gathered for "
            "the backward pass (torch.utils.checkpoint, early stop); that module is not modelled for "
            "this architecture (harness/forms/activations.py)"
        )
    if how.gathers_each_use and (unknown := uses_unknown(workload)):
        return unknown
    if how.gathers_each_use or how.keeps_for_backward:
        return None
    if not own_settings(workload):
        return (
            "above 5e8 parameters what ZeRO-3 keeps gathered under its default reuse distance and fetches "
            "ahead depends on the order of all modules that run, those without parameters too "
            "(PartitionedParameterCoordinator); use runtime.preset=like-for-like"
        )
    return (
        f"what ZeRO-3 keeps gathered under {', '.join(own_settings(workload))} depends on the order of all "
        "modules that run, those without parameters too (PartitionedParameterCoordinator)"
    )


def _sizes(workload: Workload, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Each parameter is cut into equal partitions (`Init._partition`, `_aligned_size`)."""
    return [(tensor.numel, ceil_to(tensor.numel, workload.world_size)) for tensor in tensors]


def _pass(
    workload: Workload, phase: str, term: str, passes: int, found: list[Collective], *, anew: bool = False
) -> None:
    """What one pass gathers, `passes` times; `anew`: weights were updated since they were gathered last.

    With hpZ a weight that was gathered leaves a copy in each group of ranks as it is released, from which the
    group gathers it until the update (`Init._partition_param_sec`, `invalidate_secondary_tensor`).
    """
    if workload.world_size == 1 or not passes:
        return  # `_no_gather_coalesced`
    layout, how = workload.layout, fetching(workload)
    fetched = [t for t in layout.parameters if not how.is_persistent(t) and uses_of(layout, t) != ()]
    kept = [t for t in fetched if stays_gathered(layout, t)] if anew else []
    fetched = [t for t in fetched if not stays_gathered(layout, t)]
    again = workload.regathered_in
    first: Role = "world" if anew else again
    if how.gathers_each_use:
        found += shared_gathers(workload, phase, fetched, passes, first=first)
        fetched = [t for t in fetched if uses_of(layout, t) is None]
        uses = [t for t in fetched if phase != "backward" or _in_backward(workload, t.name)]
        found += _gathered(workload, phase, term, uses + kept, passes, role=first)
        # A tied weight is fetched for every module that uses it, and released after each.
        tied = [
            t
            for name, first in layout.tied.items()
            for t in fetched
            if t.name == first and (phase != "backward" or _in_backward(workload, name))
        ]
        found += _gathered(workload, phase, TIED_TERM, tied, passes, calls=len(tied), role=again)
        if phase == "backward" and workload.activation_checkpointing:
            # Each block, but for the module in which recomputation stops: torch.utils.checkpoint does as the
            # last saved tensor is there again (`_StopRecomputationError`), so that this module's post-forward
            # hook, which would release its weights, does not run.
            again_run = layout.blocks[:: blocks_between(workload.activation_checkpointing)]
            last = tuple(f"{block}.{workload.recomputed_until}." for block in again_run)
            blocks = tuple(f"{block}." for block in again_run)
            inside = (t for t in layout.parameters if t.name.startswith(blocks))
            recomputed = [t for t in inside if not (t.name.startswith(last) or how.is_persistent(t))]
            found += _gathered(workload, phase, RECOMPUTED, recomputed, passes, role=again)
        return
    # Everything is used again within the reuse distance, so that forward fetches it and backward finds
    # it. The prefetcher joins what modules need, so the number of calls is not the modules'.
    if phase != "backward" and (fetched or kept):
        moved = _gathered(workload, phase, term, fetched + kept, passes, role=first)
        found += [replace(c, calls=None) if c.calls else c for c in moved]


def _gathered(
    workload: Workload,
    phase: str,
    term: str,
    tensors: Sequence[Tensor],
    passes: int = 1,
    *,
    calls: int | None = None,
    role: Role = "world",
) -> list[Collective]:
    """Gathered in the dtypes in which they are held, by default with a call for each module, or block, that
    gathers all of its own parameters at once."""
    found: list[Collective] = []
    for dtype, alike in workload.by_held_dtype(tensors).items():
        count = len(set(map(fetching(workload).unit, alike))) if calls is None else len(alike)
        sizes = _sizes(workload, alike)
        found += gathered(phase, term, sizes, dtype, calls=count, passes=passes, role=role)
    return found


def _in_backward(workload: Workload, name: str) -> bool:
    """Whether the backward pass uses a parameter's module.

    A module whose output needs no gradient has no pre-backward hook at work (parameter_offload.py): with
    adapters that is what runs before the first of them.
    """
    without = workload.layout.without_gradient or ()
    return name.rpartition(".")[0] not in without


def _step(workload: Workload, step: int) -> list[Collective]:
    found: list[Collective] = []
    further = workload.accumulation_steps - 1
    # Without a backward pass an evaluation leaves what the reuse distance covers gathered.
    evaluated = workload.follows_evaluation(step)
    there_already = evaluated and fetching(workload).keeps_for_backward
    _pass(workload, "forward", FORWARD, 0 if there_already else 1, found, anew=not evaluated)
    _pass(workload, "forward", FURTHER_FORWARD, further, found)
    _pass(workload, "backward", BACKWARD, 1, found)
    _pass(workload, "backward", FURTHER_BACKWARD, further, found)
    sizes = _sizes(workload, workload.layout.reached)
    calls, dtype = bucket_calls(workload), reduce_dtype(workload)
    # `independent_gradient_partition_epilogue` runs after every backward pass (stage3.py).
    for term, passes in ((GRADIENTS, 1), (FURTHER_GRADIENTS, further)):
        reduced = gathered("backward", term, sizes, dtype, op="reduce_scatter", calls=1, passes=passes)
        found += reduced if calls else [replace(c, calls=None) if c.calls else c for c in reduced]
    # One sum of squares per sub-group (`_get_norm_groups`, stage3.py): fp64 where the device has it
    # (`get_norm_dtype`), fp32 with an offloaded optimizer (`complete_grad_norm_calculation_for_cpu_offload`).
    groups = len(updated_tensors(workload))
    norm_dtype = "float64" if workload.has_fp64 and workload.offload == "none" else "float32"
    found.append(Collective("step", "all_reduce", norm_dtype, NORM, DTYPE_BYTES[norm_dtype] * groups, groups))
    if workload.precision == "fp16-mixed":
        found.append(Collective("step", "all_reduce", "uint8", OVERFLOW, 1))
    # `_post_step` (stage3.py) gathers persistent parameters again, one by one, after the update.
    kept = list(filter(fetching(workload).is_persistent, workload.layout.parameters))
    if workload.world_size > 1:
        found += _gathered(workload, "step", UPDATED, kept, calls=len(kept))
    return found
