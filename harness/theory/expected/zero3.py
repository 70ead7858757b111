"""DeepSpeed 0.19.8, ZeRO stage 3, natively and through Accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness.backends.presets import ZERO3_DEFAULTS
from harness.theory.expected.setting import (
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
    Setting,
    Tensor,
    Underived,
    Volume,
    gathered,
    over_steps,
    padded,
)
from harness.theory.expected.zero import broadcast_model, bucket_calls, optimizer_groups, reduce_dtype

PERSISTENCE_ELEMENTS = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
REUSE_ELEMENTS = min(
    ZERO3_DEFAULTS["stage3_max_reuse_distance"], ZERO3_DEFAULTS["stage3_max_live_parameters"]
)
"""Like for like all of these are 0."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""`sub_group_size`: norms are reduced per sub-group of a parameter group."""
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
PERSISTENT = "parameters below the persistence threshold stay gathered, and are gathered after the update"


def zero3_volume(setting: Setting) -> Volume:
    """Weights gathered module by module, gradients reduce-scattered in every micro-step.

    `PartitionedParameterCoordinator` fetches what a module needs and is not there, and releases it after
    the module unless it persists or is used again within the reuse distance
    (partitioned_param_coordinator.py).
    """
    unknown = _unknown(setting)
    found = [*_setup(setting), *_digest(setting)]
    if unknown:
        return Volume(collectives=tuple(found), unknown=unknown)
    found += over_steps(setting, _step) + _evaluation(setting)
    remarks = []
    if not setting.like_for_like:
        remarks = [(FORWARD, PERSISTENT), (BACKWARD, GATHERED_ONCE)]
    underived = (TRACE_CHECK,) if _traces(setting) else ()
    return Volume(collectives=tuple(found), remarks=tuple(remarks), underived=underived)


def _traces(setting: Setting) -> bool:
    """Whether steps that are counted are among those in which the trace is recorded and checked.

    Until it is complete each module gives back everything it gathered, persistent parameters too
    (`release_sub_module`): like for like that is what happens anyway.
    """
    return bool(setting.steps) and setting.steps[0] * setting.accumulation_steps < TRACED_FROM_PASS


def _unknown(setting: Setting) -> str | None:
    plain = not (setting.activation_checkpointing or setting.evaluation_every)
    if _traces(setting) and not (setting.like_for_like and plain):
        return (
            "ZeRO-3 records its trace of modules in the first two forward passes, gathers otherwise than "
            "later meanwhile, and checks it between the ranks; count later steps (measure.warmup_steps)"
        )
    if setting.like_for_like and setting.activation_checkpointing and setting.recomputed_until is None:
        return (
            "recomputation stops in the module of a block that runs last and leaves its weights gathered for "
            "the backward pass (torch.utils.checkpoint, early stop); which one that is was not looked up for "
            "this architecture (harness/theory/recomputation.py)"
        )
    if not setting.like_for_like and 2 * setting.parameter_count > REUSE_ELEMENTS:
        return (
            "above 5e8 parameters what ZeRO-3 keeps gathered under its default reuse distance and fetches "
            "ahead depends on the order of all modules that run, those without parameters too "
            "(PartitionedParameterCoordinator); use runtime.preset=like-for-like"
        )
    return None


def _persistent(setting: Setting, tensor: Tensor) -> bool:
    """`mark_persistent_parameters` (parameter_offload.py)."""
    return not setting.like_for_like and tensor.numel <= PERSISTENCE_ELEMENTS


