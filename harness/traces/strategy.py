"""Which strategy a rank's collectives look like: kinds, counts, sizes and order of them must agree.

What a strategy does not explain is said next to it; where nothing agrees, no strategy is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.forms.layout import element_bytes
from harness.forms.terms import ring_sent_bytes
from harness.forms.textbook import textbook_sent_bytes
from harness.nested import grouped
from harness.traces.analysis import RankTrace
from harness.traces.collectives import Call

LEAST_SHARE = 0.04
"""Of all bytes, for an operation to count: norms, losses and indices stay below."""
REDUCTIONS = ("reduce_scatter", "all_reduce", "reduce")
AGAIN, ONCE = (1.6, 2.3), (0.75, 1.3)
"""Elements gathered per element reduced: weights gathered for both passes, or for one."""
AGAIN_UNITS = 0.3
"""Share of the reductions whose unit is gathered twice."""
MOST_EQUAL_SIZES = 2
"""Of many all-reduces that are no buckets: one follows attention, the other the layer behind it."""
FEW_UNITS, LEAST_AHEAD, MOST_AFTER = 4, 0.3, 0.7
"""Weights are gathered before gradients are reduced: this many units, or this share of the elements; after an
update, this share of what is gathered."""
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
    # The calls in annotated steps; all without steps.
    calls = [call for call in rank.calls if call.step is not None] or rank.calls
    steps = len({call.step for call in calls} - {None})
    volumes = _volumes(calls)
    total = sum(volume.payload for volume in volumes.values())
    found = Likeness(strategy=None, per="step" if steps else "trace")
    if not total:
        found.evidence.append("bytes are n/a" if rank.calls else "no collective")
        return found
    large = {op: v for op, v in volumes.items() if v.payload >= LEAST_SHARE * total}
    found.evidence = [
        f"{op} is {v.payload / total:.0%} of the bytes".replace("%", " %")
        for op, v in sorted(large.items(), key=lambda item: -item[1].payload)
    ]
    reduced = max((large[op] for op in REDUCTIONS if op in large), key=lambda v: v.elements, default=None)
    gathered = large.get("all_gather")
    count = max(1, steps)
    name, sharding, explained = _name(large, _passes(calls), rank.styles, count, found.evidence)
    unexplained = [
        f"{op.replace('_', '-')} of {round(v.payload / count):,} bytes per {found.per}"
        for op, v in sorted(large.items(), key=lambda item: -item[1].payload)
        if op not in explained
    ]
    if name is not None and unexplained:
        name, sharding = f"{name}, and {' and '.join(unexplained)} that it does not explain", None
    found.strategy = name
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


def _moves_tensors(call: Call) -> bool:
    """One element is a norm, a loss or a flag."""
    return call.dtype in FLOATS and (call.elements or 0) > 1 and call.group.size != 1


def _volumes(calls: Sequence[Call]) -> dict[str, _Volume]:
    volumes: dict[str, _Volume] = {}
    for call in calls:
        if call.operation is None or not call.payload_bytes or call.elements is None or call.group.size == 1:
            continue
        volume = volumes.setdefault(call.operation, _Volume())
        volume.payload += call.payload_bytes
        volume.calls += 1
        if _moves_tensors(call):
            volume.elements += call.elements
            volume.sizes.append(call.payload_bytes)
            volume.dtypes.add(call.dtype or "")
        if call.group.size is not None:
            volume.groups.add(call.group.size)
    return volumes


class _Pass:
    """Tensors that one step moves, in the order of the calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = [call for call in sorted(calls, key=lambda call: call.start) if _moves_tensors(call)]

    def elements(self, operation: str) -> int:
        return sum(call.elements or 0 for call in self.calls if call.operation == operation)

    def gathers_ahead(self) -> bool:
        """Whether the weights of several units, or much of them, are gathered before the first reduction."""
        kinds = [call.operation for call in self.calls]
        ahead = self.calls[: kinds.index("reduce_scatter")]
        gathers = [call.elements or 0 for call in ahead if call.operation == "all_gather"]
        return len(gathers) >= FEW_UNITS or sum(gathers) >= LEAST_AHEAD * self.elements("reduce_scatter")

    def gathers_after(self, reduction: str) -> bool:
        """Whether most is gathered after the last reduction: updated weights."""
        last = max(at for at, call in enumerate(self.calls) if call.operation == reduction)
        after = sum(call.elements or 0 for call in self.calls[last:] if call.operation == "all_gather")
        return after >= MOST_AFTER * self.elements("all_gather") > 0


def _passes(calls: Sequence[Call]) -> list[_Pass]:
    by_step = grouped((call.step, call) for call in calls)
    return [_Pass(of) for of in by_step.values()]


Named = tuple[str | None, str | None, set[str]]
"""The strategy in words, the sharding of the closed form that fits, and the operations that both explain."""


