"""Turns a record of schema version 1 into one of version 2, which renames keys and values."""

from __future__ import annotations

from typing import Any

from harness.renamed import OPTIONS, SETTINGS, rename_options

Document = dict[str, Any]
WINDOWS = {"counted": "probed", "settling": "cooldown"}
RANK_KEYS = {"ledger": "sample_hashes", "fed": "batch_digests", "fed_sums": "batch_hash_sums"}
MEASURE_KEYS = {
    old.partition(".")[2]: new.partition(".")[2]
    for old, new in SETTINGS.items()
    if old.startswith("measure.")
}


def from_schema_1(document: Document) -> Document:
    """The document of version 2; parts that are not as version 1 has them stay, to be refused there."""
    changed = document | {"schema_version": 2}
    for key, change in (("steps", _step), ("ranks", _rank)):
        if isinstance(parts := document.get(key), list):
            changed[key] = [change(part) if isinstance(part, dict) else part for part in parts]
    for key, names in (("windows", WINDOWS), ("measure", MEASURE_KEYS)):
        if isinstance(part := document.get(key), dict):
            changed[key] = _renamed(part, names)
    if isinstance(backend := document.get("backend"), dict):
        changed["backend"] = _backend(backend)
    return changed


def _step(step: Document) -> Document:
    """There are hundreds of thousands of them, so nothing but what changes is touched."""
    changed = step.copy()
    if "ledger" in step:
        changed["sample_hashes"] = changed.pop("ledger")
    window = step.get("window")
    if isinstance(window, str) and window in WINDOWS:
        changed["window"] = WINDOWS[window]
    return changed


def _rank(rank: Document) -> Document:
    return _renamed(rank, RANK_KEYS)


def _backend(backend: Document) -> Document:
    names = {old: new for (name, old), new in OPTIONS.items() if name == backend.get("name")}
    label, options = backend.get("label"), backend.get("options")
    return backend | {
        "label": rename_options(label, lambda _: None) if isinstance(label, str) else label,
        "options": _renamed(options, names) if isinstance(options, dict) else options,
    }


def _renamed(part: Document, names: dict[str, str]) -> Document:
    """The part with new names for these keys, in its own order."""
    return {names.get(key, key): value for key, value in part.items()}
