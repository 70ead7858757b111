"""Communication by collective, dtype and group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.forms.terms import STEP_PHASES
from harness.judge.comparison import Comparison
from harness.judge.volume import expected_payload, is_derived, volume_of
from harness.record import CommunicationPart, Record
from harness.report.document import Block, Column, Paragraph, Section, Table
from harness.report.formats import megabytes, short
from harness.report.tables import LABELS

Key = tuple[str, str, str, str, int]
PHASES = ("setup", "digest", *STEP_PHASES, "evaluation", "checkpoint", "checkpoint_load")
MEANING = (
    "Of rank 0 of the first repeat. Forward, backward and step: per step. Setup, evaluation, checkpoint and "
    "digest (gathering the initial "
    "weights for their digest): per run. Payload is the size of the full tensors, largest MB that of the "
    "largest call. Expected is the payload in closed form, for all groups of that role together; n/a if "
    "there is none."
)
STAGES = "Rank 0 holds the first stage of a pipeline; what each stage sends stands under 'Pipelines'."
COLUMNS = (
    *LABELS,
    Column("phase", "phase", align="left"),
    Column("op", "collective", align="left"),
    Column("dtype", "dtype", align="left"),
    Column("role", "group", align="left"),
    Column("group_size", "size"),
    Column("calls", "calls", short),
    Column("payload_bytes", "payload MB", megabytes),
    Column("expected_payload_bytes", "expected MB", megabytes),
    Column("largest_bytes", "largest MB", megabytes),
)


def communication_section(comparison: Comparison) -> Section | None:
    """Collectives that rank 0 called: per step within the steps, else per run; None without any."""
    body = []
    for group in comparison.groups:
        record = group.record
        probed = record.windows.probed if record.windows else 0
        kinds: dict[Key, list[CommunicationPart]] = {}
        for row in record.comm:
            if row.rank == 0:
                kinds.setdefault((row.phase, row.op, row.dtype, row.role, row.group_size), []).append(row)
        expected = _expected(record)
        if probed:
            body += [
                [
                    *group.cell,
                    *key,
                    *_sums(kinds[key], times, expected(key)),
                ]
                for key in sorted(kinds, key=_order)
                for times in (probed if key[0] in STEP_PHASES else 1,)
            ]
    if not body:
        return None
    table = Table(key="collectives", columns=COLUMNS, rows=body)
    has_stages = any(group.record.world.mesh.size("pipeline") > 1 for group in comparison.groups)
    meaning = f"{MEANING} {STAGES}" if has_stages else MEANING
    return Section(
        "communication", "Collectives of rank 0", [Paragraph(meaning), table, *_reasons(comparison)]
    )


def _reasons(comparison: Comparison) -> list[Block]:
    """Why parts of phases have no closed form, each reason once."""
    pairs = [pair for row in comparison.rows if (pair := volume_of(row.record)) is not None]
    parts = dict.fromkeys(part for _, volume in pairs for part in volume.underived)
    return [
        Paragraph(
            f"No closed form of {' and '.join(part.dtypes) or 'any dtype'} in a {part.phase}: {part.reason}."
        )
        for part in parts
    ]


def _expected(record: Record) -> Callable[[Key], int | None]:
    """Payload in closed form of a kind of collective; None where it is not known."""
    pair = volume_of(record)
    if pair is None:
        return lambda key: None
    volume, payload = pair[1], expected_payload(pair[1], pair[0].mesh)
    return lambda key: payload.get(key[:4], 0) if is_derived(volume, key[0], key[2]) else None


def _sums(parts: Sequence[CommunicationPart], times: int, expected: int | None) -> list[float | None]:
    """Calls, payload and expected payload, divided by `times`, and the largest call's payload."""
    largest = [part.largest_bytes for part in parts if part.largest_bytes is not None]
    return [
        sum(part.calls for part in parts) / times,
        sum(part.payload_bytes for part in parts) / times,
        None if expected is None else expected / times,
        max(largest, default=None),
    ]


def _order(key: Key) -> tuple[int, Key]:
    return PHASES.index(key[0]) if key[0] in PHASES else len(PHASES), key
