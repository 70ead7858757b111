"""Values that nobody writes by accident, and documents of them as JSON and YAML."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

RAW = "\ue000{}\ue001"
_RAW = re.compile('"\ue000(.*?)\ue001"')
SPELLED = {
    "4000 digits": "9" * 4000,
    "5000 digits": "9" * 5000,
    "deep list": "[" * 3000 + "]" * 3000,
    "deep mapping": '{"a":' * 1500 + "1" + "}" * 1500,
    "tag": '!!python/object/apply:os.system ["touch outside"]',
    "circle": "&c [*c]",
    "circle of keys": "&c {a: *c}",
    "unknown alias": "*nobody",
    "unclosed": "[1, 2",
    "tab": "\t- x",
    "not a number": ".nan",
    "infinity": "-.inf",
    "octal": "0o777777777777777777777777",
    "date": "2026-02-31",
    "binary": "!!binary /w==",
    "set": "!!set {a, b}",
    "merge": "{<<: 3}",
    "complex key": "{[1]: 2}",
}
"""Text that is put into a document as it stands."""
NUMBERS = (
    0, -0.0, -1, 1, 2, 3, 7, 10**6, 10**9, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400,
    1e-320, 5e-8, 1e38, 1e308, float("inf"), float("-inf"), float("nan"), 0.1, True, False, None,
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "a\x00b", "\ud800", "\u202e", "\x1b[31m", "\n", "a\nb", "x" * 300, "y" * 5000,
    "/" * 5000, "..", "../../../outside", "/etc/passwd", "/dev/zero", "~nobody/x", "~", "-", "--",
    "$(touch outside)", "`id`", "; touch outside", "%s%n", "{0.__class__}", "null", "none", "true",
    "nan", "1e999", "1_0", "0x10", "12:30", "auto", "all", "ddp", "zero3:offload=cpu", "ddp:", ":", "=",
    ",", "a=b=c", "ddp:a", "\uffff", "9" * 5000, "-1", "http://user:secret@host/x", "<script>",
    "\\write18{x}", "fp32", "cpu", "2GB", "1e30GB", "llama", "os.system", "os:system", "tests.fuzz:x",
    "2026-01-01T00:00:00", "0" * 64, "a.b", "*", "[", "(?:a+)+$", "𝟙", "é" * 120,
)  # fmt: skip


def hostile() -> st.SearchStrategy[Any]:
    """One value: a number, a text, a list, a mapping, or text that is no value at all."""
    numbers = st.one_of(st.sampled_from(NUMBERS), st.integers(), st.floats())
    texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20))
    raw = st.sampled_from(list(SPELLED)).map(RAW.format)
    leaves = st.one_of(numbers, texts, texts, raw)
    small = st.one_of(
        st.lists(leaves, max_size=4), st.dictionaries(texts.map(lambda text: text[:300]), leaves, max_size=4)
    )
    big = st.sampled_from(
        [[[]] * 500, [0] * 2000, {str(n): n for n in range(300)}, [[[[[[]]]]]], [{}], [], {}]
    )
    huge = st.sampled_from([[0] * 50_000, "z" * 200_000])
    weights = [leaves] * 24 + [small] * 9 + [big] * 6 + [huge]
    return st.integers(0, len(weights) - 1).flatmap(weights.__getitem__)


def as_json(document: Any) -> str:
    """JSON text; NaN, infinity, lone surrogates and numbers of thousands of digits as they are given."""
    return _RAW.sub(lambda found: SPELLED[found[1]], json.dumps(document, default=str, ensure_ascii=False))


def as_bytes(text: str) -> bytes:
    """UTF-8, lone surrogates as they are: no text that a reader accepts."""
    return text.encode("utf-8", "surrogatepass")


def torn(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes cut short, with bytes changed, doubled or put in."""

    def tear(given: tuple[bytes, int, int, bytes, str]) -> bytes:
        whole, first, second, put, how = given
        start, end = sorted((first % (len(whole) + 1), second % (len(whole) + 1)))
        match how:
            case "cut":
                return whole[:start]
            case "remove":
                return whole[:start] + whole[end:]
            case "double":
                return whole[:end] + whole[start:]
            case _:
                return whole[:start] + put + whole[start + len(put) :]

    places = st.integers(0, 2**20)
    noise = st.one_of(
        st.binary(max_size=8), st.sampled_from([b"\0" * 9, b"\xff\xfe", b"\n", b'"', b"}", b"- "])
    )
    return st.tuples(data, places, places, noise, st.sampled_from(["cut", "remove", "double", "put"])).map(
        tear
    )


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
