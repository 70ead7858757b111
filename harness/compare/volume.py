"""Measured against expected communication of one record."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record import CommunicationPart, Record
from harness.theory.expected.backends import expected_volume
from harness.theory.expected.setting import Collective, Setting, Tensor, Volume
from harness.theory.expected.textbook import (
    STEP_PHASES,
    TermDifference,
    explain,
    textbook_collectives,
)
from harness.theory.recomputation import recomputed_until

Key = tuple[str, str, str, str]
"""(phase, collective, dtype, role of the group, or ELSEWHERE)."""
ELSEWHERE = "other"
"""In place of a role: a group whose ranks are not those that the role has."""


@dataclass(frozen=True, kw_only=True)
class VolumeDifference:
    """Payload of one kind of collective that is not as expected, on the rank where it differs most."""

    phase: str
    op: str
    dtype: str
    role: str
    rank: int
    measured_bytes: int
    expected_bytes: int
    group_ranks: tuple[int, ...] = ()
    """Ranks of that rank's group; () where the record does not say, or nothing was measured."""

    @property
    def group(self) -> str:
        """The role of the group, or its ranks where it has none."""
        return f"ranks {', '.join(map(str, self.group_ranks))}" if self.role == ELSEWHERE else self.role


def setting_of(record: Record) -> Setting | None:
    """What the record says of the job, as far as communication goes; None without a layout or steps."""
    layout, effective, windows = record.layout, record.backend.effective, record.windows
    if layout is None or effective is None or windows is None or not windows.counted:
        return None
    training, world = record.job["training"], record.world
    options = record.backend.options
    clipping = options.get("gradient_clipping")
    if clipping is None:
        clipping = training["gradient_clipping"] or 0.0
    passes, spells = _evaluations(record)
    return Setting(
        parameters=tuple(Tensor(t.name, tuple(t.shape), t.dtype) for t in layout.parameters),
        tied=dict(layout.tied),
        decaying=frozenset(layout.decaying),
        buffers=tuple(Tensor(t.name, tuple(t.shape), t.dtype) for t in layout.buffers),
        blocks=tuple(layout.blocks),
        precision=training["precision"],
        preset=world.preset,
        world_size=world.world_size,
        shard_size=_shard_size(record),
        accumulation_steps=world.accumulation_steps,
        clipping=clipping > 0 or bool(options.get("default_clipping")),
        offload=options.get("offload", "none"),
        steps=tuple(step.step for step in record.steps if step.window == "counted"),
        reduce_bucket_elements=options.get("reduce_bucket_size"),
        evaluation_every=record.job["evaluation"]["every_steps"],
        evaluation_passes=passes,
        evaluation_spells=spells,
        activation_checkpointing=training["activation_checkpointing"],
        recomputed_until=recomputed_until((record.model or {}).get("architecture")),
        master_dtype=effective.get("master_dtype", "float32"),
        digest=any(row.phase == "digest" for row in record.comm),
        checkpoint=any(row.phase == "checkpoint" for row in record.comm),
    )


def why_unknown(record: Record) -> str | None:
    """Why nothing, or nothing of the steps, is expected of a record; None: everything is."""
    if record.windows is None or not record.windows.counted:
        return "no step was counted (measure.counted_steps)"
    if setting_of(record) is None:
        return "the record does not describe the model"
    pair = volume_of(record)
    return f"{record.backend.name} has no closed form here" if pair is None else pair[1].unknown


def volume_of(record: Record) -> tuple[Setting, Volume] | None:
    """What the record's run is expected to communicate; None for a backend or run without an answer."""
    setting = setting_of(record)
    if setting is None:
        return None
    volume = expected_volume(record.backend.name, setting)
    return None if volume is None else (setting, volume)


def measured_payload(record: Record, setting: Setting) -> dict[int, dict[Key, int]]:
    """Payload bytes by rank and kind of collective, over the counted steps or the whole run."""
    found: dict[int, dict[Key, int]] = {rank.rank: {} for rank in record.ranks}
    for row in record.comm:
        kinds = found.setdefault(row.rank, {})
        key = _key(row, setting)
        kinds[key] = kinds.get(key, 0) + row.payload_bytes
    return found


def _key(row: CommunicationPart, setting: Setting) -> Key:
    """A role holds for the ranks that it has in this setting; a record that names no ranks is believed."""
    known = not row.group_ranks or sorted(row.group_ranks) == setting.group_ranks(row.role, row.rank)
    return row.phase, row.op, row.dtype, row.role if known else ELSEWHERE


