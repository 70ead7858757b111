"""What a reader must be told, and what each kind of it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.compare.rows import Row


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a reader must be told about a comparison."""

    id: str
    """Stable; one of the kinds in the catalogue."""
    backends: tuple[str, ...]
    """Labels of the backends that it is about."""
    message: str
    """One sentence that names the cause."""
    values: dict[str, Any] = field(default_factory=dict)
    """The figures behind the message; JSON-serialisable."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "backends": list(self.backends),
            "message": self.message,
            "values": self.values,
        }


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding, as `docs/findings.md` explains it."""

    id: str
    title: str
    """What a reader is told, in a few words."""
    cause: str
    confirm: str
    fix: str
    """What to change, in terms of DeepSpeed, FSDP, DDP and Accelerate."""


def subject(row: Row) -> str:
    """'ddp on 2 ranks': what a message about one run begins with."""
    return cell(row.record.backend.label, row.record.world.world_size)


def cell(label: str, world_size: int) -> str:
    """'ddp on 2 ranks'."""
    return f"{label} on {world_size} rank{'s' if world_size > 1 else ''}"


def labels(rows: list[Row]) -> tuple[str, ...]:
    """The backends of rows, each once, sorted."""
    return tuple(sorted({row.record.backend.label for row in rows}))
