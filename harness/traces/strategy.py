"""Which strategy the collectives of a rank look like, and what the closed forms expect of it.

A guess from volumes: annotations of libraries (`FSDP::`, `DistributedDataParallel.forward`) name the library,
the ratio of what is gathered to what is reduced the sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.forms.terms import ring_sent_bytes
from harness.forms.textbook import textbook_sent_bytes
from harness.traces.analysis import RankTrace
from harness.traces.collectives import Call
from harness.traces.kinds import element_bytes

LEAST_SHARE = 0.04
"""Of all bytes, for an operation to count: norms, losses and indices stay below."""
REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
AGAIN, ONCE = (1.6, 2.3), (0.75, 1.3)
"""Elements gathered per element reduced: weights gathered for both passes, or for one."""
MOST_EQUAL_SIZES = 2
"""Of many all-reduces that are no buckets: one follows attention, the other the layer behind it."""
CLOSED_FORMS = {"none": "DDP", "grad-op": "weights gathered once", "full-shard": "full sharding"}
SCATTERED = "ZeRO-1 and ZeRO-2 that scatter gradients in place of all-reducing them"
FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass(kw_only=True)
class Likeness:
    """What a rank's collectives look like; figures are per step, or of the trace where none is annotated."""

    strategy: str | None
    """None: nothing is recognised."""
    evidence: list[str] = field(default_factory=list)
    unit_bytes: list[int] = field(default_factory=list)
    """Payloads of its buckets or units, in order, of one step."""
    parameters: int | None = None
    """Elements reduced per step: the trained parameters with the padding of shards."""
    per: str = "step"
    sent_bytes: float | None = None
    """What the rank sends on a ring; None: a group's size or a payload is unknown."""
    expected_bytes: float | None = None
    """What the textbook sends for these parameters."""
    expected_by: str = ""

    def as_json(self) -> dict[str, Any]:
        """The figures for programs."""
        return vars(self)


@dataclass
class _Volume:
    elements: int = 0
    calls: int = 0
    payload: int = 0
    sizes: list[int] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)


