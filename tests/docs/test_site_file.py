"""The table of the keys of a site file has every key, with its default and meaning."""

from __future__ import annotations

from docs.hooks.site_file import site_table
from harness.slurm.matrix import Site
from tests.docs.markdown import ROOT, generated

PAGE = ROOT / "slurm" / "README.md"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->"


def test_the_table_of_keys_is_up_to_date(update_golden: bool) -> None:
    held = generated(PAGE, BEGIN, END, site_table(), update=update_golden)
    assert held.strip() == site_table()


def test_every_key_has_a_meaning() -> None:
    assert all(field.description for field in Site.model_fields.values())
    assert "| `name` | text | required | name of the site" in site_table()
