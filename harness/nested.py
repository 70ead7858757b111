"""Walks nested documents by their keys, and groups values. Imports nothing of the harness."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias, TypeVar

Keys: TypeAlias = tuple[str, ...]
"""The keys that lead to a value, the outermost first."""
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Amount = TypeVar("Amount", int, float)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key; both in the order in which they come first."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def totals(pairs: Iterable[tuple[Key, Amount]]) -> dict[Key, Amount]:
    """What the amounts of each key add up to; keys in the order in which they come first."""
    found: dict[Key, Amount] = {}
    for key, amount in pairs:
        found[key] = found.get(key, 0) + amount
    return found


def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a key that stands twice, of which Python takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"gives '{twice}' twice")
    return found


def parse_json(text: str) -> Any:
    """Raises ValueError: no JSON, a key twice, NaN or infinity, with its dotted key."""

    def refuse(constant: str) -> NoReturn:
        where = next(_not_finite(json.loads(text)), "?")
        raise ValueError(f"has {constant} in '{where}', which is no number of JSON")

    return json.loads(text, object_pairs_hook=mapping, parse_constant=refuse)


def _not_finite(value: Any, keys: Keys = ()) -> Iterator[str]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(inner, (*keys, str(key)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield ".".join(keys)


def leaves(document: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """(keys, value) of each value that is no mapping; a list counts as one value."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, (*keys, str(key)))
    else:
        yield keys, document


def empty_sections(document: dict[str, Any], keys: Keys = ()) -> Iterator[Keys]:
    """The keys of each mapping below `document` that holds nothing, which `leaves` leaves out."""
    for key, value in document.items():
        if isinstance(value, dict):
            if value:
                yield from empty_sections(value, (*keys, str(key)))
            else:
                yield (*keys, str(key))


def differences(left: Any, right: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any, Any]]:
    """(keys, left, right) of each value in which two documents differ; None for what one has not."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
            yield from differences(left.get(key), right.get(key), (*keys, str(key)))
    elif left != right:
        yield keys, left, right


def value_at(document: Any, keys: Keys) -> Any:
    """The value to which these keys lead; None where they lead nowhere."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def put(document: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set the value to which these keys lead; mappings on the way are made where there is none."""
    for key in keys[:-1]:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    document[keys[-1]] = value


def removed(document: dict[str, Any], keys: Keys) -> bool:
    """Take out the value to which these keys lead; False: they lead nowhere."""
    inner = value_at(document, keys[:-1])
    if not isinstance(inner, dict) or keys[-1] not in inner:
        return False
    del inner[keys[-1]]
    return True


def mapped(value: Any, leaf: Callable[[Any], Any], key: Callable[[Any], Any] = lambda name: name) -> Any:
    """A document with `leaf` of what holds no values, under `key` of its keys; tuples become lists."""
    if isinstance(value, dict):
        return {key(name): mapped(inner, leaf, key) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(inner, leaf, key) for inner in value]
    return leaf(value)


def finite(value: Any) -> Any:
    """Replace floats that are not finite by None, within dicts, lists and tuples."""
    return mapped(value, lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf)
