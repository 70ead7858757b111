"""How large the project is, and how far one must walk to read it: one row of figures for a tree.

Usage: python benchmarks/signs.py [TREE] [--traced]

Lines and files of `harness/` and `backends/` and of `tests/`, files that a single other file imports,
words of the documentation (tracked Markdown without reports and golden files), commands and flags.
`--traced` runs one comparison of `ddp` on 2 ranks with a report by the interpreter of the tree and adds
the modules of which any of its processes calls a function once they are imported, and climbs: how often,
in the order of first calls, the next module lies in a higher layer of `[tool.importlinter]` than the one
before it, in the launcher and in a rank. Most climbs are returns: a module calls a lower one, then a higher
one for the first time. Calls from a lower layer into a higher one are counted apart, by pairs of modules.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

HOOK = """
import os, sys
log, top = os.open(os.environ["SIGNS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.environ["SIGNS_TREE"]
seen, names = set(), {}
def own(path):
    if path not in names:
        real = os.path.realpath(path)
        below = real.startswith((top + "/harness/", top + "/backends/"))
        names[path] = os.path.relpath(real, top) if below and "bootstrap" not in real else None
    return names[path]
def importing(frame):
    # A module's own code, the body of a class, and what they call.
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and own(code.co_filename) not in (None, "harness/__main__.py"):
            return True
        frame = frame.f_back
    return False
def profile(frame, event, argument):
    if event != "call" or frame.f_back is None:
        return
    callee = own(frame.f_code.co_filename)
    if callee is None:
        return
    caller = own(frame.f_back.f_code.co_filename) or ""
    edge = (os.getpid(), caller, callee)
    if (edge not in seen or frame.f_code.co_name == "run_rank") and not importing(frame):
        seen.add(edge)
        os.write(log, f"{os.getpid()}\\t{caller}\\t{callee}\\t{frame.f_code.co_name}\\n".encode())
sys.setprofile(profile)
"""
COMMANDS = """
import click
from harness import cli
from harness.cli import main
def walk(command):
    yield command
    for sub in getattr(command, "commands", {}).values():
        yield from walk(sub)
group = next(v for v in [*vars(cli).values()] if isinstance(v, click.Group))
context = click.Context(group)
names = group.list_commands(context)
found = [leaf for name in names for leaf in walk(group.get_command(context, name))]
leaves = [c for c in found if not isinstance(c, click.Group)]
print(len(names), len(leaves), sum(isinstance(p, click.Option) for c in found for p in c.params))
"""


def main() -> None:
    words = sys.argv[1:]
    tree = Path(next((word for word in words if not word.startswith("--")), ".")).resolve()
    rows = dict(static(tree)) | dict(of_commands(tree))
    if "--traced" in words:
        rows |= traced(tree)
    width = max(map(len, rows))
    print("\n".join(f"{name:{width}}  {value:,}" for name, value in rows.items()))


def tracked(tree: Path, *patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=tree, check=True, capture_output=True, text=True
    )
    return [tree / name for name in done.stdout.split("\0") if (tree / name).is_file()]


def static(tree: Path) -> Iterator[tuple[str, int]]:
    sources = tracked(tree, "harness/*.py", "backends/*.py")
    tests = tracked(tree, "tests/*.py")
    yield "lines of harness/ and backends/", sum(map(line_count, sources))
    yield "files there", len(sources)
    yield "files with one importer", sum(len(of_one) == 1 for of_one in importers(tree, sources).values())
    yield "lines of tests/", sum(map(line_count, tests))
    pages = [
        p
        for p in tracked(tree, "*.md")
        if p.relative_to(tree).parts[0] != "reports" and "golden" not in p.parts and not p.is_symlink()
    ]
    yield "words of documents", sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def line_count(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def module_name(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join((("harness",) if parts[0] == "backends" else ()) + parts).removesuffix(".__init__")


def importers(tree: Path, sources: list[Path]) -> dict[str, set[str]]:
    """By module the other modules that import it; modules that none does are left out, and packages."""
    names = {module_name(tree, path): path for path in sources}
    found = defaultdict(set)
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                given = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                given = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for one in given:
                if one in names and names[one].name != "__init__.py" and one != name:
                    found[one].add(name)
    return found


def of_commands(tree: Path) -> Iterator[tuple[str, int]]:
    python = [tree / ".venv/bin/python", "-c", COMMANDS]
    done = subprocess.run(python, cwd=tree, check=True, capture_output=True, text=True)
    names, leaves, flags = map(int, done.stdout.split())
    yield "commands", names
    yield "commands with those below them", leaves
    yield "flags", flags


def traced(tree: Path) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="signs-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        log = Path(folder) / "log"
        given = ["compare", "--backends", "ddp", "--nproc", "2", "--set", "training.steps=6", "--runs"]
        subprocess.run(
            [tree / ".venv/bin/harness", *given, f"{folder}/runs", "--report", f"{folder}/report.md"],
            cwd=tree, check=True, capture_output=True,
            env=os.environ | {"PYTHONPATH": folder, "SIGNS_LOG": str(log), "SIGNS_TREE": str(tree)},
        )  # fmt: skip
        calls = [line.split("\t") for line in log.read_text().splitlines()]
    ranks = {pid for pid, _, _, function in calls if function == "run_rank"}
    order: dict[str, dict[str, None]] = defaultdict(dict)
    for pid, _, callee, _ in calls:
        order[pid][callee] = None
    height = heights(tree)
    climbs: dict[bool, list[int]] = {True: [0], False: [0]}
    for pid, modules in order.items():
        levels = [height.get(layer_of(module), 0) for module in modules]
        climbs[pid in ranks].append(sum(after > before for before, after in pairwise(levels)))
    pairs = {(caller, callee) for _, caller, callee, _ in calls if caller}
    up = [pair for pair in pairs if height.get(layer_of(pair[1]), 0) > height.get(layer_of(pair[0]), 0)]
    return {
        "modules of one comparison": len({module for modules in order.values() for module in modules}),
        "climbs in the launcher": max(climbs[False]),
        "climbs in a rank": max(climbs[True]),
        "pairs of modules of which one calls the other": len(pairs),
        "such pairs with the called one in a higher layer": len(up),
    }


def heights(tree: Path) -> dict[str, int]:
    """Height of each layer, counted from the lowest."""
    settings = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    layers = reversed(settings["tool"]["importlinter"]["contracts"][0]["layers"])
    return {name.strip(): height for height, layer in enumerate(layers) for name in layer.split("|")}


def layer_of(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return "backends" if parts[0] == "backends" else parts[1]


if __name__ == "__main__":
    main()
