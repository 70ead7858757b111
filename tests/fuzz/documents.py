"""Documents that are nearly right: valid ones with a few places changed, and settings drawn from a schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.values import hostile

Place = tuple[Any, ...]


def places(document: Any, at: Place = ()) -> Iterator[Place]:
    """The keys and indices that lead to each value within a document, the innermost too."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


@st.composite
def mutated(draw: st.DrawFn, documents: Sequence[Any], most: int = 4) -> Any:
    """One of the documents with up to `most` places replaced, removed, renamed, doubled or exchanged."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, most))):
        found = list(places(document))
        if not found:
            break
        *way, last = found[draw(st.integers(0, len(found) - 1))]
        parent = document
        for key in way:
            parent = parent[key]
        how = draw(st.sampled_from(["replace"] * 6 + ["remove", "rename", "exchange", "wrap", "add"]))
        _change(draw, parent, last, how, found, document)
    return document


def _change(draw: st.DrawFn, parent: Any, key: Any, how: str, found: Sequence[Place], document: Any) -> None:
    match how:
        case "replace":
            parent[key] = draw(hostile())
        case "remove":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = parent.pop(key)
        case "exchange":
            other: Any = document
            for part in found[draw(st.integers(0, len(found) - 1))]:
                other = other[part]
            parent[key] = copy.deepcopy(other)
        case "wrap":
            parent[key] = [parent[key]]
        case _ if isinstance(parent, list):
            parent += parent[:3]
        case _:
            parent[draw(st.text(max_size=12))] = draw(hostile())


def of_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, or nearly; `root` holds its definitions."""
    if "$ref" in schema:
        return of_schema(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return st.one_of([of_schema(one, root) for one in schema["anyOf"]])
    match schema.get("type"):
        case "integer":
            return st.one_of(st.integers(-1, 9), st.integers(0, 2**40))
        case "number":
            return st.one_of(st.floats(0, 2), st.floats())
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(of_schema(schema.get("items", {}), root), max_size=3)
        case "object" if "properties" in schema:
            return st.fixed_dictionaries(
                {}, optional={key: of_schema(value, root) for key, value in schema["properties"].items()}
            )
        case "string":
            return st.one_of(st.sampled_from(["bytes", "ddp", "zero3", "x.txt", "2GB"]), st.text(max_size=8))
        case _:
            return hostile()


def settings(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A few settings of a few sections, each as the schema has it or hostile."""
    sections = {key: _resolved(value, schema) for key, value in schema["properties"].items()}

    @st.composite
    def document(draw: st.DrawFn) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(draw(st.integers(1, 5))):
            name = draw(st.sampled_from(list(sections)))
            keys = sections[name].get("properties", {})
            if not keys or draw(st.integers(0, 19)) == 0:
                found[name] = draw(hostile())
                continue
            key = draw(st.sampled_from(list(keys)))
            section = found.setdefault(name, {})
            if isinstance(section, dict):
                is_right = draw(st.booleans())
                section[key] = draw(of_schema(keys[key], schema) if is_right else hostile())
        return found

    return document()


def _resolved(part: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = part.get("$ref") or next(iter(part.get("allOf", [{}])), {}).get("$ref")
    return root["$defs"][reference.rpartition("/")[2]] if reference else part
