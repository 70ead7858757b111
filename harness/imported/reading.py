"""From the keys of a file to resolutions: what each means here and asks for. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from harness.backends.libraries.facts import why_not_run
from harness.backends.refusals import available, suggestion
from harness.imported.values import alike, integer
from harness.nested import empty_sections, leaves, value_at
from harness.safe_text import capped

AUTO = "auto"
"""DeepSpeed's files: Accelerate or Trainer fills the value in."""
LIBRARY: Any = object()
"""In place of a default: the installed library's own (`library_defaults`)."""


@dataclass(frozen=True, kw_only=True)
class ToJob:
    """A setting of the job."""

    setting: str
    """Dotted: 'training.precision'."""
    convert: Callable[[Any], Any] | None = None
    """The setting's value from the file's. Raises ValueError saying what is allowed."""
    reason: str | None = None
    """What to know although the value is taken."""


@dataclass(frozen=True, kw_only=True)
class ToOption:
    """An option of the backend."""

    option: str
    default: Any = LIBRARY
    """The library's, which needs no option."""
    convert: Callable[[Any], Any]
    reason: str | None = None
    """What to know although the value is taken."""


@dataclass(frozen=True, kw_only=True)
class OfPreset:
    """A setting that the preset decides, with no option of its own."""

    setting: str
    """As `backends.presets` names it."""
    default: Any = LIBRARY
    """The library's."""
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Every run has one value; another one is pinned, or refused where it would be another strategy."""

    used: Any = LIBRARY
    reason: str
    refuses: bool = False


@dataclass(frozen=True, kw_only=True)
class NotUsed:
    """No part of a run: launching, logging, saving."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Off:
    """A feature that no run has; its key or section is accepted where it is empty or switched off."""

    feature: str

    @property
    def why(self) -> str:
        """Why no run has it."""
        if reason := why_not_run(self.feature):
            return f"unsupported: {reason}; leave it out or switch it off"
        return (
            f"unsupported: no backend, option or setting of this version has {self.feature}; leave it out or "
            "switch it off"
        )


@dataclass(frozen=True, kw_only=True)
class OfSchedule:
    """An argument of DeepSpeed's scheduler, by which the job's learning rates are computed."""


@dataclass(frozen=True, kw_only=True)
class Chooses:
    """Chooses the backend or its offload."""


Rule: TypeAlias = ToJob | ToOption | OfPreset | Fixed | NotUsed | Off | Chooses | OfSchedule


@dataclass(frozen=True, kw_only=True)
class KeyResolution:
    """One key of a file."""

    name: str
    given: Any
    rule: Rule
    value: Any = None
    """`given` in the terms of this project; AUTO: left to the job."""
    used: Any = None
    """Of `Chooses`: what it chose."""
    is_absent: bool = False
    """Whether the file does not give it, and `value` is the library's default."""


Value = TypeVar("Value")
MOST_SHOWN = 200
"""Bytes of a refused value."""
MOST_LISTED = 20
"""Keys of a section: more are not listed."""
HARMLESS: tuple[Any, ...] = (None, False, -1, "", "no", "none", "auto", {}, [])
"""Values of a feature that is not asked for."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A file in this project's terms."""

    backend: str
    """Name in the registry."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that choose the strategy, such as its offload."""
    resolutions: list[KeyResolution]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the job, dotted, that several keys decide together."""


class Refusals:
    """Collects what a file asks for that no run can have, so that a person sees all of it at once."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.keys: list[str] = []
        """Those of `add` and `unknown`, dotted."""

    def add(self, key: str, given: Any, reason: str) -> None:
        self.keys.append(key)
        self.found.append(f"'{key}' was given {capped(repr(given), MOST_SHOWN)}: {reason}")

    def read(self, convert: Callable[[Any], Value], key: str, given: Any, otherwise: Value) -> Value:
        """A value as it is converted; `otherwise` where that refuses it."""
        try:
            return convert(given)
        except ValueError as error:
            self.add(key, given, str(error))
            return otherwise

    def choose(self, key: str, given: Any, allowed: range, how: str) -> int:
        """A number out of these; the first of them where another thing was given."""
        with suppress(ValueError):
            if (number := integer(given)) in allowed:
                return number
        self.add(key, given, how)
        return allowed[0]

    def unknown(self, key: str, known: Iterable[str]) -> None:
        """Name the first part of a dotted key that is unknown, and what may stand in its place."""
        self.keys.append(key)
        parts, names = key.split("."), [name.split(".") for name in known]
        below = sorted(".".join(name) for name in names if name[: len(parts)] == parts)
        if below:
            self.found.append(f"'{key}' is a section of keys such as '{below[0]}', not a value")
            return
        depth = next(
            (d for d in range(len(parts)) if not any(n[: d + 1] == parts[: d + 1] for n in names)),
            len(parts) - 1,
        )
        allowed = {n[depth] for n in names if len(n) > depth and n[:depth] == parts[:depth]}
        where = f" in {'.'.join(parts[:depth])}" if depth and allowed else ""
        listed = available(parts[depth], sorted(allowed), f"Allowed{where}") if allowed else "No keys below"
        text = f"'{'.'.join(parts[: depth + 1])}' is unknown. "
        homes = [".".join(name[:-1]) for name in names if len(name) > 1 and name[-1] == parts[depth]]
        if len(allowed) <= MOST_LISTED:
            text += listed
        elif homes:
            text += f"It belongs in '{homes[0]}'"
        else:
            close = suggestion(parts[depth], sorted(allowed))
            text += close or f"None of the {len(allowed)} keys{where} is close; remove it"
        if text not in self.found:
            self.found.append(text)


