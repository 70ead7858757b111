"""Reads configuration files of public repositories, exports their rows and reads those again.

`python -m benchmarks.public_configurations CLONES` prints a table; CLONES holds a clone OWNER+NAME (or
OWNER+NAME/repo) of each repository that `public_configurations.yaml` names.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML
from tabulate import tabulate

from harness.imported.rows import GivenRow
from harness.nested import leaves
from tests.harness.exported.round_trip import require_round_trip

LIST = Path(__file__).with_suffix(".yaml")
MODES = ("like-for-like", "exactly-as-given")
COLUMNS = ("repository", "file", "row", "taken", "pinned", "no part in a run")


def read_from(clones: Path, entry: dict[str, str], folder: Path) -> Path:
    """The file of one entry, and the DeepSpeed file that it may name, as they are in the commit."""
    clone = clones / entry["repository"].replace("/", "+")
    clone = clone / "repo" if (clone / "repo").is_dir() else clone
    names = subprocess.run(
        ["git", "-C", str(clone), "ls-tree", "-r", "--name-only", entry["commit"]],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in names:
        if name == entry["path"] or (name.endswith(".json") and "deepspeed_config_templates" in name):
            text = subprocess.run(
                ["git", "-C", str(clone), "show", f"{entry['commit']}:{name}"],
                capture_output=True,
                check=True,
            ).stdout
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
    return folder / entry["path"]


def account(row: GivenRow, path: Path) -> list[int]:
    """Keys taken, pinned and without a part in a run. Raises AssertionError for one that is none of them."""
    document = YAML(typ="safe", pure=True).load(path.read_text())
    keys = {".".join(parts) for parts, value in leaves(document) if value not in ({}, None)}
    assert keys <= {setting.key for setting in row.part.settings}, keys
    idle = sum(setting.used is None for setting in row.part.pinned)
    pinned = len(row.part.pinned) - idle
    return [len(row.part.settings) - pinned - idle, pinned, idle]


def unnamed(label: str) -> str:
    """Without the name of the file, by which a row is told apart from others."""
    backend, _, options = label.partition(":")
    kept = ",".join(option for option in options.split(",") if not option.startswith("row="))
    return f"{backend}:{kept}" if kept else backend


def line(clones: Path, entry: dict[str, str]) -> list[Any]:
    with TemporaryDirectory() as scratch:
        path = read_from(clones, entry, Path(scratch))
        for mode in MODES:
            (Path(scratch) / mode).mkdir()
            row = require_round_trip(path, mode, Path(scratch) / mode)
            assert row.label.partition(":")[0] == entry["backend"], row.label
            if mode == MODES[0]:
                shown = [unnamed(row.label), *account(row, path)]
    return [f"{entry['repository']}@{entry['commit'][:7]}", entry["path"], *shown]


def main() -> None:
    clones = Path(sys.argv[1])
    entries = YAML(typ="safe", pure=True).load(LIST.read_text())
    lines = [line(clones, entry) for of_kind in entries.values() for entry in of_kind]
    sys.stdout.write(tabulate(lines, headers=COLUMNS, tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
