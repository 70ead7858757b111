"""What ships as data: geometries of public models, GPUs, links between them."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from harness.backends.yaml_values import parse_value

Entries = dict[str, dict[str, Any]]


@lru_cache
def read_file(name: str) -> Entries:
    """The entries of one YAML file below this folder."""
    entries: Entries = parse_value(files(__name__).joinpath(name).read_text(encoding="utf-8"))
    return entries


@lru_cache
def read_entries(folder: str) -> Entries:
    """All entries of the YAML files in a folder beside this module, by name, in the order of the files."""
    found: Entries = {}
    directory = files(__name__).joinpath(folder)
    for file in sorted(directory.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".yaml"):
            found.update(parse_value(file.read_text(encoding="utf-8")))
    return found
