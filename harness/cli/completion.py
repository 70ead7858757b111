"""What the shell offers for values that the harness knows: backends, settings, runs, findings, shipped files.

What it needs is imported when a shell asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def backend(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of backends, and after a colon their options."""
    return [CompletionItem(name) for name in _labels(incomplete)]


def backends(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same for the last one of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    names = _labels(last) if comma else [*_labels(last), *_beginning(("all",), last)]
    return [CompletionItem(f"{before}{comma}{name}") for name in names]


def setting(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of settings with '=', and after it the values of those that have few."""
    from harness.job.reference import settings

    known = {found.name: found for found in settings()}
    name, equals, value = incomplete.partition("=")
    if equals and name in known:
        kind = known[name].kind.removesuffix(" or null")
        words = ("true", "false") if kind == "true or false" else kind.split(" | ") if " | " in kind else ()
        return [CompletionItem(f"{name}={word}") for word in _beginning(words, value)]
    return [CompletionItem(f"{name}=", help=known[name].meaning) for name in _beginning(known, incomplete)]


def configuration(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Shipped configurations after '@', files otherwise."""
    from harness.shipped import MARK, names

    if incomplete.startswith(MARK):
        return [CompletionItem(name) for name in _beginning(names("configs"), incomplete)]
    return [CompletionItem(incomplete, type="file")]


def finding(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of findings."""
    from harness.judge.wording import entries

    known = entries()
    return [CompletionItem(name, help=known[name]["title"]) for name in _beginning(known, incomplete)]


def section(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Sections of a configuration file."""
    from harness.job.reference import sections

    known = sections()
    return [CompletionItem(name, help=known[name]) for name in _beginning(known, incomplete)]


def run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the runs in the folder that --runs names, by the names of their folders."""
    folder = Path(context.params.get("runs") or "runs")
    names = sorted(path.parent.name for path in folder.glob("*/record.json"))
    return [CompletionItem(name) for name in _beginning(("latest", *names), incomplete)]


def _labels(incomplete: str) -> list[str]:
    from harness.backends import registry

    known = registry.entries()
    name, colon, option = incomplete.partition(":")
    if not colon:
        return _beginning(known, incomplete)
    if name not in known:
        return []
    try:
        options = known[name].options_class().model_fields
    except registry.UnknownBackend:
        return []
    return [f"{name}:{key}=" for key in _beginning(options, option)]


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