def _name(
    large: dict[str, _Volume], passes: Sequence[_Pass], styles: frozenset[str], steps: int,
    evidence: list[str],
) -> Named:  # fmt: skip
    gathered, scattered, reduced = (large.get(op) for op in ("all_gather", "reduce_scatter", "all_reduce"))
    if scattered is not None and scattered.elements and gathered is not None and gathered.elements:
        if reduced is None or reduced.elements <= scattered.elements or styles & {"FSDP1", "FSDP2"}:
            return _of_shards(gathered, scattered, reduced, passes, styles, evidence)
    elif gathered is not None and gathered.elements and reduced is not None and reduced.elements:
        ratio = reduced.elements / gathered.elements
        evidence.append(f"{ratio:.2f} elements are all-reduced for each one gathered")
        both = [p for p in passes if p.elements("all_reduce") and p.elements("all_gather")]
        after = _in_nearly_all(p.gathers_after("all_reduce") for p in both)
        if ONCE[0] <= ratio <= ONCE[1] and after:
            name = "ZeRO-1 or ZeRO-2 as DeepSpeed does them: gradients all-reduced, updated weights gathered"
            return name, "grad-op", {"all_reduce", "all_gather"}
    if reduced is not None and reduced.elements:
        return _of_replicas(reduced, passes, styles, steps, evidence)
    evidence.append("these collectives are those of no one strategy")
    return None, None, set()


def _of_replicas(
    reduced: _Volume, passes: Sequence[_Pass], styles: frozenset[str], steps: int, evidence: list[str]
) -> Named:
    if "DDP" in styles:
        return "DDP", "none", {"all_reduce"}
    if len(set(reduced.sizes)) <= MOST_EQUAL_SIZES and reduced.calls >= 8 * steps:
        return "tensor parallelism, or equal buckets of DDP", None, {"all_reduce"}
    sums = Counter(total for one in passes if (total := one.elements("all_reduce")))
    # The gradients of a step are as many as those of any other; the recording may begin within one.
    if sum(sums.values()) - max(sums.values()) > 1:
        evidence.append("steps all-reduce different numbers of elements, which gradients do not")
        return None, None, set()
    return "DDP, or ZeRO-0", "none", {"all_reduce"}


def _of_shards(
    gathered: _Volume, scattered: _Volume, reduced: _Volume | None, passes: Sequence[_Pass],
    styles: frozenset[str], evidence: list[str],
) -> Named:  # fmt: skip
    ratio = gathered.elements / scattered.elements
    evidence.append(f"{ratio:.2f} elements are gathered for each one reduced")
    both = [p for p in passes if p.elements("reduce_scatter") and p.elements("all_gather")]
    library = next((style for style in ("FSDP2", "FSDP1") if style in styles), None)
    times, again = _sizes(passes, "all_gather"), _sizes(passes, "reduce_scatter")
    units = again.keys() <= times.keys()
    # Units of FSDP by their sizes: the last ones need not be gathered twice.
    twice = sum(min(count, max(0, times[size] - count)) for size, count in again.items())
    full = units and AGAIN_UNITS * again.total() <= twice and all(times[s] <= 2 * n for s, n in again.items())
    ahead = _in_nearly_all(p.gathers_ahead() for p in both)
    explained = {"all_gather", "reduce_scatter"}
    sharding: str | None = None
    if library is None and ONCE[0] <= ratio <= ONCE[1]:
        if _in_nearly_all(p.gathers_after("reduce_scatter") for p in both):
            name = "ZeRO-1 or ZeRO-2 that scatter gradients, and gather updated weights"
            return name, "grad-op", explained
    if library is None and not ahead:
        evidence.append("gradients are scattered before weights are gathered, as parts of sequences are")
        return None, None, set()
    if full or AGAIN[0] <= ratio <= AGAIN[1]:
        name, sharding = f"{library or 'ZeRO-3 or FSDP'} full shard", "full-shard"
    elif ONCE[0] <= ratio <= ONCE[1]:
        kept = "weights kept gathered after the forward pass"
        either = f"FSDP or ZeRO-3 with {kept}, or ZeRO-1 or ZeRO-2"
        name, sharding = f"{library}, {kept}" if library else either, "grad-op"
    elif library is None and not units:
        evidence.append("what is reduced has not the sizes of what is gathered")
        return None, None, set()
    else:
        several = "gradients reduced in several passes of a step"
        kept = "some weights kept gathered, or several passes of a step"
        name = f"{library or 'FSDP or ZeRO-3'}, {several if ratio < ONCE[0] else kept}"
    size = next(iter(scattered.groups)) if len(scattered.groups) == 1 else None
    if reduced is not None and size and reduced.calls >= scattered.calls:
        shards = scattered.elements / size
        if abs(reduced.elements - shards) <= 0.01 * shards:
            name, sharding = f"hybrid sharding ({name}, and its shards all-reduced over replicas)", None
            explained.add("all_reduce")
    return name, sharding, explained


def _in_nearly_all(passes: Iterable[bool]) -> bool:
    """In all but the one within which the recording began, if there are several."""
    told = [*passes]
    return any(told) and len(told) - sum(told) <= 1


def _sizes(passes: Sequence[_Pass], operation: str) -> Counter[int]:
    return Counter(call.elements or 0 for one in passes for call in one.calls if call.operation == operation)


def _sent(calls: Sequence[Call], count: int) -> float | None:
    sent = 0.0
    for call in calls:
        if call.operation in (None, "barrier") or call.payload_bytes == 0:
            continue
        if call.payload_bytes is None or call.group.size is None:
            return None
        sent += ring_sent_bytes(call.operation or "", call.payload_bytes, call.group.size)
    return sent / count
