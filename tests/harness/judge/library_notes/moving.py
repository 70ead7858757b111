"""Records whose bytes are exactly those of their implementation, of a model whose size they state."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from harness.record import Record
from tests.volumes import SHAPES, expected_rows, make_volume_record

ELEMENTS = sum(prod(shape) for shape in SHAPES.values())


def moving(label: str, **changes: Any) -> Record:
    """A run on 2 ranks (hybrid: 4) that moves what is expected of it, DeepSpeed 0.19.8 and torch 2.11.0."""
    record = make_volume_record(label, **changes)
    assert record.backend.effective is not None
    effective = replace(record.backend.effective, parameter_count=ELEMENTS)
    record = record.model_copy(update={"backend": record.backend.model_copy(update={"effective": effective})})
    return record.model_copy(update={"comm": expected_rows(record)})
