"""What cells send beyond the textbook, or less, and what the transport makes of it.

Only where every measured byte is as the closed form of the implementation expects: its terms then name the
cause. Anything else is a finding, not a surprise.
"""

from __future__ import annotations

from harness.compare.measures import (
    sent_bytes_per_step,
    textbook_bytes_per_step,
    transport_bytes_per_step,
)
from harness.compare.repeats import Repeats
from harness.compare.surprises.surprise import MEMORY, SMALL_SHARE, TRAFFIC, Behaviour, Sighting
from harness.compare.volume import textbook_differences, volume_differences
from harness.forms.network import EMULATED
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    UPDATED,
)
from harness.forms.textbook import TermDifference
from harness.forms.zero3.collectives import TIED_TERM
from harness.record import Record
from harness.record.workload import known_strategy, of_record

LEAST_EMULATED = 0.05
"""Of the counted bytes."""
MANY_CALLS = 2.0
"""Gathers relative to one per block."""
CALLS_EFFECT = 0.3
"""A gather costs latency, which bytes do not show: ranked as 30 % of bytes."""
FEWER_MICRO_STEPS = "Use fewer, larger micro-batches."

ALL_REDUCED = Behaviour(
    id="gradients-all-reduced",
    what="{figure} x the textbook's bytes: gradients are all-reduced, not reduce-scattered",
    advice="use_multi_rank_bucket_allreduce=false reaches the textbook, in more calls.",
    questions=TRAFFIC,
    since="DeepSpeed 0.12.4 (use_multi_rank_bucket_allreduce, true by default, "
    "https://github.com/deepspeedai/DeepSpeed/pull/4695); 0.12.3 reduced each part to its owner",
)
REDUCED_EVERY_MICRO_STEP = Behaviour(
    id="reduced-every-micro-step",
    what="{figure} x the textbook's bytes: gradients are reduced in every micro-step",
    advice="Accumulate with stage 1, which reduces once per step.",
    questions=TRAFFIC,
    since="DeepSpeed 0.12.0 to 0.19.8, runtime/engine.py, allreduce_gradients: stages 2 and 3 communicate "
    "before the boundary too",
)
MOVED_EVERY_MICRO_STEP = Behaviour(
    id="moved-every-micro-step",
    what="{figure} x the textbook's bytes: every micro-step gathers weights and reduces gradients",
    advice=FEWER_MICRO_STEPS,
    questions=TRAFFIC,
    since="DeepSpeed 0.19.8, runtime/zero/stage3.py, independent_gradient_partition_epilogue",
)
GATHERED_EVERY_MICRO_STEP = Behaviour(
    id="gathered-every-micro-step",
    what="{figure} x the textbook's bytes: weights are gathered in every micro-step",
    advice=FEWER_MICRO_STEPS,
    questions=TRAFFIC,
    packages=("torch",),
    since="torch 2.13, distributed/fsdp: the backward pass gives weights back",
)
ROOT_KEPT = Behaviour(
    id="root-not-resharded",
    what="{figure} x the textbook's bytes: the root unit stays gathered between forward and backward pass",
    advice="Nothing; the root's weights take memory meanwhile.",
    questions=TRAFFIC,
    packages=("torch",),
    since="torch 2.13, distributed/fsdp: FSDP1 always, fully_shard unless the root gets "
    "reshard_after_forward=True",
)
WEIGHTS_KEPT = Behaviour(
    id="weights-stay-gathered",
    what="{figure} x the textbook's bytes: small models stay gathered up to default thresholds",
    advice="To shard strictly set stage3_max_live_parameters, stage3_max_reuse_distance and "
    "stage3_param_persistence_threshold to 0.",
    questions=(*TRAFFIC, *MEMORY),
    since="DeepSpeed 0.19.8, runtime/zero/config.py",
)
TIED_TWICE = Behaviour(
    id="tied-weights-gathered-twice",
    what="{figure} x the textbook's bytes: tied weights are gathered at each use",
    advice="Leave stage3_max_reuse_distance above 0.",
    questions=TRAFFIC,
    since="DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py",
)
BY_TERM: dict[tuple[str, str], Behaviour] = {
    ("zero12", GRADIENTS): ALL_REDUCED,
    ("zero12", FURTHER_GRADIENTS): REDUCED_EVERY_MICRO_STEP,
    ("zero3", FORWARD): WEIGHTS_KEPT,
    ("zero3", BACKWARD): WEIGHTS_KEPT,
    ("zero3", UPDATED): WEIGHTS_KEPT,
    ("zero3", TIED_TERM): TIED_TWICE,
    ("fsdp1", BACKWARD): ROOT_KEPT,
    ("fsdp2", BACKWARD): ROOT_KEPT,
    **{("zero3", term): MOVED_EVERY_MICRO_STEP
       for term in (FURTHER_FORWARD, FURTHER_BACKWARD, FURTHER_GRADIENTS)},
    **{(family, term): GATHERED_EVERY_MICRO_STEP
       for family in ("fsdp1", "fsdp2") for term in (FURTHER_FORWARD, FURTHER_BACKWARD)},
}  # fmt: skip
"""By family and term of the closed form; other terms are shown with the remark of the closed form."""
MODULE_BY_MODULE = Behaviour(
    id="gathers-by-module",
    what="{figure} x as many gathers per forward pass as one per block: module by module",
    advice="Compare zero3:leaf_module=blocks, which gathers by block.",
    questions=TRAFFIC,
    since="DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py",
)


