"""Labs: definitions, tables of hand-outs, and published pages that follow from the records next to them."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.labs_page import findings_of, page, published, records_of
from harness.backends import registry
from harness.cli.labs import SPENT
from harness.errors import HarnessError
from harness.forms.layout import Layout
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.judge.comparison import Comparison
from harness.labs.definitions import LABS, LAYOUTS, Lab, Scale, Variant, find_lab
from harness.labs.tables import LabTable, cells, fill
from harness.record import GeometryPart, Record
from harness.record.store import read_runs
from harness.shipped import resolve
from tests.docs.markdown import ROOT
from tests.records import make_model, make_record, make_steps

RUN = [lab for lab in LABS if lab.needs_runs]


def experiments(lab: Lab, scale: Scale) -> list[Experiment]:
    return [
        load_experiment(resolve(Path(name), "configs"))
        for variant in lab.variants
        for name in lab.configurations(variant, scale)
    ]


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("lab", RUN, ids=lambda lab: lab.name)
def test_every_configuration_loads_and_the_tiny_scale_needs_no_network_and_two_ranks(
    lab: Lab, scale: Scale
) -> None:
    for experiment in experiments(lab, scale):
        for label in experiment.compare.backends:
            registry.parse(label)
        if scale == "tiny":
            assert (experiment.model.name, experiment.data.tokenizer) == (None, "bytes")
            assert max(experiment.compare.world_sizes) <= 2
            assert experiment.data.path is None or experiment.data.path.startswith("/")
    assert lab.table in LAYOUTS


def test_a_lab_or_variant_that_does_not_exist_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"lab 'bloom-fdsp' is unknown.*Did you mean 'bloom-fsdp'"):
        find_lab("bloom-fdsp")
    with pytest.raises(HarnessError, match="has no variant as-written"):
        find_lab("llama-finetuning").configurations("as-written", "full")


def test_the_as_written_variants_differ_where_the_public_jobs_do() -> None:
    intended, written = experiments(find_lab("bloom-fsdp"), "full")
    assert (intended.data.targets, written.data.targets) == ("text", "text over prompt")
    assert "auto_wrap=none" in written.compare.backends[0]
    intended, written = experiments(find_lab("custom-gpt"), "full")
    assert (intended.training.accumulation_steps, written.training.accumulation_steps) == (4, 1)


def test_the_talk_prints_these_figures_of_bert() -> None:
    """413.18, 413.18, 826.36 MiB and 1.61 GiB, with 8 KiB of buffers that are no parameters."""
    (table,) = fill(find_lab("model-memory"), [])
    bert = next(row for row in table.rows if row[:2] == ["bert-base-cased", "float32"])
    values = [float(text.split()[0]) for text in bert[2:]]
    assert values[:3] == pytest.approx([413.18, 413.18, 826.36], abs=0.03)
    assert values[3] == 1.61


def test_the_lecture_divides_llama_70b_into_these_shares() -> None:
    """fp32 shards: 4 bytes of each parameter over the GPUs, and as many of each of two moments."""
    (table,) = fill(find_lab("fsdp-lecture"), [])
    rows = {(row[0], row[1]): row for row in table.rows}
    share = 4 * 70_553_706_496 / 1e9
    for gpus in (128, 1280):
        full = rows["fsdp1", str(gpus)]
        assert float(full[2]) == pytest.approx(share / gpus, abs=1e-3)
        assert float(full[5]) == pytest.approx(2 * share / gpus, abs=1e-3)


def columns(table: LabTable) -> list[dict[str, str]]:
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def runs() -> list[Record]:
    """The reference and DDP on one rank at 0.5 s a step, FSDP1 on two at 0.25 s."""
    slow = make_steps(seconds=0.5)
    return [
        make_record(label="single", world_size=1, steps=slow),
        make_record(label="fsdp1", world_size=1, steps=slow),
        make_record(label="fsdp1", world_size=2, steps=make_steps(seconds=0.25)),
    ]


def test_speeds_and_factors_follow_from_the_steps() -> None:
    first, _ = fill(find_lab("bloom-fsdp"), runs())
    rows = {row["Setup"]: row for row in columns(first)}
    base, two = rows["Single Node, Single GPU"], rows["Single Node, 2 GPUs"]
    assert (base["Samples/s"], two["Samples/s"]) == ("16.00", "32.00")
    assert (base["Samples/s Scale Factor"], two["Samples/s Scale Factor"]) == ("1.00", "2.00")
    assert (base["Runtime (s)"], two["Runtime (s)"]) == ("2.00", "1.00")
    assert two["Runtime Scale Factor"] == "2.00"
    assert two["Loss"] == f"{(5.5 + 5.25 + 5.0 + 4.75) / 4:.4f}"


def test_the_public_speed_up_of_cinecas_deck_is_the_quotient_of_its_times() -> None:
    """3670 s on one GPU and 1821 s on two."""
    records = [
        make_record(label="fsdp1", world_size=ranks, steps=make_steps(seconds=seconds / 4))
        for ranks, seconds in ((1, 3670), (2, 1821))
    ]
    for label, seconds in (("ddp", 500), ("zero3", 1000)):
        records.append(make_record(label=label, world_size=2, steps=make_steps(seconds=seconds)))
    (table,) = fill(find_lab("llama-finetuning"), records)
    rows = [(row["Training time (s)"], row["Scaling"], row["Speed-up"]) for row in columns(table)]
    assert sorted(rows) == [
        ("1,821.00", "2.02", "1.10"),
        ("2,000.00", "n/a", "1.00"),
        ("3,670.00", "1.00", "n/a"),  # there is no ddp on one rank
        ("4,000.00", "n/a", "0.50"),  # it is no scaling over itself
    ]
    assert any("fewest GPUs" in note for note in table.notes)


def test_what_was_not_measured_is_not_available_with_the_reason() -> None:
    (table,) = fill(find_lab("bloom-deepspeed"), [make_record(label="zero2", world_size=2)])
    values = {row["Metric"]: row["Stage 2, 2 GPUs"] for row in columns(table)}
    assert values["Average GPU Memory (MiB)"] == values["Exact Match (%)"] == "n/a"
    assert any("not polled" in note for note in table.notes)


def test_a_run_that_failed_is_named_below_every_table() -> None:
    failed = make_record(
        label="fsdp1", world_size=2, steps=[], status="unsupported", reasons=["no such device"]
    )
    for lab in LABS:
        if not lab.needs_runs:
            continue
        last = fill(lab, [*runs()[:2], failed])[0]
        assert any("fsdp1 on 2: unsupported: no such device" in note for note in last.notes), lab.name
        assert last.markdown()


def test_the_efficiency_of_weak_scaling_counts_the_work() -> None:
    """As long a step with half the work of a GPU is an efficiency of one half."""
    shape = GeometryPart(multiplying_parameters=1000, layers=2, attention_width=8)
    known = {
        "model": make_model(geometry=shape),
        "layout": Layout(parameters=[], buffers=[], blocks=[], decaying=[]),
    }
    one, two = (
        make_record(label="fsdp1", world_size=n, steps=make_steps(seconds=0.5)).model_copy(update=known)
        for n in (1, 2)
    )
    (table,) = fill(find_lab("custom-gpt-weak"), [one, two])
    assert [cell.world_size for cell in cells([one, two])] == [1, 2]
    assert [row["GPUs"] for row in columns(table)] == ["1", "2"]
    assert [row["Work of a GPU"] for row in columns(table)] == ["1.00", "0.50"]
    assert [row["Efficiency (%)"] for row in columns(table)] == ["100.0", "50.0"]
    assert any("the other way round" in note for note in table.notes)


PAGES = ROOT / "docs" / "labs"
NAMED: dict[Variant, set[str]] = {
    "as-intended": {"strategy-differs"},
    "as-written": {"strategy-differs", "one-wrap-unit", "labels-misplaced"},
}
OF_THE_MACHINE = {"busy-machine", "slow-rank", "cores-shared", "warmup-too-short"}


@pytest.mark.parametrize("variant", list(NAMED))
def test_the_published_table_follows_from_its_records_and_no_other_fault_is_found(variant: Variant) -> None:
    runs, problems = read_runs([PAGES / "tiny" / f"bloom-fsdp.{variant}" / "runs.tar.xz"])
    assert problems == []
    page = (PAGES / "bloom-fsdp.md").read_text(encoding="utf-8")
    records = [record for _, record in runs]
    for table in fill(find_lab("bloom-fsdp"), records):
        assert table.markdown() in page
    assert {finding.id for finding in Comparison(records).findings} - OF_THE_MACHINE == NAMED[variant]


def test_every_lab_has_a_page_and_the_overview_names_it() -> None:
    overview = (PAGES / "README.md").read_text(encoding="utf-8")
    for lab in LABS:
        page = PAGES / f"{lab.name.removesuffix('-scaling')}.md"
        text = page.read_text(encoding="utf-8")
        assert f"({page.name})" in overview
        assert f"harness labs table {lab.name}" in text or f"harness labs run {lab.name}" in text
        assert "## Find the trap" in text


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


def test_the_published_page_follows_from_its_records_of_runs_within_the_processor_time_of_a_lab() -> None:
    assert (TINY / "README.md").read_text(encoding="utf-8") == page(TINY)
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
