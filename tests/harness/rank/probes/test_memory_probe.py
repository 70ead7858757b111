from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.rank.probes.memory import AllocatorProbe, MemoryProbe


class FakeEngine:
    """Has a weight, and gathers as many bytes as it is told to."""

    def __init__(self) -> None:
        self.gathered = 0
        self.hidden: dict[str, int] = {}

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weights", WEIGHT
        yield from (("gathered", tensor) for tensor in self.gathered_tensors())

    def gathered_tensors(self) -> Iterator[Tensor]:
        yield torch.zeros(self.gathered, dtype=torch.uint8)

    def hidden_bytes(self) -> dict[str, int]:
        return self.hidden


WEIGHT = torch.zeros(10)


def probe(engine: Any) -> MemoryProbe:
    return MemoryProbe(AllocatorProbe(), engine)


def test_gathered_weights_are_read_at_the_end_of_each_module_with_parameters() -> None:
    engine = FakeEngine()
    held = probe(engine)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    held.begin()
    for size, layer in zip((30, 50, 40), layers, strict=True):
        engine.gathered = size
        nn.Sequential(layer)(torch.zeros(1, 2))
    engine.gathered = 500
    nn.ReLU()(torch.zeros(1))
    held.record(1, "after_forward")
    held.end()
    (row,) = held.rows
    assert (row["gathered_least_bytes"], row["gathered_peak_bytes"]) == (30, 50)


def test_recomputation_in_the_backward_pass_is_no_forward_pass() -> None:
    engine = FakeEngine()
    held = probe(engine)
    held.begin()
    engine.gathered = 30
    output = checkpoint(nn.Linear(2, 2), torch.zeros(1, 2), use_reentrant=False)
    held.record(1, "after_forward")
    engine.gathered = 90
    output.sum().backward()
    held.record(1, "after_backward")
    held.end()
    assert [row["gathered_peak_bytes"] for row in held.rows] == [30, None]


def test_bytes_without_tensors_count_under_their_kind() -> None:
    engine = FakeEngine()
    engine.hidden = {"communication": 7, "weights": 2}
    held = probe(engine)
    held.record(1, "after_step")
    assert held.rows[0]["kinds"] == {"weights": 42, "communication": 7}


class FreeingAllocator(AllocatorProbe):
    """Serves less at every reading, as where a transport's threads free what they sent."""

    def __init__(self) -> None:
        self.served = 1000

    def allocated_bytes(self) -> int:
        self.served -= 100
        return self.served


def test_kinds_add_up_to_what_was_allocated_though_threads_free_meanwhile() -> None:
    held = MemoryProbe(FreeingAllocator(), FakeEngine())
    held.record(1, "after_backward")
    (row,) = held.rows
    assert sum(row["kinds"].values()) == row["allocated_bytes"] == 900
