"""Every key of DeepSpeed's and Accelerate's files with its rule, from the tables beside this module."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from harness.backends.yaml_values import parse_value
from harness.imported import values
from harness.imported.reading import Chooses, Fixed, NotUsed, Off, OfPreset, OfSchedule, Rule, ToJob, ToOption
from harness.record import FileKind

COMPUTE_DTYPE = "the compute dtype"
"""What DeepSpeed takes where keys of dtypes are absent."""
RULES: dict[str, tuple[Any, str | None]] = {
    "job": (ToJob, "setting"),
    "option": (ToOption, "option"),
    "preset": (OfPreset, "setting"),
    "fixed": (Fixed, "used"),
    "not_used": (NotUsed, "reason"),
    "off": (Off, "feature"),
    "chooses": (Chooses, None),
    "schedule": (OfSchedule, None),
}
"""By the first word of a row: the rule, and its field that stands there."""


def _rule(row: dict[str, Any]) -> Rule:
    (name, first), *others = row.items()
    rule, field = RULES[name]
    given = ({field: first} if field else {}) | dict(others)
    if given.get("used") == "library":
        del given["used"]
    if "convert" in given:
        given["convert"] = getattr(values, given["convert"])
    found: Rule = rule(**given)
    return found


def read_table(name: str) -> dict[str, Any]:
    """One of the tables beside this module."""
    found: dict[str, Any] = parse_value(files(__package__).joinpath(f"{name}.yaml").read_text("utf-8"))
    return found


def _table(kind: FileKind) -> dict[str, dict[str, Rule]]:
    """Rules by key, below each section of a table."""
    return {
        section: {key: rule for keys, row in rows.items() for rule in [_rule(row)] for key in keys.split()}
        for section, rows in read_table(kind).items()
    }


def _dotted(table: dict[str, dict[str, Rule]]) -> dict[str, Rule]:
    return {
        key if section == "keys" else f"{section}.{key}": rule
        for section, rules in table.items()
        if section != "sections"
        for key, rule in rules.items()
    }


_TABLES: dict[FileKind, dict[str, dict[str, Rule]]] = {
    "accelerate": _table("accelerate"),
    "deepspeed": _table("deepspeed"),
}
KEYS = {kind: _dotted(table) for kind, table in _TABLES.items()}
"""Dotted, by kind of file."""
SECTIONS = {kind: table["sections"] for kind, table in _TABLES.items()}
"""Sections whose keys share one rule, unless a key has its own."""
