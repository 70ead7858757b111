"""Defaults of libraries that change what is trained."""

from __future__ import annotations

import math

from harness.backends import registry
from harness.backends.libraries.facts import fact
from harness.backends.presets import TIMER_WAITS, preset_changes
from harness.forms.model.layout import DTYPE_BYTES
from harness.judge.effective import clipping, master_dtypes
from harness.judge.library_notes.note import NAMES, PARITY, CellNote, LibraryNote
from harness.judge.quantities import reduced_dtypes
from harness.judge.rows import CellRuns
from harness.judge.wording import listed
from harness.record import Record

CHANGES_TRAINING = math.inf
"""Effect of what trains something else than the job asks for: before every difference of cost."""
WOULD_CHANGE_TRAINING = 0.4
"""Effect of a default that would do so without this harness's setting: ranked as 40 % of bytes."""
CLIPS_BY_DEFAULT = fact("zero-clips-by-default")
CLIPPING_KEY = "gradient_clipping"
CLIPPED = LibraryNote(
    id="clipped-by-default",
    since=CLIPS_BY_DEFAULT.source,
    figure_is_ratio=False,
    what="gradients are clipped at {figure}, unasked: the default of DeepSpeed since "
    + CLIPS_BY_DEFAULT.first,
    advice="Set gradient_clipping: 0.0.",
    questions=PARITY,
)
CLIPPING_PINNED = LibraryNote(
    id="clipping-set-by-harness",
    since=CLIPS_BY_DEFAULT.source,
    figure_is_ratio=False,
    what=f"since {CLIPS_BY_DEFAULT.first} DeepSpeed clips at 1.0 if gradient_clipping is unset; here "
    "{figure} is set",
    advice="Set it yourself.",
    questions=PARITY,
)
WAITS_EFFECT = 0.05
"""Bytes do not show a wait for the device: ranked as 5 % of bytes."""


def find_in_training(group: CellRuns) -> list[CellNote]:
    """What the first repeat of a cell shows."""
    record = group.record
    looked = (_clipping, _masters, _reduction, _accumulation, _replaced, _refused, _waits)
    return [cell_note for look in looked if (cell_note := look(record)) is not None]


def _clipping(record: Record) -> CellNote | None:
    """In force unasked, or kept away by this harness."""
    version = record.backend.versions.get("deepspeed")
    config, in_force = record.backend.native_config, clipping(record)
    if version is None or not CLIPS_BY_DEFAULT.includes(version) or not config or in_force is None:
        return None
    if CLIPPING_KEY in config:
        return CellNote(
            library_note=CLIPPING_PINNED, figure=float(config[CLIPPING_KEY]), effect=WOULD_CHANGE_TRAINING
        )
    asked = record.job.training.gradient_clipping
    if in_force == "none" or asked == float(in_force):
        return None
    return CellNote(library_note=CLIPPED, figure=float(in_force), effect=CHANGES_TRAINING)


def low_precision_masters(record: Record) -> list[str]:
    """Dtypes below fp32 of weights that the optimizer updates although the job asks for mixed precision."""
    if not _mixed(record):
        return []
    return [dtype for dtype in master_dtypes(record) or () if DTYPE_BYTES.get(dtype, 4) < 4]


def _masters(record: Record) -> CellNote | None:
    low = low_precision_masters(record)
    if not low:
        return None
    note = LibraryNote.of(
        "masters-in-low-precision",
        what=f"the optimizer updates {listed(low)} weights: small updates vanish",
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=CHANGES_TRAINING)


def _reduction(record: Record) -> CellNote | None:
    """Gradients that cross the wire in low precision at mixed precision, as the library does by default."""
    low = [dtype for dtype in reduced_dtypes(record) if DTYPE_BYTES.get(dtype, 4) < 4]
    if not _mixed(record) or not low:
        return None
    note = LibraryNote.of(
        "reduced-in-low-precision",
        what=f"gradients are averaged in {listed(low)}: half the bytes, coarser sums",
        advice=_setting(record, "wire"),
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=DTYPE_BYTES[low[0]] / DTYPE_BYTES["float32"])


def _accumulation(record: Record) -> CellNote | None:
    """Micro-steps that add up in low precision at mixed precision."""
    effective = record.backend.effective
    dtype = effective.accumulation_dtype if effective else None
    if not _mixed(record) or record.world.accumulation_steps == 1 or DTYPE_BYTES.get(dtype or "", 4) >= 4:
        return None
    note = LibraryNote.of(
        "accumulated-in-low-precision",
        what=f"micro-steps add up in {dtype}, which drops what is below 1/256 of the sum",
        advice=_setting(record, "micro-steps"),
        packages=_packages(record),
    )
    return CellNote(library_note=note, effect=CHANGES_TRAINING)


def _replaced(record: Record) -> CellNote | None:
    """A library that runs another strategy than it was asked for."""
    effective = record.backend.effective
    if effective is None or effective.requested_strategy in (None, effective.strategy):
        return None
    note = LibraryNote(
        id="strategy-replaced",
        what=f"asked for {effective.requested_strategy}, runs {effective.strategy}",
        advice="Use more ranks, or take the row for what it runs.",
        questions=("parity", "memory", "speed", "scaling"),
        packages=_packages(record),
        since="read back from the library",
    )
    on_one_rank = record.world.world_size == 1  # which has nothing to shard
    return CellNote(library_note=note, effect=0.0 if on_one_rank else CHANGES_TRAINING)


def _refused(record: Record) -> CellNote | None:
    """A cell that was not run because of what a version of a library would have done."""
    reason = next((text for text in record.reasons if text.startswith(tuple(NAMES))), None)
    if record.status != "unsupported" or reason is None:
        return None
    note = LibraryNote(
        id="not-run",
        what=f"not run: {reason.rstrip('.').replace('{', '{{').replace('}', '}}')}",
        advice="",
        questions=("speed", "memory", "parity"),
        packages=(),
        since="read back from the library",
    )
    return CellNote(library_note=note, effect=0.0)


def _waits(record: Record) -> CellNote | None:
    """DeepSpeed's own timer, where there is a device to wait for."""
    effective = record.backend.effective
    waits = effective is not None and effective.details.get(TIMER_WAITS)
    if not waits or record.world.device == "cpu":
        return None
    return CellNote(library_note=LibraryNote.of("waits-for-the-device"), effect=WAITS_EFFECT)


def _mixed(record: Record) -> bool:
    return record.job.training.precision.endswith("-mixed")


def _packages(record: Record) -> tuple[str, ...]:
    """The library whose default it is: DeepSpeed where it runs, else torch."""
    own = [name for name in ("deepspeed", "torch") if name in record.backend.versions]
    return tuple(own[:1])


def _setting(record: Record, about: str) -> str:
    """What the like-for-like preset sets for this strategy, as advice; '' where it sets nothing."""
    strategy, effective = registry.strategy_of(record.backend.name), record.backend.effective
    if strategy is None or effective is None:
        return ""
    changes = preset_changes(
        strategy, record.job.training.held_precision, "like-for-like", effective.parameter_count
    )
    found = [change for change in changes if about in change.reason]
    return f"Set {listed([f'{c.setting}: {c.value}' for c in found])}." if found else ""
