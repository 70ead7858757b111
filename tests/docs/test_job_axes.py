"""The table of pairs of settings and strategies says what is refused before ranks start."""

from __future__ import annotations

from docs.hooks.pairs import LABELS, pairs_table
from harness.backends import registry
from tests.docs.markdown import ROOT, generated

PAGE = ROOT / "docs" / "job-axes.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->"


def test_the_table_of_pairs_is_up_to_date(update_golden: bool) -> None:
    held = generated(PAGE, BEGIN, END, pairs_table(), update=update_golden)
    assert held.strip() == pairs_table().strip()


def test_every_strategy_whose_ranks_share_samples_has_a_column() -> None:
    sharing = {name for name in registry.BUILT_IN if registry.mesh_of(name, 4).shares_samples}
    assert set(LABELS) == sharing
