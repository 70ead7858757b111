"""The table of pairs of settings and strategies says what is refused before ranks start."""

from __future__ import annotations

from docs.hooks.pairs import LABELS, pairs_table
from harness.backends import registry
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "job-axes.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->"


def test_the_table_of_pairs_is_up_to_date(update_golden: bool) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    held, _, after = rest.partition(END)
    if update_golden:
        held = f"\n{pairs_table()}\n"
        PAGE.write_text(f"{before}{BEGIN}{held}{END}{after}", encoding="utf-8")
    assert held.strip() == pairs_table().strip()


def test_every_strategy_whose_ranks_share_samples_has_a_column() -> None:
    sharing = {name for name in registry.BUILT_IN if registry.mesh_of(name, 4).shares_samples}
    assert set(LABELS) == sharing
