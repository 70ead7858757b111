"""What was asked for stands in the report, so that it can be asked for again."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import plan
from harness.nested import differences
from harness.record import ObservationPart, Record
from harness.safe_text import by_name, inside, without_passwords
from harness.tell.document import Code, Folded, Items, Paragraph, Table
from harness.tell.sections import job
from tests.harness.tell.cells import blocks_in, lines_of, with_world
from tests.records import ENVIRONMENT, REPORTS, changed, make_record, published_comparison
from tests.representatives import first
from tests.timed_records import processors, ranks, run


def cut(label: str, micro_batch_size: int, accumulation_steps: int) -> Record:
    world = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation_steps}
    return with_world(make_record(label=label), **world)


def settings(*records: Record) -> str:
    (code,) = blocks_in(job.job_section(Comparison(records)), Code)
    return code.text


def facts(*records: Record) -> dict[str, str]:
    """What is said of the machine."""
    (items,) = blocks_in(job.machine_section(Comparison(records)), Items)
    return dict(items.items)  # type: ignore[arg-type]


def test_the_accumulation_that_ran_is_a_setting_unless_cells_were_cut_differently() -> None:
    text = settings(cut("single", 8, 1), cut("ddp", 1, 4), cut("zero3", 1, 4))
    assert "accumulation_steps: 4" in text
    assert "micro_batch_size: 1\n" in text
    text = settings(cut("ddp", 1, 4), cut("zero3", 4, 1))
    assert "accumulation_steps" not in text
    assert "micro_batch_size" not in text


SLURM = {"job": "7_0", "state": "COMPLETED", "attempts": 2, "restarts": 1, "max_resident_bytes": 3_000_000}


def test_the_least_and_the_most_load_of_a_machine_are_shown() -> None:
    records = [
        make_record(repeat=n, run_id=f"r{n}", environment=ENVIRONMENT | {"load_average": load})
        for n, load in enumerate((1.5, 0.25, 0.5))
    ]
    told = facts(*records)
    assert told["load before the runs"] == (
        "1.50 before the first, 0.25 to 1.50 before all (average of a minute)"
    )
    assert told["runs began"] == "from 2026-01-02 03:04 to 2026-01-02 03:04 UTC"


def test_what_other_work_used_is_shown_where_records_tell_it() -> None:
    busy = {"processors": processors(machine_busy_seconds=9.0)}
    used = [rank.model_copy(update=busy) for rank in ranks()]
    told = facts(run(), run(repeat=1, run_id="r1", ranks=used))
    assert told["other work during timed steps"] == "0.00 to 0.25 cores"


def test_what_slurm_knows_is_a_table_of_what_it_knows() -> None:
    records = [make_record(), make_record(label="ddp", environment=ENVIRONMENT | {"slurm": SLURM})]
    (table,) = blocks_in(job.machine_section(Comparison(records)), Table)
    assert lines_of(table) == [
        {
            "backend": "ddp", "world_size": "2", "repeat": "0", "job": "7_0", "state": "COMPLETED",
            "attempts": "2", "restarts": "1", "max_resident_bytes": "3.00",
        }
    ]  # fmt: skip
    assert blocks_in(job.machine_section(Comparison([make_record()])), Table) == []


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
    assert facts(make_record(environment=environment))["harness code"] == f"0123456789ab, {words}"


@pytest.fixture(scope="module")
def default() -> Comparison:
    return published_comparison("default")


NOT_HERE = ("bloom-560m", "traps")
"""Reports whose data or backends no plan finds."""
PLANNED = sorted(
    name
    for path in REPORTS.rglob("report.md")
    if not (name := str(path.parent.relative_to(REPORTS))).startswith(NOT_HERE)
)


@pytest.mark.parametrize("report", first(["default", "strong-scaling", "weak-scaling"], PLANNED))
def test_the_file_of_a_job_asks_for_its_runs(report: str, tmp_path: Path) -> None:
    comparison = published_comparison(report)
    for fold in blocks_in(job.job_section(comparison), Folded):
        records = [row.record for row in comparison.rows if row.record.job_id in fold.title]
        ran = {
            (one.backend.label, one.world.world_size): one for one in records if one.backend.label != "single"
        }
        path = tmp_path / "job.yaml"
        path.write_text(fold.blocks[0].text)
        experiment, asked = load_experiment(path, []), yaml.safe_load(path.read_text())
        labels, sizes = (list(dict.fromkeys(names)) for names in zip(*ran, strict=True))
        if all(one.world.nodes == 1 for one in records):
            assert asked["compare"] == {
                "backends": labels, "world_sizes": sizes,
                "repeats": 1 + max(one.repeat for one in records),
            }  # fmt: skip
        cells = plan(experiment, labels, sizes, 1, experiment.runtime.device)
        assert {cell.job_id for cell in cells} == {records[0].job_id}
        for cell in cells:
            record = ran.get((cell.backend, cell.world_size))
            if record is not None:
                world = record.world
                assert (cell.preset, cell.device, cell.threads_per_rank) == (
                    world.preset, world.device, world.threads_per_rank,
                )  # fmt: skip
                assert (cell.layout.micro_batch_size, cell.layout.accumulation_steps) == (
                    world.micro_batch_size, world.accumulation_steps,
                )  # fmt: skip
                differs = {
                    key for key, *_ in differences(cell.measure.model_dump(), record.measure.model_dump())
                }
                assert not differs & {(key,) for key in asked["measure"]}


def test_settings_in_which_cells_differ_are_left_out_of_the_file() -> None:
    ddp = make_record(label="ddp")
    other = with_world(make_record(label="fsdp"), threads_per_rank=9, preset="library-defaults")
    found = yaml.safe_load(settings(ddp, other))
    assert found["runtime"] == {"device": "cpu"}
    own = with_world(make_record(label="fsdp:preset=library-defaults"), preset="library-defaults")
    found = yaml.safe_load(settings(ddp, own))
    assert found["runtime"]["preset"] == ddp.world.preset
    assert found["compare"]["backends"] == ["ddp", "fsdp:preset=library-defaults"]
    nodes = yaml.safe_load(settings(ddp, with_world(make_record(label="fsdp"), nodes=2)))
    assert "compare" not in nodes


def test_commit_and_install_line_stand_before_the_commands(default: Comparison) -> None:
    section, git = job.reproduce_section(default), default.rows[0].record.environment.git
    assert git.commit in blocks_in(section, Paragraph)[0].text
    commands = blocks_in(section, Code)[0]
    assert commands.text.startswith("pip install -c constraints.txt -e '.[train]'\nharness ")


def test_each_layout_stands_once_with_its_backends() -> None:
    records = [
        make_record(), make_record(label="ddp"), make_record(label="fsdp"),
        make_record(label="fsdp", repeat=1),
    ]  # fmt: skip
    section = job.measurement_section(Comparison(records))
    lines, shared = lines_of(blocks_in(section, Table)[0]), blocks_in(section, Paragraph)[0].text
    assert [(line["world_size"], line["backends"]) for line in lines] == [
        ("1", "single"),
        ("2", "ddp and fsdp"),
    ]
    assert lines[0]["micro_batch_size"] == "8"
    assert "timed_steps" not in lines[0]
    assert "The same in all cells that trained: nodes 1," in shared
    assert "timed 2." in shared


def presets(*labels: str) -> tuple[str, list[dict[str, str]]]:
    """What is said of presets, and each change."""
    section = job.presets_section(Comparison([make_record(label=label) for label in labels]))
    text = "\n".join(block.text for block in blocks_in(section, Paragraph))
    return text, [line for table in blocks_in(section, Table) for line in lines_of(table)]


def test_a_change_of_a_preset_stands_once_with_all_its_backends() -> None:
    backends = {line["setting"]: line["backends"] for line in presets("single", "zero1", "zero2", "ddp")[1]}
    assert backends["reduce_bucket_size"] == "zero1; zero2"
    assert backends["gradient_as_bucket_view"] == "ddp"
    text, lines = presets("single", "zero3", "zero3:preset=library-defaults")
    assert text.startswith("Preset: like-for-like; library-defaults for zero3:preset=library-defaults.")
    assert {line["backends"] for line in lines} == {"zero3"}
    assert presets("zero3:preset=library-defaults") == (
        "Preset: library-defaults for zero3:preset=library-defaults. library-defaults keeps a library's "
        "settings, except those that change the mathematics.",
        [],
    )


def test_difference_is_nested_and_names_what_is_gone() -> None:
    whole = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    assert job.difference({"a": 1, "b": {"c": 5, "d": 3}, "f": 6}, whole) == {
        "b": {"c": 5}, "f": 6, "e": None,
    }  # fmt: skip
    assert job.difference(whole, whole) == {}


def test_a_backend_is_told_once_and_other_sizes_by_what_differs() -> None:
    two, four, eight = (make_record(label="ddp", world_size=size) for size in (2, 4, 8))
    four = changed(four, backend={"native_config": {"buckets": 4}})
    (folded,) = blocks_in(job.configuration_section(Comparison([two, four, eight])), Folded)
    assert folded.title == "ddp, 2 ranks, 4 ranks, 8 ranks"
    whole, *rest = folded.blocks
    assert "effective" in str(whole)
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
    section = job.reproduce_section(Comparison([make_record(command=command)]))
    (code,) = blocks_in(section, Code)
    assert code.text.endswith("\nharness compare --config 'my job.yaml'")
    assert (
        "'Job ..., every setting' is the content of a file for --config"
        in blocks_in(section, Paragraph)[1].text
    )


def script(label: str, **unknown: str) -> Record:
    part = ObservationPart(
        command=["torchrun", "my train.py"], frameworks=["lightning"], base="ddp",
        loss="what Lightning's training_step was given", unknown={"eval": "not read"} | unknown,
        notes=["2 of 9 steps had a batch of another size"],
    )  # fmt: skip
    return make_record(label=label, observation=part)


def test_what_every_script_lacks_stands_in_one_line() -> None:
    rows = [script("observed-ddp"), script("observed-fsdp", loss="divided or not")]
    section = job.observed_section(Comparison(rows))
    (table,) = blocks_in(section, Table)
    assert table.texts() == [["all", "eval", "not read"], ["observed-fsdp", "loss", "divided or not"]]
    assert blocks_in(section, Paragraph)[1].text == (
        "observed-ddp: `torchrun 'my train.py'`. Driven by lightning. Backend of the same strategy: ddp. "
        "Loss: what Lightning's training_step was given. 2 of 9 steps had a batch of another size."
    )
