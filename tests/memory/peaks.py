"""The peak of one training step by two methods that share nothing, and its activations by two."""

import gc
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Backend, Engine, World
from harness.rank.probes.memory import MemoryProbe, allocator_probe, live_bytes_by_kind
from tests.contract.cases import LEARNING_RATE, Case, global_batches, prepare

CASE = Case(tied=False)
FIRST_MEASURED = 2
PASSES = 5
"""Over the batches, so that some step meets gloo's threads when they have let go of their buffers."""
MARK = "step of the comparison"


def counted_peaks(
    backend: Backend, world: World, passes: int = PASSES, after: Callable[[], object] = lambda: None
) -> list[tuple[int, int]]:
    """By the counting allocator: the bytes served as each measured step begins, and the most within it."""
    allocator = allocator_probe("cpu")
    engine = prepare(backend, world, CASE)[0]
    peaks = []
    for batch in _batches(world, passes):
        _meet()
        allocator.reset_peak()
        before = allocator.allocated_bytes() or 0
        _step(engine, batch)
        peaks.append((before, allocator.peak_bytes() or 0))
        after()
    return peaks[FIRST_MEASURED:]


def watched_peaks(backend: Backend, world: World) -> list[int]:
    """The same while the memory probe watches: the peaks that it recorded."""
    allocator = allocator_probe("cpu")
    engine = prepare(backend, world, CASE)[0]
    probe = MemoryProbe(allocator, engine)
    peaks = []
    for step, batch in enumerate(_batches(world)):
        _meet()
        probe.begin()
        probe.before_forward()
        loss = engine.forward(batch)
        probe.record(step, "after_forward")
        engine.backward(loss, last_micro_step=True)
        del loss
        probe.record(step, "after_backward")
        engine.step(LEARNING_RATE)
        probe.record(step, "after_step")
        probe.end()
        peaks.append(max(row["peak_bytes"] for row in probe.rows[-3:]))
    return peaks[FIRST_MEASURED:]


def profiled_peaks(backend: Backend, world: World) -> list[tuple[int, int]]:
    """The same by torch's profiler, which torch's own CPU allocator tells of what it serves.

    What gloo's threads free it does not see, and counts as live from then on: with several ranks both
    figures of a step may stand too high, by the same bytes.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        engine = prepare(backend, world, CASE)[0]
        for step, batch in enumerate(_batches(world, passes=1)):
            _meet()
            with torch.profiler.record_function(f"{MARK} {step}"):
                _step(engine, batch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt") as stream:
            events = json.load(stream)["traceEvents"]
    memory = [
        (float(e["ts"]), int(e["args"]["Total Allocated"])) for e in events if e.get("name") == "[memory]"
    ]
    marks = [e for e in events if str(e.get("name")).startswith(MARK) and e.get("cat") == "user_annotation"]
    marks = sorted(marks, key=lambda e: float(e["ts"]))[FIRST_MEASURED:]
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in marks]
    return [
        (
            [size for at, size in memory if at < begin][-1],
            max(size for at, size in memory if begin <= at <= end),
        )
        for begin, end in spans
    ]


def tracked_peak(backend: Backend, world: World) -> tuple[int, int]:
    """The least of the counting allocator's peaks of a step, and the peak of torch's MemTracker.

    MemTracker follows every operator of the same training. It does not see that gloo's threads hold a
    buffer for a moment longer, which the allocator does.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    with MemTracker() as tracker:
        peaks = counted_peaks(backend, world, 3, tracker.reset_mod_stats)
    tracked = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return min(peak for _, peak in peaks), tracked


def activations(backend: Backend, world: World) -> tuple[int, int]:
    """What the probe calls activations, and the storages that autograd saved, walked one by one."""
    allocator = allocator_probe("cpu")
    engine = prepare(backend, world, CASE)[0]
    batches = _batches(world)
    _step(engine, next(batches))
    batch = next(batches)
    probe = MemoryProbe(allocator, engine)
    probe.begin()
    probe.before_forward()
    loss = engine.forward(batch)
    probe.record(1, "after_forward")
    probe.end()
    known = {tensor.untyped_storage().data_ptr() for _, tensor in engine.state_tensors()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
    saved = [("saved", tensor) for tensor in _saved(loss.grad_fn)]
    own = [item for item in saved if item[1].untyped_storage().data_ptr() not in known]
    walked = live_bytes_by_kind([*own, ("saved", loss)], allocator).inside or {}
    return probe.rows[-1]["kinds"]["activations"], walked["saved"]


def _saved(node: Any) -> Iterator[Tensor]:
    """Every tensor that a node of the graph or one before it has saved."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                values = value if isinstance(value, (list, tuple)) else [value]
                yield from (one for one in values if isinstance(one, Tensor))
        waiting += [following for following, _ in node.next_functions]


def _batches(world: World, passes: int = PASSES) -> Iterator[dict[str, Tensor]]:
    for tokens, labels in list(global_batches()) * passes:
        part = slice(world.rank * 4, world.rank * 4 + 4)
        yield {"tokens": tokens[part].clone(), "labels": labels[part].clone()}


def _meet() -> None:
    """Ranks begin a step together, and what collectives of the last one still hold is let go."""
    gc.collect()
    torch.distributed.barrier()


def _step(engine: Engine, batch: dict[str, Tensor]) -> None:
    engine.backward(engine.forward(batch), last_micro_step=True)
    engine.step(LEARNING_RATE)
