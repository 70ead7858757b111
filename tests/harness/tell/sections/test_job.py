"""What was asked for stands in the report, so that it can be asked for again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import plan
from harness.record import ObservationPart, Record
from harness.safe_text import by_name, inside, without_passwords
from harness.tell.document import Code, Folded, Items, Paragraph, Table
from harness.tell.report import details_document
from harness.tell.sections.job import (
    configuration_section,
    difference,
    job_section,
    machine_section,
    measurement_section,
    observed_section,
    presets_section,
    reproduce_section,
)
from harness.tell.sections.parity import library_alone_section
from tests.records import ENVIRONMENT, make_record, published_comparison
from tests.timed_records import processors, ranks, run


def cut(label: str, micro_batch_size: int, accumulation_steps: int) -> Record:
    record = make_record(label=label)
    world = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation_steps}
    return record.model_copy(update={"world": record.world.model_copy(update=world)})


def settings(*records: Record) -> str:
    (folded,) = [block for block in job_section(Comparison(records)).blocks if isinstance(block, Folded)]
    (code,) = folded.blocks
    assert isinstance(code, Code)
    return code.text


def test_every_setting_shows_the_accumulation_that_ran() -> None:
    text = settings(cut("single", 8, 1), cut("ddp", 1, 4), cut("zero3", 1, 4))
    assert "accumulation_steps: 4" in text
    assert "micro_batch_size: 1\n" in text


def test_a_cut_that_differs_between_cells_is_no_setting_of_the_job() -> None:
    text = settings(cut("ddp", 1, 4), cut("zero3", 4, 1))
    assert "accumulation_steps" not in text
    assert "micro_batch_size" not in text


SLURM = {"job": "7_0", "state": "COMPLETED", "attempts": 2, "restarts": 1, "max_resident_bytes": 3_000_000}


def test_the_least_and_the_most_load_of_a_machine_are_shown() -> None:
    records = [
        make_record(repeat=n, run_id=f"r{n}", environment=ENVIRONMENT | {"load_average": load})
        for n, load in enumerate((1.5, 0.25, 0.5))
    ]
    (items,) = machine_section(Comparison(records)).blocks
    assert isinstance(items, Items)
    facts = dict(item for item in items.items if isinstance(item, tuple))
    assert facts["load before the runs"] == (
        "1.50 before the first, 0.25 to 1.50 before all (average of a minute)"
    )
    assert facts["runs began"] == "from 2026-01-02 03:04 to 2026-01-02 03:04 UTC"


def test_what_other_work_used_is_shown_where_records_tell_it() -> None:
    busy = {"processors": processors(machine_busy_seconds=9.0)}
    used = [rank.model_copy(update=busy) for rank in ranks()]
    (items,) = machine_section(Comparison([run(), run(repeat=1, run_id="r1", ranks=used)])).blocks
    assert isinstance(items, Items)
    assert ("other work during timed steps", "0.00 to 0.25 cores") in items.items


def test_what_slurm_knows_is_a_table_of_what_it_knows() -> None:
    records = [make_record(), make_record(label="ddp", environment=ENVIRONMENT | {"slurm": SLURM})]
    *_, folded = machine_section(Comparison(records)).blocks
    assert isinstance(folded, Folded)
    (table,) = folded.blocks
    assert [column.key for column in table.columns] == [
        "backend", "world_size", "repeat", "job", "state", "attempts", "restarts", "max_resident_bytes"
    ]  # fmt: skip
    assert table.texts() == [["ddp", "2", "0", "7_0", "COMPLETED", "2", "1", "3.00"]]


def test_without_slurm_nothing_is_said_of_it() -> None:
    assert len(machine_section(Comparison([make_record()])).blocks) == 1


@pytest.mark.parametrize(
    ("git", "words"),
    [
        ({"modified": False, "changed": []}, "commit ffffffffffff"),
        ({"modified": True}, "commit ffffffffffff with local changes"),
        (
            {"modified": True, "changed": ["backends/a.py", "harness/b.py"]},
            "commit ffffffffffff with local changes to backends/a.py and harness/b.py",
        ),
    ],
)
def test_local_changes_are_named_where_the_record_names_them(git: dict[str, Any], words: str) -> None:
    environment = ENVIRONMENT | {"git": {"commit": "f" * 40} | git}
    (items,) = machine_section(Comparison([make_record(environment=environment)])).blocks
    assert isinstance(items, Items)
    assert ("harness code", f"0123456789ab, {words}") in items.items


@pytest.fixture(scope="module")
def default() -> Comparison:
    return published_comparison("default")


def test_configurations_of_a_report_ask_for_the_same_job(default: Comparison, tmp_path: Path) -> None:
    folded = [block for block in reproduce_section(default).blocks if isinstance(block, Folded)]
    assert folded
    assert len(folded) == 1
    (code,) = folded[0].blocks
    assert isinstance(code, Code)
    path = tmp_path / "job.yaml"
    path.write_text(code.text)
    experiment = load_experiment(path, [])
    others = [row for row in default.rows if row.record.backend.label != "single"]
    assert sorted(experiment.compare.backends) == sorted({row.record.backend.label for row in others})
    assert experiment.compare.world_sizes == [2]
    assert experiment.compare.repeats == 7
    assert experiment.runtime.threads_per_rank == others[0].record.world.threads_per_rank
    cells = plan(experiment, ["ddp"], [2], 1, "cpu")
    assert {cell.job_id for cell in cells} == {row.record.job_id for row in default.rows}
    (record,) = [
        row.record for row in default.rows if row.record.backend.label == "ddp" and row.record.repeat == 0
    ]
    assert cells[-1].measure == record.measure


def test_accumulation_is_part_of_the_configuration(tmp_path: Path) -> None:
    record = make_record(label="ddp")
    world = record.world.model_copy(update={"micro_batch_size": 1, "accumulation_steps": 4})
    cut = record.model_copy(update={"world": world})
    (folded,) = [
        b for b in reproduce_section(Comparison([make_record(), cut])).blocks if isinstance(b, Folded)
    ]
    assert "accumulation_steps: 4" in str(folded)


def test_commit_and_install_line_stand_before_the_commands(default: Comparison) -> None:
    first, commands, *_ = reproduce_section(default).blocks
    git = default.rows[0].record.environment.git
    assert git is not None
    assert git.commit in str(first)
    assert isinstance(commands, Code)
    assert commands.text.startswith("pip install -c constraints.txt -e '.[train]'\nharness ")


def test_each_layout_stands_once_with_its_backends() -> None:
    records = [
        make_record(),
        make_record(label="ddp"),
        make_record(label="fsdp"),
        make_record(label="fsdp", repeat=1),
    ]
    table, shared, *_ = measurement_section(Comparison(records)).blocks
    assert isinstance(table, Table)
    lines = [dict(zip((c.key for c in table.columns), line, strict=True)) for line in table.values()]
    assert [(line["world_size"], line["backends"]) for line in lines] == [(1, "single"), (2, "ddp and fsdp")]
    assert lines[0]["micro_batch_size"] == 8
    assert "timed_steps" not in lines[0]
    assert "The same in all cells that trained: nodes 1," in str(shared)
    assert "timed 2." in str(shared)


def made(label: str) -> Record:
    return make_record(label=label)


def test_a_change_stands_once_with_all_its_backends() -> None:
    section = presets_section(Comparison([make_record(), made("zero1"), made("zero2"), made("ddp")]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    backends = {line[0]: line[-1] for line in table.texts()}
    assert backends["reduce_bucket_size"] == "zero1; zero2"
    assert backends["gradient_as_bucket_view"] == "ddp"


def test_a_row_under_another_preset_is_named_and_changes_nothing() -> None:
    own = made("zero3:preset=library-defaults")
    section = presets_section(Comparison([make_record(), made("zero3"), own]))
    assert section is not None
    first, *_, table = section.blocks
    assert isinstance(first, Paragraph)
    assert isinstance(table, Table)
    start = "Preset: like-for-like; library-defaults for zero3:preset=library-defaults."
    assert str(first.text).startswith(start)
    assert {line[-1] for line in table.texts()} == {"zero3"}


def test_without_changes_the_library_defaults_are_said_to_be_kept() -> None:
    section = presets_section(Comparison([made("zero3:preset=library-defaults")]))
    assert section is not None
    (only,) = section.blocks
    assert isinstance(only, Paragraph)
    assert str(only.text) == (
        "Preset: library-defaults for zero3:preset=library-defaults. library-defaults keeps a library's "
        "settings, except those that change the mathematics."
    )


def test_difference_is_nested_and_names_what_is_gone() -> None:
    whole = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    assert difference({"a": 1, "b": {"c": 5, "d": 3}, "f": 6}, whole) == {"b": {"c": 5}, "f": 6, "e": None}
    assert difference(whole, whole) == {}


def test_a_backend_is_told_once_and_other_sizes_by_what_differs() -> None:
    two, four, eight = (make_record(label="ddp", world_size=size) for size in (2, 4, 8))
    backend = four.backend.model_copy(update={"native_config": {"buckets": 4}})
    four = four.model_copy(update={"backend": backend})
    section = configuration_section(Comparison([two, four, eight]))
    assert section is not None
    (folded,) = section.blocks
    assert isinstance(folded, Folded)
    assert folded.title == "ddp, 2 ranks, 4 ranks, 8 ranks"
    whole, *rest = folded.blocks
    assert isinstance(whole, Code)
    assert "effective" in whole.text
    assert rest == [
        Paragraph("ddp on 4 ranks: as ddp on 2 ranks, but for"),
        Code("yaml", "native_config:\n  buckets: 4\n"),
        Paragraph("ddp on 8 ranks: as ddp on 2 ranks."),
    ]


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_a_configuration_file_loses_the_folders_of_its_machine(form: list[str]) -> None:
    def line(path: str) -> list[str]:
        return ["harness", "run", *(word.format(path) for word in form), "--runs", "/shared/runs"]

    assert inside(Path("/home/me"), line("/home/me/configs/a.yaml")) == line("configs/a.yaml")
    assert inside(Path("/home/me"), line("/tmp/a.yaml")) == line("/tmp/a.yaml")
    assert by_name(line("/tmp/a.yaml")) == line("a.yaml")
    assert by_name(line("configs/a.yaml")) == line("configs/a.yaml")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("harness observe -- login.sh -u me -p hunter", "harness observe -- login.sh -u me -p ***"),
        ("harness observe -- srun -p gpu train.py", "harness observe -- srun -p gpu train.py"),
        ("docker run -p 8080:80 image", "docker run -p 8080:80 image"),
        ("train.py -p", "train.py -p"),
    ],
)
def test_a_word_after_p_is_a_password_unless_it_is_a_port_or_a_partition(words: str, kept: str) -> None:
    assert without_passwords(words.split()) == kept.split()
    assert make_record(command=words.split()).command == kept.split()


def test_the_report_says_where_the_content_of_such_a_file_is() -> None:
    command = ["harness", "compare", "--config", "/tmp/x/my job.yaml"]
    _, code, text, configuration = reproduce_section(Comparison([make_record(command=command)])).blocks
    assert isinstance(code, Code)
    assert isinstance(text, Paragraph)
    assert isinstance(configuration, Folded)
    assert code.text.endswith("\nharness compare --config 'my job.yaml'")
    assert "a file for --config" in text.text


def test_other_commands_stand_as_they_were_given() -> None:
    command = ["harness", "compare", "--config", "configs/default.yaml"]
    code = reproduce_section(Comparison([make_record(command=command)])).blocks[1]
    assert isinstance(code, Code)
    assert code.text.endswith("\nharness compare --config configs/default.yaml")


def script(label: str, **unknown: str) -> Record:
    part = ObservationPart(
        command=["torchrun", "my train.py"], frameworks=["lightning"], base="ddp",
        loss="what Lightning's training_step was given", unknown={"eval": "not read"} | unknown,
        notes=["2 of 9 steps had a batch of another size"],
    )  # fmt: skip
    return make_record(label=label).model_copy(update={"observation": part})


def test_a_report_without_scripts_has_no_such_section() -> None:
    assert observed_section(Comparison([make_record()])) is None


def test_what_every_script_lacks_stands_in_one_line() -> None:
    rows = [script("observed-ddp"), script("observed-fsdp", loss="divided or not")]
    section = observed_section(Comparison(rows))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert table.texts() == [["all", "eval", "not read"], ["observed-fsdp", "loss", "divided or not"]]


def test_command_framework_loss_and_notes_are_shown() -> None:
    document = details_document(Comparison([script("observed-ddp")]))
    (section,) = [section for section in document.sections if section.key == "observed"]
    text = [str(block.text) for block in section.blocks if isinstance(block, Paragraph)][1]
    assert text == (
        "observed-ddp: `torchrun 'my train.py'`. Driven by lightning. Backend of the same strategy: ddp. "
        "Loss: what Lightning's training_step was given. 2 of 9 steps had a batch of another size."
    )


def told(label: str, **subjects: str):
    record = make_record(label=label)
    effective = record.backend.effective
    assert effective is not None
    effective = replace(effective, details={"library_alone": subjects})
    return record.model_copy(update={"backend": record.backend.model_copy(update={"effective": effective})})


def test_subjects_are_listed_once_with_the_cells_that_tell_them() -> None:
    records = [
        make_record(label="ddp"),
        told("trainer-ddp", loss="a"),
        told("trainer-zero3", loss="a", batches="b"),
    ]
    section = library_alone_section(Comparison(records))
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert table.rows == [
        ["loss", "a", "trainer-ddp and trainer-zero3 on 2 ranks"],
        ["batches", "b", "trainer-zero3 on 2 ranks"],
    ]


def test_without_a_library_that_loops_there_is_no_section() -> None:
    assert library_alone_section(Comparison([make_record(label="ddp")])) is None
