"""What a key of another tool's configuration means here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.backends.library_facts import why_not_run

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
class Claim:
    """One key of a file."""

    key: str
    given: Any
    rule: Rule
    value: Any = None
    """`given` in the terms of this project; AUTO: left to the job."""
    used: Any = None
    """Of `Chooses`: what it chose."""
    is_absent: bool = False
    """Whether the file does not give it, and `value` is the library's default."""


def boolean(value: Any) -> bool:
    """true or false, also as YAML 1.1 and command lines write them. Raises ValueError."""
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ValueError("give true or false")


def integer(value: Any) -> int:
    """A whole number, also as 5e8 or '5e8'. Raises ValueError."""
    number_ = number(value)
    if number_ != int(number_):
        raise ValueError("give a whole number")
    return int(number_)


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("give a number")
    try:
        found = float(value)
        if abs(found) > 2**63:
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise ValueError("give a number") from error
    if found != found:
        raise ValueError("give a number")
    return found


def alike(left: Any, right: Any) -> bool:
    """Whether a file's value means the same as another: 5e8 is 500000000, 'no' is false."""
    if isinstance(right, bool) or isinstance(left, bool):
        try:
            return boolean(left) == boolean(right)
        except ValueError:
            return False
    if isinstance(right, (int, float)):
        try:
            return number(left) == right
        except ValueError:
            return False
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right)


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys, given as words."""
    return dict.fromkeys(names.split(), rule)
