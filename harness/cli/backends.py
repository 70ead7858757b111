"""`harness backends`."""

from __future__ import annotations

import json
from typing import Any

import click

from harness.backends import registry
from harness.backends.libraries.facts import not_run
from harness.cli.options.shared import common, json_option
from harness.cli.terminal.output import echo
from harness.record.provenance import package_versions
from harness.tell.formats import fitted

PRESET, ROW = "preset", "row"
"""The options of all backends."""


@click.command()
@json_option
@common
def backends(as_json: bool) -> int:
    """List the backends with their options and library versions."""
    documents: list[dict[str, Any]] = []
    for entry in registry.entries().values():
        versions = package_versions(entry.packages)
        try:
            options = entry.options_class().model_fields
            problem = None
        except registry.UnknownBackend as error:
            options, problem = {}, str(error)
        documents.append(
            {
                "name": entry.name,
                "summary": problem or entry.summary,
                "loads": problem is None,
                "installed": all(package in versions for package in entry.packages),
                "versions": {name: versions.get(name) for name in entry.packages},
                "options": {
                    name: field.description
                    for name, field in options.items()
                    if (entry.name, name) != (registry.REFERENCE, PRESET)
                },
            }
        )
    if as_json:
        never = [{"name": fact.id, "reason": fact.what, "source": fact.source} for fact in not_run()]
        echo(json.dumps({"backends": documents, "not_run": never}, indent=1))
        return 0
    lines = [
        (
            d["name"],
            d["summary"],
            ", ".join(name for name in d["options"] if name not in (PRESET, ROW)) or "-",
            ", ".join(f"{n} {v or 'missing'}" for n, v in d["versions"].items()),
        )
        for d in documents
    ]
    headers = ("backend", "what it is", "options", "versions")
    echo(fitted(lines, headers))
    echo("\n" + fitted([(fact.id, fact.what) for fact in not_run()], ("not run", "why")))
    echo(f"\nEvery backend but {registry.REFERENCE} also takes {PRESET}: NAME:{PRESET}=library-defaults.")
    echo(f"Every backend takes {ROW}: NAME:{ROW}=TEXT keeps it apart from rows with the same options.")
    return 0