def resolutions_of(
    document: Mapping[str, Any], keys: Mapping[str, Rule], sections: Mapping[str, Rule], refusals: Refusals,
    converted: Mapping[str, Any] | None = None, prefix: str = "",
) -> list[KeyResolution]:  # fmt: skip
    """A resolution for every key of a document; what cannot be is added to `refusals`.

    `converted`: values of keys that are read together, in this project's terms. `prefix` is put before keys.
    """
    found = []
    refused = _refused_sections(document, keys, sections, refusals)
    for parts in empty_sections(dict(document)):
        key = ".".join(parts)
        known = key in keys or any(name.startswith(f"{key}.") for name in [*keys, *sections])
        if not known and _of_section(key, sections) is None:
            refusals.unknown(key, [*keys, *sections])
    for parts, given in leaves(dict(document)):
        key = ".".join(parts)
        if any(key == name or key.startswith(f"{name}.") for name in refused):
            continue
        rule = keys.get(key) or _of_section(key, sections)
        if rule is None:
            if given is None and any(other.startswith(f"{key}.") for other in keys):
                continue  # an empty section
            refusals.unknown(key, [*keys, *sections])
            continue
        resolution = _resolution(prefix + key, key, given, rule, refusals, dict(converted or {}))
        if resolution is not None:
            found.append(resolution)
    return found


def _of_section(key: str, sections: Mapping[str, Rule]) -> Rule | None:
    return next((rule for name, rule in sections.items() if key == name or key.startswith(f"{name}.")), None)


def _resolution(
    shown: str, key: str, given: Any, rule: Rule, refusals: Refusals, converted: Mapping[str, Any]
) -> KeyResolution | None:
    if isinstance(rule, Off):
        if not _is_off(given):
            refusals.add(shown, given, rule.why)
            return None
        return KeyResolution(name=shown, given=given, rule=rule)
    if key in converted:
        return KeyResolution(name=shown, given=given, rule=rule, value=converted[key])
    if given == AUTO:
        return KeyResolution(name=shown, given=given, rule=rule, value=AUTO)
    try:
        value = _value(given, rule)
    except ValueError as error:
        refusals.add(shown, given, str(error))
        return None
    if isinstance(rule, Fixed) and rule.refuses and not alike(given, rule.used):
        refusals.add(shown, given, f"every run has {rule.used!r}: {rule.reason}; set it so or leave it out")
        return None
    return KeyResolution(name=shown, given=given, rule=rule, value=value)


def _value(given: Any, rule: Rule) -> Any:
    if isinstance(rule, Chooses):
        return None
    convert = rule.convert if isinstance(rule, ToJob | ToOption | OfPreset) else None
    return given if convert is None else convert(given)


def _refused_sections(
    document: Mapping[str, Any], keys: Mapping[str, Rule], sections: Mapping[str, Rule], refusals: Refusals
) -> set[str]:
    """Sections of features that no row has and that are not switched off, each refused once."""
    found = set()
    for name, rule in sections.items():
        given = value_at(dict(document), tuple(name.split(".")))
        if any(key.startswith(f"{name}.") for key in keys):
            continue  # key by key
        if isinstance(rule, Off) and not _is_off(given):
            refusals.add(name, given, rule.why)
            found.add(name)
    return found


def _is_off(given: Any) -> bool:
    """Whether a section asks for nothing: it is empty, or its switch is off."""
    if not isinstance(given, dict):
        return given in HARMLESS or alike(given, False)
    switches = {"enabled": False, "disable": True}
    switched = [(given[name], off) for name, off in switches.items() if name in given]
    if switched:
        return all(alike(value, off) or (off is not True and value in HARMLESS) for value, off in switched)
    return all(_is_off(value) for value in given.values())
