"""Files and functions stay short enough to read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 1200
LONGEST_FUNCTION = 80
SOURCES = [*sorted((ROOT / "backends").rglob("*.py")), *sorted((ROOT / "harness").rglob("*.py"))]


def test_no_source_file_is_longer_than_1200_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > LONGEST_FILE} == {}


def test_no_function_is_longer_than_80_lines() -> None:
    lengths = {name: length for path in SOURCES for name, length in functions(path)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function and method of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1