def likeness_of(rank: RankTrace, parameters: int | None = None) -> Likeness:
    """The strategy that a rank's collectives look like; `parameters`: of the model, where they are given."""
    steps, calls = _of_steps(rank)
    volumes = _volumes(calls)
    total = sum(volume.payload for volume in volumes.values())
    found = Likeness(strategy=None, per="step" if steps else "trace")
    if not total:
        known = any(call.operation for call in rank.calls)
        found.evidence.append("bytes are n/a" if known else "no collective")
        return found
    large = {op: v for op, v in volumes.items() if v.payload >= LEAST_SHARE * total}
    found.evidence = [
        f"{op} is {v.payload / total:.0%} of the bytes".replace("%", " %")
        for op, v in sorted(large.items(), key=lambda item: -item[1].payload)
    ]
    reduced = max((large[op] for op in REDUCTIONS if op in large), key=lambda v: v.elements, default=None)
    gathered = large.get("all_gather")
    count = max(1, steps)
    found.strategy, sharding = _name(large, rank.styles, count, found.evidence)
    if reduced is not None:
        found.parameters = parameters or round(reduced.elements / count)
        found.unit_bytes = reduced.sizes[: len(reduced.sizes) // count]
    found.sent_bytes = _sent(calls, count)
    if sharding is not None and reduced is not None and len(reduced.groups) == 1 and len(reduced.dtypes) == 1:
        (size,), (dtype,) = reduced.groups, reduced.dtypes
        weights = (gathered or reduced).dtypes
        assert found.parameters is not None
        found.expected_bytes = textbook_sent_bytes(
            sharding, found.parameters, size, reduce_bytes=element_bytes(dtype) or 0,
            weight_bytes=max((element_bytes(d) or 0 for d in weights), default=0),
        )  # fmt: skip
        given = "given" if parameters else "reduced per " + found.per
        all_reduced = sharding == "grad-op" and "reduce_scatter" not in large
        form = SCATTERED if all_reduced else CLOSED_FORMS[sharding]
        found.expected_by = (
            f"the closed form of {form} with {found.parameters:,} parameters ({given}) on {size} ranks"
        )
    return found


def _of_steps(rank: RankTrace) -> tuple[int, list[Call]]:
    """Number of annotated steps, and the calls in them; 0 and all calls without steps."""
    within = [call for call in rank.calls if call.step is not None]
    return (len({call.step for call in within}), within) if within else (0, list(rank.calls))


def _volumes(calls: Sequence[Call]) -> dict[str, _Volume]:
    volumes: dict[str, _Volume] = {}
    for call in calls:
        if call.operation is None or not call.payload_bytes or call.elements is None or call.group.size == 1:
            continue
        volume = volumes.setdefault(call.operation, _Volume())
        volume.payload += call.payload_bytes
        volume.calls += 1
        if call.dtype in FLOATS and call.elements > 1:  # one is a norm, a loss or a flag
            volume.elements += call.elements
            volume.sizes.append(call.payload_bytes)
            volume.dtypes.add(call.dtype or "")
        if call.group.size is not None:
            volume.groups.add(call.group.size)
    return volumes


def _name(
    large: dict[str, _Volume], styles: frozenset[str], steps: int, evidence: list[str]
) -> tuple[str | None, str | None]:
    """The strategy in words, and the sharding of the closed form that fits."""
    beside = _beside(large)
    gathered, scattered, reduced = (large.get(op) for op in ("all_gather", "reduce_scatter", "all_reduce"))
    name: str | None = None
    sharding: str | None = None
    if gathered is not None and scattered is not None and scattered.elements:
        ratio = gathered.elements / scattered.elements
        evidence.append(f"{ratio:.2f} elements are gathered for each one reduced")
        name, sharding = _sharded(ratio, styles)
        if reduced is not None and reduced.elements > scattered.elements:
            name = (
                "DDP" if "DDP" in styles else "DDP, or ZeRO-0"
            ) + ", with parts of the model sharded in groups"
            sharding = None
        elif reduced is not None and not beside:
            name, sharding = f"hybrid sharding ({name}, and its shards all-reduced over replicas)", None
    elif gathered is not None and reduced is not None and reduced.elements and gathered.elements:
        ratio = reduced.elements / gathered.elements
        evidence.append(f"{ratio:.2f} elements are all-reduced for each one gathered")
        name = "ZeRO-1 or ZeRO-2 as DeepSpeed does them: gradients all-reduced, updated weights gathered"
        sharding = "grad-op" if not beside else None
    elif reduced is not None and reduced.elements:
        equal = len(set(reduced.sizes)) <= MOST_EQUAL_SIZES and reduced.calls >= 8 * steps
        if "DDP" in styles:
            name, sharding = "DDP", "none"
        elif equal:
            name = "tensor parallelism, or equal buckets of DDP"
        else:
            name, sharding = "DDP, or ZeRO-0", "none"
    elif gathered is not None:
        name = "weights gathered and nothing reduced: a forward pass, or generation"
    if beside:
        name = f"{name}, with {beside}" if name else beside
    return name, sharding


def _sharded(ratio: float, styles: frozenset[str]) -> tuple[str, str | None]:
    library = next((style for style in ("FSDP2", "FSDP1") if style in styles), None)
    if AGAIN[0] <= ratio <= AGAIN[1]:
        return (f"{library} full shard" if library else "ZeRO-3 or FSDP full shard"), "full-shard"
    if ONCE[0] <= ratio <= ONCE[1]:
        kept = "weights kept gathered after the forward pass"
        names = f"{library}, {kept}" if library else f"FSDP or ZeRO-3 with {kept}, or ZeRO-1 or ZeRO-2"
        return names, "grad-op"
    if ratio < ONCE[0]:
        return (f"{library or 'FSDP or ZeRO-3'}, gradients reduced in several passes of a step"), None
    return (f"{library or 'FSDP or ZeRO-3'}, some weights kept gathered, or several passes of a step"), None


def _beside(large: dict[str, _Volume]) -> str:
    found = []
    if "all_to_all" in large:
        found.append("all-to-all of experts, embeddings or sequence parts")
    if "send" in large or "recv" in large:
        found.append("messages between pipeline stages or in a ring")
    return " and ".join(found)


def _sent(calls: Sequence[Call], count: int) -> float | None:
    sent = 0.0
    for call in calls:
        if call.operation in (None, "barrier") or call.payload_bytes == 0:
            continue
        if call.payload_bytes is None or call.group.size is None:
            return None
        sent += ring_sent_bytes(call.operation or "", call.payload_bytes, call.group.size)
    return sent / count
