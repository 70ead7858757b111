"""The table of the BLOOM lab in the documentation follows from the records next to it."""

import pytest

from harness.judge.comparison import Comparison
from harness.labs.definitions import LABS, Variant, find_lab
from harness.labs.tables import fill
from harness.record.store import read_runs
from tests.docs.markdown import ROOT

PAGES = ROOT / "docs" / "labs"
FAULTS: dict[Variant, set[str]] = {
    "as-intended": {"strategy-differs"},
    "as-written": {"strategy-differs", "one-wrap-unit", "labels-misplaced"},
}
OF_THE_MACHINE = {"busy-machine", "slow-rank", "cores-shared", "warmup-too-short"}


@pytest.mark.parametrize("variant", list(FAULTS))
def test_the_published_table_follows_from_its_records(variant: Variant) -> None:
    runs, problems = read_runs([PAGES / "tiny" / f"bloom-fsdp.{variant}" / "runs.tar.xz"])
    assert problems == []
    page = (PAGES / "bloom-fsdp.md").read_text(encoding="utf-8")
    for table in fill(find_lab("bloom-fsdp"), [record for _, record in runs]):
        assert table.markdown() in page


@pytest.mark.parametrize("variant", list(FAULTS))
def test_the_findings_name_the_faults_of_the_public_job_and_no_other(variant: Variant) -> None:
    runs, _ = read_runs([PAGES / "tiny" / f"bloom-fsdp.{variant}" / "runs.tar.xz"])
    found = {finding.id for finding in Comparison(record for _, record in runs).findings}
    assert found - OF_THE_MACHINE == FAULTS[variant]


def test_every_lab_has_a_page_and_the_overview_names_it() -> None:
    overview = (PAGES / "README.md").read_text(encoding="utf-8")
    for lab in LABS:
        page = PAGES / f"{lab.name.removesuffix('-scaling')}.md"
        text = page.read_text(encoding="utf-8")
        assert f"({page.name})" in overview
        assert f"harness labs table {lab.name}" in text or f"harness labs run {lab.name}" in text
        assert "## Find the trap" in text