def _sizes(setting: Setting, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Each parameter is cut into equal partitions (`Init._partition`, `_aligned_size`)."""
    return [(tensor.numel, padded(tensor.numel, setting.world_size)) for tensor in tensors]


def _modules(tensors: Iterable[Tensor]) -> int:
    """Modules that own parameters: each gathers all of its own in one call."""
    return len({tensor.name.rpartition(".")[0] for tensor in tensors})


def _pass(setting: Setting, phase: str, term: str, passes: int, found: list[Collective]) -> None:
    """What one pass gathers, `passes` times."""
    if setting.world_size == 1 or not passes:
        return  # `_no_gather_coalesced`
    dtype = setting.compute_dtype
    if setting.like_for_like:
        calls = _modules(setting.parameters)
        found += gathered(phase, term, _sizes(setting, setting.parameters), dtype, calls=calls, passes=passes)
        # A tied weight is fetched for every module that uses it, and released after each.
        tied = [t for first in setting.tied.values() for t in setting.parameters if t.name == first]
        found += gathered(phase, TIED_TERM, _sizes(setting, tied), dtype, passes=passes)
        if phase == "backward" and setting.activation_checkpointing:
            again = _recomputed(setting)
            found += gathered(
                phase, RECOMPUTED, _sizes(setting, again), dtype, calls=_modules(again), passes=passes
            )
        return
    # Everything is used again within the reuse distance, so that forward fetches it and backward finds
    # it. The prefetcher joins what modules need, so the number of calls is not the modules'.
    fetched = [t for t in setting.parameters if not _persistent(setting, t)]
    if phase != "backward" and fetched:
        found += [
            c if not c.calls else _without_calls(c)
            for c in gathered(phase, term, _sizes(setting, fetched), dtype, passes=passes)
        ]


def _recomputed(setting: Setting) -> list[Tensor]:
    """What recomputation gathers that the backward pass gathers again: each block, but for the module in
    which it stops.

    torch.utils.checkpoint stops once the last saved tensor is there again (`_StopRecomputationError`), so
    this module's post-forward hook, which would release its weights, does not run.
    """
    last = tuple(f"{block}.{setting.recomputed_until}." for block in setting.blocks)
    blocks = tuple(f"{block}." for block in setting.blocks)
    return [t for t in setting.parameters if t.name.startswith(blocks) and not t.name.startswith(last)]


def _without_calls(collective: Collective) -> Collective:
    return replace(collective, calls=None)


def _step(setting: Setting, step: int) -> list[Collective]:
    found: list[Collective] = []
    further = setting.accumulation_steps - 1
    # Without a backward pass an evaluation leaves what the reuse distance covers gathered.
    there_already = setting.follows_evaluation(step) and not setting.like_for_like
    _pass(setting, "forward", FORWARD, 0 if there_already else 1, found)
    _pass(setting, "forward", FURTHER_FORWARD, further, found)
    _pass(setting, "backward", BACKWARD, 1, found)
    _pass(setting, "backward", FURTHER_BACKWARD, further, found)
    sizes = _sizes(setting, setting.parameters)
    calls, dtype = bucket_calls(setting), reduce_dtype(setting)
    # `independent_gradient_partition_epilogue` runs after every backward pass (stage3.py).
    for term, passes in ((GRADIENTS, 1), (FURTHER_GRADIENTS, further)):
        reduced = gathered("backward", term, sizes, dtype, op="reduce_scatter", calls=1, passes=passes)
        found += reduced if calls else [_without_calls(c) if c.calls else c for c in reduced]
    return found + _norms(setting) + _persisting(setting)


def _norms(setting: Setting) -> list[Collective]:
    """One sum of squares per sub-group (`_get_norm_groups`, stage3.py); in fp16 the overflow flag.

    fp64 where the device has it (`get_norm_dtype`), fp32 with an offloaded optimizer
    (`complete_grad_norm_calculation_for_cpu_offload`).
    """
    groups = sum(_sub_groups(setting, group) for group in optimizer_groups(setting))
    wide = setting.fp64_norm and setting.offload == "none"
    found = [
        Collective(
            phase="step", op="all_reduce", dtype="float64" if wide else "float32", term=NORM,
            payload_bytes=(8 if wide else 4) * groups, calls=groups,
        )
    ]  # fmt: skip
    if setting.precision == "fp16-mixed":
        found.append(Collective(phase="step", op="all_reduce", dtype="uint8", term=OVERFLOW, payload_bytes=1))
    return found


def _sub_groups(setting: Setting, group: list[Tensor]) -> int:
    """`_create_fp16_sub_groups` (stage3.py) closes one when it has reached `sub_group_size`."""
    partitions = [padded(tensor.numel, setting.world_size) // setting.world_size for tensor in group]
    if sum(partitions) <= SUB_GROUP_ELEMENTS:
        return 1
    count, held = 0, 0
    for index, size in enumerate(partitions):
        held += size
        if held >= SUB_GROUP_ELEMENTS or index == len(partitions) - 1:
            count, held = count + 1, 0
    return count


def _persisting(setting: Setting) -> list[Collective]:
    """`_post_step` (stage3.py) gathers persistent parameters again, one by one, after the update."""
    kept = [tensor for tensor in setting.parameters if _persistent(setting, tensor)]
    if setting.world_size == 1:
        return []
    return gathered("step", UPDATED, _sizes(setting, kept), setting.compute_dtype)


def _evaluation(setting: Setting) -> list[Collective]:
    found: list[Collective] = []
    passes = setting.evaluation_passes if setting.like_for_like else setting.evaluation_spells
    _pass(setting, "evaluation", FORWARD, passes, found)
    return found


def _setup(setting: Setting) -> list[Collective]:
    """The engine broadcasts every parameter, `Init._zero_init_param` once more while it partitions them,
    and `create_reduce_and_remove_grad_hooks` (stage3.py) gathers each to attach its hook."""
    hooked = gathered(
        "setup", "weights gathered to attach hooks", _sizes(setting, setting.parameters),
        setting.compute_dtype,
    )  # fmt: skip
    barriers = Collective(
        phase="setup", op="barrier", dtype="none", term="barriers", payload_bytes=0, calls=3
    )
    return [*broadcast_model(setting), *broadcast_model(setting), barriers, *hooked]


def _digest(setting: Setting) -> list[Collective]:
    """`safe_get_full_fp32_param` gathers the fp32 partition of every parameter (`_fp32_state_allgather`)."""
    if not setting.digest:
        return []
    dtype = setting.master_dtype
    return gathered("digest", "weights gathered for their digest", _sizes(setting, setting.parameters), dtype)