def find(group: Repeats) -> list[Sighting]:
    """Every one of a cell whose bytes were counted."""
    return [*_terms(group.record), *_emulated(group.record), *_by_module(group.record)]


def _terms(record: Record) -> list[Sighting]:
    """The terms of a behaviour together, relative to all that the textbook sends."""
    strategy, textbook = known_strategy(record), textbook_bytes_per_step(record)
    if strategy is None or not textbook or volume_differences(record) != []:
        return []
    surplus: dict[Behaviour, float] = {}
    for difference in textbook_differences(record) or ():
        behaviour = BY_TERM.get((strategy.family, difference.term)) or _unlisted(difference, strategy.family)
        surplus[behaviour] = surplus.get(behaviour, 0.0) + difference.difference
    return [
        Sighting(behaviour=behaviour, figure=1 + sent / textbook)
        for behaviour, sent in surplus.items()
        if abs(sent) >= SMALL_SHARE * textbook
    ]


def _unlisted(difference: TermDifference, family: str) -> Behaviour:
    remark = f" ({difference.remark})" if difference.remark else ""
    return Behaviour(
        id="other-traffic",
        what=f"{{figure}} x the textbook's bytes: {difference.term}{remark}",
        advice="No action: the implementation does so.",
        questions=TRAFFIC,
        packages=("deepspeed",) if family.startswith("zero") else ("torch",),
    )


def _emulated(record: Record) -> list[Sighting]:
    """What the transport sends for the same calls, relative to what is counted."""
    transport = record.world.collectives
    replaced = EMULATED.get(transport, {})
    counted, moved = sent_bytes_per_step(record), transport_bytes_per_step(record)
    if not replaced or not counted or moved is None or moved < (1 + LEAST_EMULATED) * counted:
        return []
    words = " and ".join(
        f"{one.replace('_', '-')} runs as {other.replace('_', '-')}" for one, other in replaced.items()
    )
    behaviour = Behaviour(
        id="transport-emulates",
        what=f"{{figure}} x the counted bytes cross the wire: {words}",
        advice="Compare counted bytes.",
        questions=TRAFFIC,
        packages=("torch",),
        cause="transport",
        since="torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp; confirmed by bytes on a wire "
        "(docs/bytes-on-the-wire.md)",
    )
    return [Sighting(behaviour=behaviour, figure=moved / counted)]


def _by_module(record: Record) -> list[Sighting]:
    """Counted calls of a forward pass, relative to one for each block and the root."""
    strategy, workload = known_strategy(record), of_record(record)
    if strategy is None or strategy.family != "zero3" or workload is None or record.windows is None:
        return []
    passes = record.windows.probed * record.world.accumulation_steps
    calls = sum(
        row.calls
        for row in record.comm
        if row.rank == 0 and row.phase == "forward" and row.op == "all_gather"
    )
    by_block = len(workload.layout.units())
    if not passes or calls < MANY_CALLS * by_block * passes:
        return []
    return [Sighting(behaviour=MODULE_BY_MODULE, figure=calls / passes / by_block, effect=CALLS_EFFECT)]
