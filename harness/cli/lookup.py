"""`harness backends`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import click

from harness.backends import registry
from harness.backends.libraries.facts import not_run
from harness.backends.refusals import available, did_you_mean, suggestion
from harness.cli.options import PATH, common, json_option
from harness.cli.output import echo
from harness.errors import HarnessError
from harness.files import require_plain_output, write_all_atomically
from harness.job.config import settings_by_name
from harness.job.reference import commented_file, json_schema, sections
from harness.job.reference import settings as all_settings
from harness.judge.findings.finding import PARTS
from harness.judge.wording import entries
from harness.record.provenance import package_versions
from harness.tell.formats import fitted, line_width

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


MOST = 5
"""Findings and words that a hint names."""
PAGE = Path(__file__).with_name("glossary.md")
"""`docs/glossary.md`, which every installation brings."""
GLOSSARY_ROW = re.compile(r"^\| (?P<words>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
ONLY_LINKS = re.compile(rf" \({LINK.pattern}(, {LINK.pattern})*\)")


@cache
def glossary() -> dict[str, str]:
    """Meanings by word, as the glossary's page has them, without its links."""
    rows = [*GLOSSARY_ROW.finditer(PAGE.read_text(encoding="utf-8"))][2:]  # heading and rule
    return {
        word.strip("` "): LINK.sub(r"\1", ONLY_LINKS.sub("", row["meaning"]))
        for row in rows
        for word in row["words"].split(",")
    }


def meanings() -> dict[str, str]:
    """Meanings of the words of the glossary and of columns, as tables, frames and files name them."""
    from harness.judge.facts import METRICS

    return glossary() | {
        name: f"{metric.meaning} ({metric.unit})" for metric in METRICS for name in (metric.title, metric.key)
    }


def word_of(text: str) -> str | None:
    """The word that was meant, in any case, with hyphens or spaces."""
    return next((word for word in meanings() if _bare(word) == _bare(text)), None)


def _bare(word: str) -> str:
    return word.lower().replace("-", " ")


def unknown(word: str, findings: Collection[str]) -> str:
    """What to say of a word that nothing explains, with the findings and words that it may mean."""
    small = word.lower()
    known = list(dict.fromkeys([*findings, *meanings()]))
    close = [one for one in known if small in one][:MOST]
    hint = did_you_mean(close) if close else suggestion(small, known, most=MOST)
    hint += " " * bool(hint)
    return f"'{word}' is unknown. {hint}`harness explain` lists all {len(findings)} findings"


@click.command()
@click.argument("word", required=False)
@json_option
@common
def explain(word: str | None, as_json: bool) -> int:
    """Explain a finding (cause, confirmation, fix) or a word of tables.

    WORD is the id that `compare` and reports show, a word such as `band`, or a column such as `peak_bytes`;
    without it all findings are listed.
    """
    known = entries()
    if word is not None and word not in known:
        meant = word_of(word)
        if meant is None:
            raise HarnessError(unknown(word, known))
        meaning = meanings()[meant]
        if as_json:
            echo(json.dumps({"word": meant, "meaning": meaning}, indent=1))
        else:
            echo(textwrap.fill(f"{meant}: {meaning}.", line_width(), subsequent_indent="  "))
        return 0
    if as_json:
        chosen = known if word is None else {word: known[word]}
        found = [{"id": kind} | {part: of.get(part) for part in PARTS} for kind, of in chosen.items()]
        echo(json.dumps({"findings": found}, indent=1))
    elif word is None:
        width = max(map(len, known))
        for kind, entry in known.items():
            echo(f"{kind:<{width}}  {entry['title']}")
    else:
        echo(f"{word}: {known[word]['title']}.")
        for part in PARTS[1:]:
            if (said := known[word].get(part)) is not None:
                text = f"{part.capitalize()}: {said}"
                echo(textwrap.fill(text, line_width(), initial_indent="  ", subsequent_indent="    "))
    return 0


@click.command()
@common
@click.argument("section", required=False)
@click.option("--schema", is_flag=True)
@click.option("--write", type=PATH, metavar="FILE")
@json_option
def settings(section: str | None, schema: bool, write: Path | None, as_json: bool) -> int:
    """List the settings of a configuration file or SECTION with type, default and meaning.

    SECTION is a section such as training, or one setting such as training.steps.
    """
    if section is not None and (schema or write):
        raise HarnessError(f"--schema and --write are of the whole file; leave '{section}' out")
    if write is not None:
        beside = write.parent / f"{write.stem}.schema.json"
        contents = {write: commented_file(beside.name if schema else None)}
        if schema:
            contents[beside] = json.dumps(json_schema(), indent=1) + "\n"
        for path in contents:
            require_plain_output(path, "configuration")
            if path.is_file():
                raise HarnessError(f"'{path}' exists; give another name, or remove it first")
        write.parent.mkdir(parents=True, exist_ok=True)
        write_all_atomically(contents)
        echo(f"{write}: run it with `harness compare --config {write}`", err=True)
        return 0
    if schema:
        echo(json.dumps(json_schema(), indent=1))
        return 0
    name, _, key = (section or "").partition(".")
    if section is not None and name not in sections():
        raise HarnessError(f"section '{name}' is unknown. {available(name, sections())}")
    found = [*all_settings(name or None)]
    if key and key not in (keys := [setting.key for setting in found]):
        meant = settings_by_name().get(key, ())
        raise HarnessError(
            f"setting '{section}' is unknown. {available(key, keys, f'Available in {name}', meant)}"
        )
    found = [setting for setting in found if not key or setting.key == key]
    if as_json:
        told = ("name", "kind", "default", "unit", "meaning")
        echo(json.dumps({"settings": [{k: getattr(s, k) for k in told} for s in found]}, indent=1))
        return 0
    titles = sections()
    for place, setting in enumerate(found):
        if place == 0 or setting.section != found[place - 1].section:
            echo(f"{'' if place == 0 else chr(10)}{setting.section}: {titles[setting.section]}")
        unit = f", {setting.unit}" if setting.unit else ""
        head = f"  {setting.name}: {setting.kind}{unit}, default {setting.default}"
        for text, indent, next_indent in ((head, "", " " * 4), (setting.meaning, " " * 6, " " * 6)):
            for line in textwrap.wrap(
                text, line_width(), initial_indent=indent, subsequent_indent=next_indent
            ):
                echo(line)
    return 0
