"""Configuration files of public repositories: six of each kind, each pinned, listed and read again."""

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks.public_configurations import LIST, line

CLONES = "PUBLIC_CLONES"
"""Variable with a folder of clones, OWNER+NAME each."""
KINDS: dict[str, list[dict[str, str]]] = YAML(typ="safe", pure=True).load(LIST.read_text())
ENTRIES = [entry for of_kind in KINDS.values() for entry in of_kind]
PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"


def start_of_row(entry: dict[str, str]) -> str:
    return f"| {entry['repository']}@{entry['commit'][:7]} | `{entry['path']}` | `{entry['backend']}"


def test_each_kind_has_six_files_and_deepspeed_stages_with_and_without_offload() -> None:
    assert {kind: len(of_kind) for kind, of_kind in KINDS.items()} == dict.fromkeys(KINDS, 6)
    page = PAGE.read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and ".json` | `zero" in row]
    for stage in ("zero1", "zero2", "zero3"):
        assert {("offload=" in row) for row in rows if f"`{stage}" in row} == {True, False}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['repository']}-{entry['path']}")
def test_the_page_lists_the_file_at_its_commit(entry: dict[str, str]) -> None:
    assert start_of_row(entry) in PAGE.read_text()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['repository']}-{entry['path']}")
def test_the_file_comes_back_from_its_export_as_the_page_says(entry: dict[str, str]) -> None:
    name = entry["repository"].replace("/", "+")
    folder = Path(os.environ.get(CLONES, ""))
    if CLONES not in os.environ or not (folder / name).is_dir():
        pytest.skip(f"needs a clone of {entry['repository']} as {name} in the folder that {CLONES} names")
    repository, path, label, *counts = map(str, line(folder, entry))
    row: Any = f"| {repository} | `{path}` | `{label}` | {' | '.join(counts)} |"
    assert row in PAGE.read_text()
