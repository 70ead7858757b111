"""Copies of masters are counted where they are not the rounded master."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness.rank.probes.weights import CHUNK_ELEMENTS, Copies, count_copies


def engine(*pairs: tuple[Tensor, Tensor]) -> Any:
    def weights_in_use() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(pairs)

    return SimpleNamespace(weights_in_use=weights_in_use)


def test_a_rounded_copy_is_current_and_a_last_bit_is_not() -> None:
    masters = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    copy = masters.bfloat16()
    assert count_copies(engine((masters, copy))) == Copies(elements=4000, stale=0)
    copy[7] = torch.nextafter(copy[7], torch.tensor(9.0, dtype=torch.bfloat16))
    assert count_copies(engine((masters, copy), (masters, masters.clone()))) == Copies(elements=8000, stale=1)


def test_what_is_no_number_in_both_is_current() -> None:
    masters = torch.tensor([float("nan"), float("inf"), float("nan")])
    copy = torch.tensor([float("nan"), float("inf"), 1.0]).bfloat16()
    assert count_copies(engine((masters, copy))) == Copies(elements=3, stale=1)


def test_every_chunk_is_compared() -> None:
    masters = torch.zeros(CHUNK_ELEMENTS + 5)
    copy = masters.clone()
    copy[CHUNK_ELEMENTS + 2] = 1.0
    assert count_copies(engine((masters, copy))).stale == 1


def test_masters_in_use_themselves_are_no_copies() -> None:
    assert count_copies(engine()) == Copies(elements=0, stale=0)
