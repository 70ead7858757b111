"""`harness settings`: every setting of a configuration file, with type, default and meaning."""

from __future__ import annotations

import json
import textwrap

import click

from harness.backends.refusals import available
from harness.cli.options import completion
from harness.cli.options.shared import common, json_option
from harness.cli.terminal.output import echo
from harness.errors import HarnessError
from harness.job.reference import DocumentedSetting, json_schema, sections
from harness.job.reference import settings as all_settings
from harness.tell.formats import line_width

INDENT = 6


@click.command()
@click.argument("section", required=False, shell_complete=completion.section)
@click.option("--schema", is_flag=True, help="Print the JSON schema of a configuration file, for editors.")
@json_option
@common
def settings(section: str | None, schema: bool, as_json: bool) -> int:
    """List the settings of a configuration file or SECTION with type, default and meaning.

    SECTION is a section such as training, or one setting such as training.steps.
    """
    if schema:
        if section is not None:
            raise HarnessError(f"--schema is of the whole file; leave '{section}' out")
        echo(json.dumps(json_schema(), indent=1))
        return 0
    found = _chosen(section)
    if as_json:
        keys = ("name", "kind", "default", "unit", "meaning")
        echo(json.dumps({"settings": [{k: getattr(s, k) for k in keys} for s in found]}, indent=1))
        return 0
    titles = sections()
    for place, setting in enumerate(found):
        if place == 0 or setting.section != found[place - 1].section:
            echo(f"{'' if place == 0 else chr(10)}{setting.section}: {titles[setting.section]}")
        for line in _lines(setting):
            echo(line)
    return 0


def _chosen(given: str | None) -> list[DocumentedSetting]:
    """Settings of the section, or the one setting, that a person names. Raises HarnessError."""
    section, _, key = (given or "").partition(".")
    if given is not None and section not in sections():
        raise HarnessError(f"section '{section}' is unknown. {available(section, sections())}")
    found = [*all_settings(section or None)]
    if key and key not in (keys := [setting.key for setting in found]):
        raise HarnessError(f"setting '{given}' is unknown. {available(key, keys, f'Available in {section}')}")
    return [setting for setting in found if not key or setting.key == key]


def _lines(setting: DocumentedSetting) -> list[str]:
    unit = f", {setting.unit}" if setting.unit else ""
    head = f"  {setting.name}: {setting.kind}{unit}, default {setting.default}"
    return [
        *textwrap.wrap(head, line_width(), subsequent_indent=" " * 4),
        *textwrap.wrap(
            setting.meaning, line_width(), initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
        ),
    ]  # fmt: skip
