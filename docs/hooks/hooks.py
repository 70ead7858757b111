"""Hooks of mkdocs: the repository as the site's tree, generated pages, and Markdown as GitHub reads it."""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from docs.hooks.api import api_page
from docs.hooks.backends import backends_page
from docs.hooks.commands import commands_page
from docs.hooks.offline import loaded_from_elsewhere
from docs.hooks.records import records_page
from docs.hooks.settings import settings_page
from docs.hooks.tree import REPORTS, ROOT, report_nav, site_files

GENERATED = {
    "docs/reference/commands.md": commands_page,
    "docs/reference/backends.md": backends_page,
    "docs/reference/settings.md": settings_page,
    "docs/reference/records.md": records_page,
    "docs/reference/api.md": api_page,
}
LOG = logging.getLogger("mkdocs.hooks")
FOLDED = re.compile(r"^<details>", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the published reports in the navigation, and name headings as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    sections = {name: pages for entry in config.nav or () for name, pages in entry.items()}
    sections["Reports"] += report_nav()
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Every page and file of the repository under its own path, and the generated pages."""
    found = [
        File(name, str(ROOT), config.site_dir, use_directory_urls=config.use_directory_urls)
        for name in site_files()
    ]
    found += [File.generated(config, name, content=page()) for name, page in GENERATED.items()]
    taken = {file.src_uri for file in found if not file.is_documentation_page()}
    for file in found:
        if file.is_documentation_page() and file.dest_uri in taken:
            # report.md next to a published report.html
            file.dest_uri = f"{file.src_uri}.html"
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*of_theme, *found])


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Parse what is folded, as GitHub does; keep published reports out of the search index."""
    if PurePosixPath(page.file.src_uri).parts[0] == REPORTS and page.file.name != "index":
        page.meta["search"] = {"exclude": True}
    return FOLDED.sub('<details markdown="1">', markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Warn of everything that a page would load from a network; with --strict that is an error."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for address in loaded_from_elsewhere(path.read_text(encoding="utf-8")):
                LOG.warning("%s loads %s", path.relative_to(config.site_dir), address)