def expected_payload(volume: Volume) -> dict[Key, int]:
    """Payload bytes that every rank is expected to hand to each kind of collective."""
    sums: dict[Key, int] = {}
    for collective in volume.collectives:
        key = (collective.phase, collective.op, collective.dtype, collective.role)
        sums[key] = sums.get(key, 0) + collective.payload_bytes
    return sums


def is_derived(volume: Volume, phase: str, dtype: str) -> bool:
    """Whether a volume says what collectives of a phase and dtype move, be it nothing."""
    if volume.unknown and phase in (*STEP_PHASES, "evaluation"):
        return False
    return not any(part.phase == phase and dtype in part.dtypes for part in volume.underived)


def volume_differences(record: Record) -> list[VolumeDifference] | None:
    """Every kind of collective whose payload is not as expected; None where nothing is expected.

    Where the steps could not be derived, the phases outside of them are compared all the same.
    """
    pair = volume_of(record)
    if pair is None:
        return None
    setting, volume = pair
    expected = expected_payload(volume)
    measured = measured_payload(record, setting)
    everything = {key for sums in (expected, *measured.values()) for key in sums}
    kinds = {key for key in everything if is_derived(volume, key[0], key[2])}
    found = []
    for key in sorted(kinds):
        wanted = expected.get(key, 0)
        rank, sent = max(
            ((rank, sums.get(key, 0)) for rank, sums in measured.items()),
            key=lambda pair: abs(pair[1] - wanted),
        )
        if sent != wanted:
            phase, op, dtype, role = key
            found.append(
                VolumeDifference(
                    phase=phase, op=op, dtype=dtype, role=role, rank=rank, measured_bytes=sent,
                    expected_bytes=wanted, group_ranks=_group_ranks(record, setting, rank, key),
                )
            )  # fmt: skip
    return found


def _group_ranks(record: Record, setting: Setting, rank: int, key: Key) -> tuple[int, ...]:
    """Ranks of the first group in which `rank` did this."""
    rows = (row for row in record.comm if row.rank == rank and _key(row, setting) == key)
    return next((tuple(sorted(row.group_ranks)) for row in rows), ())


def expected_sent_bytes_per_step(record: Record) -> float | None:
    """Ring bytes that a rank is expected to send per counted step; None where that is not known."""
    pair = volume_of(record)
    if pair is None:
        return None
    setting, volume = pair
    if volume.unknown or any(part.phase in STEP_PHASES for part in volume.underived):
        return None
    total = sum(c.sent_bytes(setting) for c in volume.collectives if c.phase in STEP_PHASES)
    return total / len(setting.steps)


def textbook_differences(record: Record) -> list[TermDifference] | None:
    """Expected minus textbook, term by term; None where one of them is not known."""
    pair, effective = volume_of(record), record.backend.effective
    if pair is None or pair[1].unknown or effective is None:
        return None
    setting, volume = pair
    weights = effective["parameter_dtype"]
    textbook: list[Collective] | None = textbook_collectives(
        record.backend.name,
        setting,
        weight_dtype=weights,
        reduce_dtype=effective["reduce_dtype"] or weights,
    )
    return None if textbook is None else explain(setting, volume, textbook)


def _shard_size(record: Record) -> int:
    """Ranks of a shard group: of a hybrid, as the backend's mesh has it; else all of them."""
    details = (record.backend.effective or {}).get("details", {})
    hybrid = record.backend.name.endswith("-hybrid")
    return int(details.get("shard_size", record.world.world_size)) if hybrid else record.world.world_size


def _evaluations(record: Record) -> tuple[int, int]:
    """Forward passes in evaluations, and spells of them without a training step in between.

    Where evaluations are asked for, one pass more follows the last counted step, for its memory.
    """
    if not record.job["evaluation"]["every_steps"]:
        return 0, 0
    held_out = (record.data or {}).get("evaluation_samples", 0)
    batches = -(-held_out // (record.world.micro_batch_size * record.world.world_size))
    after_counted = [step.step + 1 for step in record.steps if step.window == "counted"][-1:]
    evaluated = [part.step for part in record.eval] if batches else []
    return len(evaluated) * batches + len(after_counted), len({*evaluated, *after_counted})
