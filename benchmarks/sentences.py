"""Write every sentence that the product can print into one file, to be read from end to end.

python -m benchmarks.sentences FILE: the texts of at least four words in harness/ and backends/, by module and
line, with expressions in braces, and those of their TOML files by key. Of docstrings only the help of
commands is included.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDERS = ("harness", "backends")
LEAST_WORDS = 4


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each template, neighbours that are added together as one."""
    silent = set(_docstrings(tree))
    pending = [tree]
    while pending:
        node = pending.pop(0)
        text = _text(node)
        if text is None:
            pending[:0] = ast.iter_child_nodes(node)
        elif id(node) not in silent and len(text.split()) >= LEAST_WORDS:
            yield node.lineno, " ".join(text.split())  # type: ignore[attr-defined]
            pending[:0] = [n for n in ast.walk(node) if isinstance(n, ast.FormattedValue)]


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Key and text of each sentence in a TOML document."""
    match value:
        case str() if len(value.split()) >= LEAST_WORDS:
            yield key, " ".join(value.split())
        case dict():
            for name, part in value.items():
                yield from texts(part, f"{key}.{name}".removeprefix("."))
        case list():
            for place, part in enumerate(value):
                yield from texts(part, f"{key}[{place}]")


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """Strings that stand alone, unless a decorator makes them the help of a command."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        is_command = any("command" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))
        for place, part in enumerate(body if isinstance(body, list) else ()):
            if isinstance(part, ast.Expr) and not (is_command and place == 0):
                yield id(part.value)


def _text(node: ast.AST) -> str | None:
    """The text of a constant or an f-string, its values as {expression}; None for any other node."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(
                part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
                for part in values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
    return None


def write(root: Path, target: Path) -> int:
    """Write the sentences of a repository; returns how many."""
    found = 0
    with target.open("w", errors="backslashreplace") as file:
        for folder in FOLDERS:
            for path in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.toml")]):
                source = path.read_text()
                is_code = path.suffix == ".py"
                lines = [*(sentences(ast.parse(source)) if is_code else texts(tomllib.loads(source)))]
                if lines:
                    file.write(f"\n{path.relative_to(root)}\n")
                    file.writelines(f"{line}: {text}\n" for line, text in lines)
                found += len(lines)
    return found


if __name__ == "__main__":
    print(f"{write(Path(__file__).parents[1], Path(sys.argv[1]))} sentences")
