"""What became of each key of a configuration file, for a terminal and for a report."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from harness.judge.wording import listed
from harness.record import GivenPart, GivenSettingPart
from harness.tell.document import Table
from harness.tell.narrow import fitted, line_width
from harness.tell.tables import table_columns

MOST_KEYS = 30
"""That a sentence names."""


def summary(label: str, part: GivenPart) -> str:
    """'ds.json (deepspeed, like-for-like) is row zero3: 9 keys taken, 3 pinned, 4 without effect...'."""
    pinned, idle = _pinned(part), _idle(part)
    absent = [setting for setting in part.settings if setting.given is None and setting.handling == "taken"]
    taken = len(part.settings) - len(pinned) - len(idle) - len(absent)
    return (
        f"{part.file} ({part.kind}, {part.mode}) is row {label}: {taken} keys taken, {len(pinned)} pinned, "
        f"{len(idle)} without effect on a run"
    )


def given_lines(label: str, part: GivenPart) -> list[str]:
    """What differs from the file, key by key with the reason; then every key that has a part in a run."""
    lines = [summary(label, part)]
    for reason, settings in _by_reason(_pinned(part)).items():
        keys = ", ".join(f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in settings)
        lines += _wrapped(f"differs ({reason}): {keys}")
    taken = [s for s in part.settings if s.handling == "taken"]
    rows = [[s.key, text(s.given), text(s.used)] for s in taken]
    if rows:
        lines.append(fitted(rows, ["key", "given", "used"]))
    for reason, settings in _by_reason(_idle(part)).items():
        keys = ", ".join(f"{s.key}={text(s.given)}" for s in settings)
        lines += _wrapped(f"without effect ({reason}): {keys}")
    return lines


def _by_reason(settings: Sequence[GivenSettingPart]) -> dict[str, list[GivenSettingPart]]:
    found: dict[str, list[GivenSettingPart]] = {}
    for setting in settings:
        found.setdefault(setting.reason or "", []).append(setting)
    return found


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, line_width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def planned_lines(part: GivenPart, refused: Sequence[str]) -> list[str]:
    """What a plan takes from a file, what it does not, and what it did not understand: a sentence each."""
    given = [setting for setting in part.settings if setting.given is not None]
    taken = [s for s in given if s.handling == "taken" and s.given != "auto"]
    left = [s.key for s in given if s.handling == "taken" and s.given == "auto"]
    said = list(dict.fromkeys(f"{s.key}={text(s.given)}" for s in taken))
    lines = [f"from {part.file}: {listed(said, MOST_KEYS)}"] if said else []
    lines += [f"auto in {part.file}, so left to the job: {listed(left, MOST_KEYS)}"] if left else []
    for reason, settings in _by_reason(_pinned(part)).items():
        keys = [f"{s.key} {text(s.used)} instead of {text(s.given)}" for s in settings if s.given is not None]
        lines += [f"not as in {part.file} ({reason}): {listed(keys, MOST_KEYS)}"] if keys else []
    idle = [s.key for s in _idle(part) if s.given is not None]
    lines += [f"without effect on a run, in {part.file}: {listed(idle, MOST_KEYS)}"] if idle else []
    return lines + [f"not understood in {part.file}, and left out: {reason}" for reason in refused]


def given_table(part: GivenPart, number: int) -> Table:
    """Every key of a file; `number` tells the tables of a report apart."""
    rows = [[s.key, s.handling, text(s.given), text(s.used), s.setting or "", s.reason or ""]
            for s in part.settings]  # fmt: skip
    return Table(key=f"given_{number}", columns=table_columns("given"), rows=rows)


def text(value: Any) -> str:
    """A value as the file's own language writes it; '-' for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    return str(value)


def _is_idle(setting: GivenSettingPart) -> bool:
    return setting.handling == "pinned" and setting.used is None


def _idle(part: GivenPart) -> Sequence[GivenSettingPart]:
    return [setting for setting in part.settings if _is_idle(setting)]


def _pinned(part: GivenPart) -> Sequence[GivenSettingPart]:
    return [setting for setting in part.pinned if not _is_idle(setting)]
