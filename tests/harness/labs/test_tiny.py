"""The labs' page in the documentation follows from the records next to it, whose findings name the faults."""

import json
from collections.abc import Iterable

import pytest

from benchmarks.labs_page import findings_of, page, published, records_of
from harness.cli.labs import SPENT
from harness.judge.comparison import Comparison
from harness.labs.definitions import LABS, find_lab
from tests.docs.markdown import ROOT

TINY = ROOT / "docs" / "labs" / "tiny"
PUBLISHED = published(TINY)
MOST_PROCESSOR_SECONDS = 90
FAULTS = {
    "bloom-fsdp": {"one-wrap-unit", "labels-misplaced"},
    "custom-gpt": {"one-wrap-unit"},
    "custom-gpt-weak": {"one-wrap-unit", "uneven-weak-scaling"},
    "ddp-images": {"batch-norm"},
    "dtypes": {"lost-updates"},
}
"""Of the variant as written: what a finding names in its own runs."""
BETWEEN_VARIANTS = {
    "bloom-fsdp": "data.targets",
    "bloom-deepspeed": "data.targets",
    "custom-gpt": "training.global_batch_size",
}
"""Faults that make another job: the setting that a report of both variants names."""


def test_the_published_page_follows_from_its_records() -> None:
    assert (TINY / "README.md").read_text(encoding="utf-8") == page(TINY)


def test_every_run_succeeded_or_cannot_run_here_within_the_processor_time_of_a_lab() -> None:
    assert len(PUBLISHED) > 5
    for lab, variant in PUBLISHED:
        records = records_of(TINY, lab, variant)
        assert {record.status for record in records} <= {"ok", "unsupported"}
        spent = json.loads((TINY / f"{lab.name}.{variant}" / SPENT).read_text(encoding="utf-8"))
        assert spent["runs"] == len(records), lab.name
        assert spent["processor_seconds"] < MOST_PROCESSOR_SECONDS, lab.name


def with_both_variants(names: Iterable[str]) -> list[str]:
    """The page names those that are not published yet."""
    labs = [lab.name for lab, _ in PUBLISHED]
    return [name for name in names if labs.count(name) == 2]


@pytest.mark.parametrize("name", with_both_variants(FAULTS))
def test_the_findings_name_the_faults_of_the_public_job(name: str) -> None:
    intended, written = (
        set(findings_of(records_of(TINY, find_lab(name), variant)))
        for variant in find_lab(name).variants
    )  # fmt: skip
    assert FAULTS[name] <= written
    assert FAULTS[name].isdisjoint(intended)


@pytest.mark.parametrize("name", with_both_variants(BETWEEN_VARIANTS))
def test_a_report_of_both_variants_names_the_setting_that_makes_them_two_jobs(name: str) -> None:
    lab = find_lab(name)
    records = [record for variant in lab.variants for record in records_of(TINY, lab, variant)]
    (finding,) = [found for found in Comparison(records).findings if found.id == "several-jobs"]
    assert BETWEEN_VARIANTS[name] in f"{finding.message} {finding.values}"


def test_every_lab_as_written_is_accounted_for() -> None:
    assert {*FAULTS, *BETWEEN_VARIANTS} == {lab.name for lab in LABS if "as-written" in lab.variants}
