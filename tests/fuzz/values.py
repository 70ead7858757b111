"""Values that nobody writes by accident, and documents of them as JSON and YAML."""

from __future__ import annotations

import json
import re
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
