"""`harness init`: writes a configuration file to fill in."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.cli.options.shared import PATH, common
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.files import require_plain_output, write_all_atomically
from harness.job.reference import commented_file, json_schema


@click.command()
@click.argument("file", type=PATH, default=Path("job.yaml"))
@click.option("--schema", is_flag=True, help="Also write the JSON schema next to it, which editors then use.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@common
def init(file: Path, schema: bool, force: bool) -> int:
    """Write a configuration file with every setting, its meaning and its default.

    FILE: default job.yaml. All settings are commented out.
    """
    if file.exists() and not force:
        raise HarnessError(f"'{file}' exists; give another name, or --force to replace it")
    beside = file.with_suffix(".schema.json")
    contents = {file: commented_file(beside.name if schema else None)}
    if schema:
        contents[beside] = json.dumps(json_schema(), indent=1) + "\n"
    for path in contents:
        require_plain_output(path, "configuration")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_all_atomically(contents)
    echo(f"{file}: run it with `harness compare --config {file}`", err=True)
    return 0
