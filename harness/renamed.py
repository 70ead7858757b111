"""Old names of settings and of backends' options, which are still read, and their new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from harness.errors import HarnessError

Notify = Callable[[str], None]
SETTINGS = {
    "compare.floor": "compare.noise_runs",
    "measure.counted_steps": "measure.probed_steps",
    "measure.settling_steps": "measure.cooldown_steps",
}
OPTIONS = {(backend, "masters"): "master_dtype" for backend in ("fsdp", "fsdp-grad-op", "fsdp-hybrid")}
"""By backend and old name."""


def rename_settings(document: dict[str, Any], notify: Notify) -> None:
    """Put the values of old settings under their new names, and say so once for each.

    Raises HarnessError where a setting has a value under both names.
    """
    for old, new in SETTINGS.items():
        section, key = old.split(".")
        values = document.get(section)
        if isinstance(values, dict) and key in values:
            _require_one(f"setting '{old}'", new, new.split(".")[1] in values)
            values[new.split(".")[1]] = values.pop(key)
            notify(_notice(old))


def rename_assigned(key: str, value: Any, notify: Notify) -> str:
    """The new name of a setting that is assigned `value`, within which settings are renamed too."""
    rename_settings({key: value}, notify)
    if key in SETTINGS:
        notify(_notice(key))
    return SETTINGS.get(key, key)


def require_one_name(keys: Iterable[str]) -> None:
    """Raise HarnessError if a setting is among the keys under its old and its new name."""
    given = set(keys)
    for old, new in SETTINGS.items():
        _require_one(f"setting '{old}'", new, {old, new} <= given)


def rename_options(label: str, notify: Notify) -> str:
    """A backend's label with the new names of its options. Raises HarnessError like `rename_settings`."""
    name, colon, given = label.partition(":")
    items = [item.partition("=") for item in given.split(",")]
    keys = [key.strip() for key, _, _ in items]
    for index, key in enumerate(keys):
        new = OPTIONS.get((name.strip(), key))
        if new is not None:
            _require_one(f"option '{key}' of backend '{name}'", new, new in keys)
            items[index] = (new, *items[index][1:])
            notify(f"option '{key}' of backend '{name}' is now called '{new}'")
    return name + colon + ",".join("".join(item) for item in items)


def _notice(old: str) -> str:
    return f"setting '{old}' is now called '{SETTINGS[old]}'"


def _require_one(old: str, new: str, both: bool) -> None:
    if both:
        raise HarnessError(f"{old} is the old name of '{new}', which is given too; give only '{new}'")
