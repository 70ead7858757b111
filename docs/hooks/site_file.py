"""The table of slurm/README.md: keys of a site file, from the model that reads it."""

from __future__ import annotations

from docs.hooks.settings import setting_row
from docs.hooks.tables import table
from harness.slurm.matrix import Site


def site_table() -> str:
    """A row for each key; units stand in the names and descriptions."""
    rows = [setting_row(name, field) for name, field in Site.model_fields.items()]
    return table(["key", "type", "default", "meaning"], ([*row[:3], row[4]] for row in rows))
