"""Findings, failures, records and levels in the report."""

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import ROLES, role_of
from harness.judge.wording import entries
from harness.record import ErrorPart, Record
from harness.tell.document import Folded, Items, Paragraph, Table
from harness.tell.manifest import Manifest, RecordEntry
from harness.tell.report import details_document
from harness.tell.sections import results
from harness.tell.sections.results import levels_section
from harness.tell.writers.text import render_markdown
from tests.harness.tell.cells import blocks_in
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights


def test_causes_are_told_before_divergence_and_each_is_explained_in_the_report() -> None:
    steps = make_steps(norms=[norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    comparison = Comparison([make_record(), other])
    document = details_document(comparison)
    text = render_markdown(document, {picture.key: picture.key for picture in document.pictures()}, "", "")
    section = text.partition("\n## Findings")[2].partition("\n## ")[0]
    assert section.index("**gradient-scale**") < section.index("**diverged**")
    assert "### Causes" in section
    assert "### Consequences" in section
    assert f"Fix: {entries()['gradient-scale']['fix'].partition('.')[0]}" in section.replace("\\", "")
    assert '{"' not in section


def test_findings_of_repeats_and_of_cells_alike_are_told_once_and_many_are_folded() -> None:
    labels = [f"zero{stage}" for stage in range(4)]
    worse = [
        make_record(
            label=label, repeat=repeat, run_id=f"{label}-{repeat}",
            steps=make_steps([loss + size for loss in LOSSES]), final_weights=make_weights("c" * 64),
        )
        for size, label in enumerate([*labels, "ddp", "fsdp"], start=1)
        for repeat in range(3)
    ]  # fmt: skip
    alike = make_record(label="fsdp1", steps=worse[0].steps, final_weights=make_weights("c" * 64))
    section = results.findings_section(Comparison([make_record(), *worse, alike]))
    open_ = [item for block in section.blocks if isinstance(block, Items) for item in block.items]
    assert 0 < len(open_) <= results.MOST_OF_A_KIND * len({name for name, _ in open_})
    more, *_ = blocks_in(section, Folded)
    assert more.title.startswith("More of the same kinds: ")
    told = [*open_, *(item for block in more.blocks for item in block.items)]
    assert len(told) == len(set(told))
    assert any(sentence.startswith("zero0 and fsdp1 on 2 ranks: ") for _, sentence in told)
    roles = [list(ROLES).index(role_of(name)) for name, _ in open_]
    assert roles == sorted(roles)


def failures(*records: Record) -> list[str]:
    (items,) = blocks_in(results.failures_section(Comparison(records)), Items)
    return list(map(str, items.items))


def test_one_error_of_several_cells_is_told_once_whichever_rank_it_met_first() -> None:
    records = [
        make_record(
            label=label, repeat=repeat, status="oom",
            error=ErrorPart(kind="OutOfMemoryError", message="no memory", rank=rank),
        )
        for rank, label in enumerate(("ddp", "fsdp"))
        for repeat in range(2)
    ]  # fmt: skip
    assert failures(*records) == [
        "ddp and fsdp on 2 ranks, 2 of 2 runs of each: oom: OutOfMemoryError: no memory"
    ]


def test_repeats_of_a_cell_have_one_line_with_their_number() -> None:
    def failed(repeat: int, kind: str, message: str) -> dict[str, object]:
        error = ErrorPart(kind=kind, message=message, rank=0)
        return {"repeat": repeat, "status": "failed", "error": error}

    records = [
        make_record(label="ddp"),
        make_record(label="ddp", **failed(1, "RuntimeError", "port 1 is taken")),
        make_record(label="ddp", **failed(2, "RuntimeError", "port 2 is taken")),
        make_record(label="ddp", **failed(3, "ValueError", "no")),
        make_record(label="zero1", status="unsupported", reasons=["needs 4 ranks"]),
        make_record(label="zero2", status="unsupported", reasons=["needs 4 ranks"]),
    ]
    assert failures(*records) == [
        "ddp on 2 ranks, 2 of 4 runs: failed: RuntimeError (rank 0): port 1 is taken",
        "ddp on 2 ranks, 1 of 4 runs: failed: ValueError (rank 0): no",
        "zero1 and zero2 on 2 ranks: unsupported: needs 4 ranks",
    ]
    assert failures(*(records[-1].model_copy(update={"job_id": job * 12}) for job in "ab")) == [
        f"zero2 on 2 ranks, job {job * 12}: unsupported: needs 4 ranks" for job in "ab"
    ]


def test_a_path_is_told_once_and_by_the_run_where_its_folder_has_that_name() -> None:
    entries = [
        RecordEntry(
            path=f"runs/{folder}/record.json", sha256="0123456789abcdef" * 4, run_id="r1", status="ok"
        )
        for folder in ("r1", "renamed")
    ]
    manifest = Manifest(name="r.md", format="md", harness="1", drawing="renderer 3", records=entries)
    section = results.records_section(manifest)
    (text,), (table,) = blocks_in(section, Paragraph), blocks_in(section, Table)
    assert "runs/RUN/record.json" in text.text
    assert [row[0] for row in table.texts()] == ["r1", "runs/renamed/record.json"]
    assert [row[0] for row in table.values()] == [entry.path for entry in entries]
    assert {row[2] for row in table.texts()} == {"0123456789abcdef"}


def shifted(label: str, loss: float, **changes: object) -> Record:
    steps = make_steps([value + loss for value in LOSSES])
    return make_record(label=label, steps=steps, final_weights=make_weights("c" * 64), **changes)


def levels(*records: Record) -> tuple[Table, Table, list[list[str]]]:
    """The limits, the distances of each run, and the lists: meanings, sources, and what else there is."""
    section = levels_section(Comparison(records))
    limits, distances = blocks_in(section, Table)
    return limits, distances, [list(map(str, block.items)) for block in blocks_in(section, Items)]


def test_limits_stand_beside_what_was_seen_and_the_factor() -> None:
    split = shifted("single:micro_batch_size=4", 1e-5)
    table, _, (_, sources, *_) = levels(make_record(), split, shifted("ddp", 5e-5))
    assert table.texts()[0] == ["tight", "loss", "1.0e-05", "10", "1.0e-04", "measurement"]
    assert [line[1] for line in table.texts()] == ["loss", "gradient norm", "distance moved", "final weights"]
    assert sources == ["tight: measured by single:micro_batch_size=4; lower bound: fp32 rounding."]
    _, _, (_, (source,), *_) = levels(make_record(), make_record(label="ddp"))
    assert "tight: not measured" in source
    assert "100 roundings of fp32" in source
    training = {"precision": "bf16-mixed"}
    cast = shifted("single:precision=cast", 1e-3, training=training)
    table, *_ = levels(make_record(training=training), cast, shifted("ddp", 2e-3, training=training))
    assert [line[:4] for line in table.texts()[::4]] == [
        ["tight", "loss", "n/a", "100"],
        ["band", "loss", "1.0e-03", "3"],
    ]


def test_every_run_has_its_distances_and_why_it_is_unjudged_and_equal_repeats_are_counted() -> None:
    repeats = [shifted("ddp", 5e-5 if repeat < 2 else 6e-5, repeat=repeat) for repeat in range(3)]
    _, runs, _ = levels(make_record(), *repeats, make_record(label="fsdp", status="failed"))
    assert [line[:5] for line in runs.texts()[1:3]] == [
        ["ddp", "2", "2", "tight", "5.0e-05"],
        ["ddp", "2", "1", "tight", "6.0e-05"],
    ]
    assert [line[-1] for line in runs.texts()[3:]] == ["the run ended as failed"]


def test_runs_of_two_jobs_are_not_added_up() -> None:
    jobs = [
        make_record(label=label, job_id=job * 12, repeat=repeat)
        for job in "ab"
        for label, repeat in (("single", 0), ("ddp", 0), ("ddp", 1))
    ]
    lines = {(line[0][0], line[1]): line[3] for line in levels(*jobs)[1].texts()}
    assert lines == {("a", "single"): "1", ("b", "single"): "1", ("a", "ddp"): "2", ("b", "ddp"): "2"}


def test_losses_of_repeats_are_called_equal_only_where_they_agree_bit_for_bit() -> None:
    lost = [make_record(label="ddp", repeat=n, steps=make_steps([None] * len(LOSSES))) for n in range(2)]
    assert levels(make_record(), *lost)[2][-1] == ["ddp on 2: no loss to compare in one of the runs"]
    again = make_record(label="ddp", repeat=1, steps=make_steps([loss + 1e-6 for loss in LOSSES]))
    same = [make_record(label="fsdp", repeat=repeat) for repeat in range(2)]
    assert levels(make_record(), make_record(label="ddp"), again, *same)[2][-1] == [
        "ddp on 2: 1.0e-06 nats per token",
        "1 other cell with repeats: losses equal bit for bit",
    ]
    assert levels_section(Comparison([make_record(label="ddp")])) is None, "no reference, no levels"
