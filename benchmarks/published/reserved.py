"""What torch's caching allocator keeps of the device: published runs give it in place of the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.published.losses import OURS
from benchmarks.published.programs import Program
from harness.forms.optimizers import update_copies, updated_tensors
from harness.forms.peak_memory.families import peak_moments
from harness.forms.peak_memory.step import STATE_SOURCE, Ledger, Phase, deepspeed_norm
from harness.forms.tensor import local_workload
from harness.forms.terms import Term, named_terms
from harness.forms.workload import Workload
from harness.forms.zero0 import gradient_accumulation_bytes
from harness.plan.profiles import activation_profile
from harness.plan.scenario import Scenario

STREAMS = {
    getattr(named_terms(family), name): f"{family} {stream}"
    for family, stream, names in (
        ("fsdp1", "unshard", ("gathered",)),
        ("fsdp1", "before unshard", ("low", "cast")),
        ("fsdp1", "after backward", ("converted", "reduced", "reduced_low")),
        ("fsdp2", "all-gather", ("flat", "retained", "cast")),
        ("fsdp2", "reduce-scatter", ("reduced", "reduced_low")),
        ("zero3", "all-gather", ("gathered", "coalesced")),
        ("zero3", "reduction", ("converted", "interleaved")),
    )
    for name in names
}
"""Part of a rank's memory -> CUDA stream on which it is allocated, unless the one that computes. Each has
blocks of its own, which serve no other (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, BlockPool)."""


def reserving(scenario: Scenario) -> Scenario:
    """The scenario whose peak is what the allocator reserves for the loss."""
    assert isinstance(scenario.other, Program)
    loss = scenario.other.loss or OURS
    return replace(scenario, other=replace(scenario.other, loss=replace(loss, backward=loss.reserved)))


def reserved_bytes(scenario: Scenario) -> int:
    """Of the rank that needs most, at least."""
    profile = activation_profile(scenario)
    found: list[tuple[int, int]] = []
    for workload in map(scenario.workload, scenario.unlike_ranks):
        ledger = ReservingLedger(workload)
        moments = peak_moments(workload, profile, ledger)
        found.append((max(moment.bytes for moment in moments.values()), ledger.reserved))
    peak, kept_bytes = max(found, key=lambda pair: pair[0])
    return max(peak, kept_bytes)


class ReservingLedger(Ledger):
    """Counts by stream what it once needed."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._workload = local_workload(workload)
        self._there = dict.fromkeys(STREAMS.values(), 0)
        self._most = {**self._there, "": 0}

    @property
    def reserved(self) -> int:
        """Bytes of all streams."""
        return sum(self._most.values())

    @property
    def _computing(self) -> int:
        """Bytes without activations, on the stream that computes."""
        return self.all_held - sum(self._there.values())

    def change(self, holding: Term, count: int) -> None:
        super().change(holding, count)
        if stream := STREAMS.get(holding):
            self._there[stream] += count
            self._keep(stream, self._there[stream])

    def look(self) -> None:
        super().look()
        self._keep("", self._computing + self.below + self.here)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        workload = self._workload
        flat = workload.strategy.zero_stage == 3 and workload.offload == "none" and workload.device != "cpu"
        if phase == "step" and flat:
            self._keep_flat()
        with super().during(phase):
            yield

    def _keep(self, stream: str, count: int) -> None:
        self._most[stream] = max(count, self._most[stream])

    def _keep_flat(self) -> None:
        """Of ZeRO-3, as an update begins: tensors that are flat over a whole sub-group."""
        workload = self._workload
        states: dict[str, int] = {}
        for term, count in self.held.items():
            if term.source == STATE_SOURCE:
                states[term.kind] = states.get(term.kind, 0) + count
        if not states.get("masters"):
            return
        beside = self._computing - states.pop("gathered", 0)
        pieces = [piece for (piece,) in updated_tensors(workload)]
        sizes = [tensor.numel for tensor in workload.layout.trained]
        largest = max(-(-size // workload.world_size) for size in sizes)
        flat = kept(
            pieces=pieces, master=workload.master_bytes, gradient=gradient_accumulation_bytes(workload),
            moments=states["optimizer"] // sum(pieces), copies=update_copies(workload),
            norm=deepspeed_norm(workload, largest)[1], small=max(sizes) * workload.compute_bytes,
            copied_first=workload.options.get("copied_first", workload.master_bytes),
            passes=self._most[""] - beside,
        )  # fmt: skip
        self._keep("", beside - sum(states.get(kind, 0) for kind in FLAT) + flat)


FLAT = ("masters", "optimizer", "gradients")
"""Kinds of states that `kept` counts."""


@dataclass(eq=False)
class Piece:
    """A part of a block."""

    size: int
    is_free: bool = False


@dataclass
class Blocks:
    """What the allocator got from the device, in pieces.

    Small tensors find room in what others left, a flat one of a whole sub-group only in a free block as large
    (torch 2.13, c10/cuda/CUDACachingAllocator.cpp: get_free_block takes the smallest such block, split_block
    returns the rest, free_block joins neighbours).
    """

    _blocks: list[list[Piece]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes that it keeps."""
        return sum(piece.size for block in self._blocks for piece in block)

    @property
    def free(self) -> int:
        """Bytes of that that nobody uses."""
        return sum(piece.size for block in self._blocks for piece in block if piece.is_free)

    def take(self, size: int) -> Piece:
        """Allocate: the smallest free piece that is large enough, else a block of its own."""
        fitting = [
            (piece.size, number, place)
            for number, block in enumerate(self._blocks)
            for place, piece in enumerate(block)
            if piece.is_free and piece.size >= size
        ]
        if not fitting:
            self._blocks.append([taken := Piece(size)])
            return taken
        _, number, place = min(fitting)
        block = self._blocks[number]
        taken, rest = block[place], block[place].size - size
        taken.size, taken.is_free = size, False
        if rest:
            block.insert(place + 1, Piece(rest, is_free=True))
        return taken

    def give(self, piece: Piece) -> None:
        """Free, and join with free neighbours."""
        block = next(block for block in self._blocks if piece in block)
        piece.is_free = True
        joined: list[Piece] = []
        for one in block:
            if joined and one.is_free and joined[-1].is_free:
                joined[-1] = Piece(joined[-1].size + one.size, is_free=True)
            else:
                joined.append(one)
        block[:] = joined


def kept(
    *, pieces: Sequence[int], master: int, gradient: int, moments: int, copies: int, norm: int, small: int,
    copied_first: int, passes: int,
) -> int:  # fmt: skip
    """Bytes that the allocator keeps of masters, moments, gradients and their flat copies.

    pieces: elements of each sub-group of a rank. master, gradient, moments, copied_first: bytes per element,
    the last of what is copied as masters are made. copies: of what is updated at once, that the update makes.
    norm: bytes of the copy that the norm of the largest gradient takes. small: bytes up to which a tensor
    finds room in what the passes left. passes: bytes that forward and backward pass take besides states.
    DeepSpeed 0.19.8, stage3.py: _create_fp32_partitions, initialize_optimizer_states (a buffer of the largest
    sub-group), grad_partitions_flat_buffer; then the passes; then norms and _prepare_fp32_grad_for_sub_group.
    """
    blocks = Blocks()
    for count in pieces:
        copied = blocks.take(count * copied_first)
        blocks.take(count * master)
        blocks.give(copied)
    blocks.give(blocks.take(max(pieces) * master))
    blocks.take(sum(pieces) * gradient)
    beyond = max(0, passes - blocks.free)
    if norm > small:
        blocks.give(blocks.take(norm))
    for count in pieces:
        # Gradients laid out flat, then widened, unless they find room in what the passes left.
        low, high = (count * width for width in (gradient, master))
        wide = blocks.take(low) if low > small else None
        if low != high:
            flat, wide = wide, blocks.take(high) if high > small else None
            if flat is not None:
                blocks.give(flat)
        blocks.take(count * moments)
        if (extra := count * master * copies) > small:
            blocks.give(blocks.take(extra))
        if wide is not None:
            blocks.give(wide)
    return blocks.total + beyond
