"""`harness compare`: what it runs, prints, writes and refuses; rounds, dry runs, files of other tools."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.compare import FIRST_LOOK, Until, add_rounds, parse_within
from harness.doctor.self_check import ABOUT_TIME
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import is_refused, plan
from harness.record import Record
from harness.record.store import read_record
from harness.run_directory.request import RunRequest
from tests.harness.judge.test_rows import COMPARED_KEYS
from tests.records import changed, make_record, make_steps, written

from .command_line import SHORT, harness, records, refused, succeeds
from .conftest import Compared


def test_compare_prints_one_document_of_runs_that_train_as_the_reference_does(comparison: Compared) -> None:
    assert comparison.done.returncode == 0, comparison.done.stderr
    assert [r.status for r in records(comparison.runs)] == ["ok"] * 4
    document = json.loads(comparison.done.stdout)
    assert set(document) == {
        "job_id", "job_ids", "rows", "not_comparable", "noise", "repeat_spreads", "settings", "findings",
        "records",
    }  # fmt: skip
    assert [(r["backend"], r["world_size"]) for r in document["rows"]] == [
        ("single", 1), ("ddp", 2), ("zero1", 2)
    ]  # fmt: skip
    assert all(set(row) == COMPARED_KEYS for row in document["rows"])
    assert {row["parity"] for row in document["rows"]} <= {"exact", "tight"}
    assert [f for f in document["findings"] if f["id"] not in ABOUT_TIME] == []


def test_compared_backends_measure_speed_memory_and_communication(comparison: Compared) -> None:
    rows = {row["backend"]: row for row in json.loads(comparison.done.stdout)["rows"]}
    assert all(min(row["tokens_per_second"], row["model_state_bytes"]) > 0 for row in rows.values())
    assert rows["single"]["sent_bytes_per_step"] == 0
    assert rows["ddp"]["sent_bytes_per_step"] >= rows["ddp"]["textbook_sent_bytes_per_step"] > 0
    assert rows["zero1"]["model_state_bytes"] < rows["ddp"]["model_state_bytes"]


def test_the_person_who_waits_sees_the_table_and_has_the_report(comparison: Compared) -> None:
    assert "[4/4] zero1 on 2 ranks: ok" in comparison.done.stderr
    assert re.search(r"^backend +ranks +status", comparison.done.stderr, flags=re.MULTILINE)
    assert "| zero1" in (comparison.folder / "report.md").read_text()
    assert (comparison.folder / "report.loss.svg").exists()


def test_the_repetition_that_measures_rounding_is_not_timed(comparison: Compared) -> None:
    second = next(line for line in comparison.done.stderr.splitlines() if line.startswith("[2/4]"))
    label = r"single:micro_batch_size=\d,norm=fp32,backward=reordered"
    assert re.fullmatch(rf"\[2/4\] {label} on 1 rank: ok, loss [\d.]+, not timed; about \d+ s left", second)
    (repetition,) = (r for r in records(comparison.runs) if ":" in r.backend.label)
    assert {step.window for step in repetition.steps} == {"warmup"}


def test_second_compare_runs_nothing_and_prints_the_table_without_json(comparison: Compared) -> None:
    before = sorted(comparison.runs.iterdir())
    done = succeeds(*comparison.arguments, "--json", cwd=comparison.folder)
    assert "4 of 4 cells have a record" in done.stderr
    assert sorted(comparison.runs.iterdir()) == before
    assert json.loads(done.stdout) == json.loads(comparison.done.stdout)
    plain = succeeds(*comparison.arguments, cwd=comparison.folder)
    assert [line.split()[:2] for line in plain.stdout.splitlines()[2:5]] == [
        ["single", "1"], ["ddp", "2"], ["zero1", "2"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("backends", "words", "ran"),
    [
        ("ddp,accelerate-ddp,zero1", [], ["accelerate-ddp"]),
        ("ddp", ["--fresh", "--strict"], ["ddp", "single", "single"]),
    ],
    ids=["what is missing", "every cell again"],
)
def test_which_cells_run_again(comparison: Compared, backends: str, words: list[str], ran: list[str]) -> None:
    before = set(comparison.runs.iterdir())
    arguments = ["compare", "--backends", backends, *comparison.arguments[3:]]
    succeeds(*arguments, *words, "--json", cwd=comparison.folder)
    new = set(comparison.runs.iterdir()) - before
    assert sorted(read_record(folder / "record.json").backend.name for folder in new) == ran


def test_runs_of_one_cell_give_the_same_losses(comparison: Compared) -> None:
    losses: dict[str, set[tuple[float | None, ...]]] = {}
    for record in records(comparison.runs):
        losses.setdefault(record.cell, set()).add(tuple(step.loss for step in record.steps))
    assert {len(found) for found in losses.values()} == {1}


def test_report_of_compare_that_cannot_be_written(comparison: Compared, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = tmp_path / "file" / "report.md"
    done = harness(*comparison.arguments, "--report", report, cwd=comparison.folder)
    assert done.returncode == 1
    assert f"harness: report '{report}' cannot be written" in done.stderr
    assert "unexpected" not in done.stderr


def test_two_configurations_are_refused(tmp_path: Path) -> None:
    done = harness("compare", "--config", "a.yaml", "--config", "b.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 files given; give one" in done.stderr


def test_a_later_run_in_the_folder_does_not_break_the_report(comparison: Compared, tmp_path: Path) -> None:
    for name in ("runs", "report.md.runs"):
        shutil.copytree(comparison.folder / name, tmp_path / name)
    for path in comparison.folder.glob("report.*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    (first, *_) = records(tmp_path / "runs")
    later = first.model_copy(update={"run_id": "later", "created_at": "2099-01-01T00:00:00+00:00"})
    written(tmp_path / "runs", later)
    done = harness("verify", "report.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


SECONDS = {"ddp": 1.0, "zero0": 1.001, "fsdp": 1.1, "zero3": 4.0}
DRIFT = (1.0, 1.4, 0.7, 1.2, 2.0)


class Machine:
    """In place of ranks: a speed that drifts, and noise of a tenth in fsdp's runs."""

    def __init__(self) -> None:
        self.interrupted = False
        self.ran: list[tuple[str, int]] = []

    def cells(self, rounds: int) -> list[Any]:
        return [
            SimpleNamespace(
                job_id="0123456789ab", backend=label, world_size=2, repeat=repeat, key=f"{label}-{repeat}"
            )
            for repeat in range(rounds)
            for label in ("single", *SECONDS)
        ]

    def run(self, cells: list[Any], known: object) -> dict[str, Record]:
        self.ran += [(cell.backend, cell.repeat) for cell in cells]
        return {cell.key: self.record(cell.backend, cell.repeat) for cell in cells}

    def record(self, label: str, repeat: int) -> Record:
        noise = 1 + 0.1 * math.sin(7.0 * repeat) if label == "fsdp" else 1 + 0.01 * math.sin(5.0 * repeat)
        seconds = SECONDS.get(label, 1.0) * DRIFT[repeat % len(DRIFT)] * noise
        record = make_record(
            label=label, repeat=repeat, run_id=f"{label}-{repeat}", steps=make_steps(seconds=seconds)
        )
        return record.model_copy(update={"cell": f"{label}-{repeat}"})

    def rounds_of(self, label: str) -> int:
        return 1 + max((repeat for name, repeat in self.ran if name == label), default=0)


def added(
    machine: Any, until: Until, said: list[str], begin: Sequence[Record] = (), earlier: Sequence[Record] = ()
) -> list[Record]:
    """What a command adds to rounds that it began with, and that an earlier one left."""
    begin = begin or [machine.record(label, 0) for label in ("single", *SECONDS)]
    view: Any = SimpleNamespace(say=said.append)
    known = {record.cell: record for record in earlier}
    return add_rounds(machine.cells, machine, known, begin, until, view)


def test_rounds_are_added_for_the_cells_that_are_open_and_their_base_until_all_are_settled() -> None:
    machine, said = Machine(), list[str]()
    records = added(machine, Until(), said)
    assert machine.rounds_of("zero3") == machine.rounds_of("zero0") == FIRST_LOOK
    assert machine.rounds_of("fsdp") == machine.rounds_of("ddp") > FIRST_LOOK
    assert "single" not in {label for label, _ in machine.ran}
    assert said[0] == "round 2; open: zero0 on 2, zero3 on 2 and fsdp on 2"
    assert said[-1] == f"speeds are settled after {machine.rounds_of('ddp')} rounds"
    assert len(records) == 5 + len(machine.ran)


def test_a_precision_takes_more_rounds_than_an_order() -> None:
    coarse, fine = Machine(), Machine()
    added(coarse, Until(), [])
    added(fine, Until(precision=0.02), [])
    assert fine.rounds_of("fsdp") > coarse.rounds_of("fsdp")


UP = Until(deadline=0.0)


@pytest.mark.parametrize(
    ("until", "begin", "told"),
    [
        (UP, [], "no further round after 1 round; open: zero0 on 2, zero3 on 2 and fsdp on 2"),
        # What the report shows in order is not open.
        (UP, [(label, n) for n in range(7) for label in ("single", "ddp", "zero3")],
         "no further round after 7 rounds; open: none"),
        (Until(precision=0.03), [("ddp", 0)], "no round is added: no two cells are compared in speed"),
    ],
    ids=["time is up", "all in order", "nothing to compare"],
)  # fmt: skip
def test_why_no_round_is_added_is_told(until: Until, begin: list[tuple[str, int]], told: str) -> None:
    machine, said = Machine(), list[str]()
    added(machine, until, said, [machine.record(*run) for run in begin])
    assert (machine.ran, said) == ([], [told])


class Failing(Machine):
    """One cell has no result in some rounds."""

    def __init__(self, label: str, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.label, self.fails = label, fails

    def record(self, name: str, repeat: int) -> Record:
        record = super().record(name, repeat)
        return record.model_copy(update={"status": "failed"}) if self.failed(name, repeat) else record

    def failed(self, name: str, repeat: int) -> bool:
        return name == self.label and self.fails(repeat)


@pytest.mark.parametrize("label", ["fsdp", "ddp"])
def test_a_round_in_which_a_cell_failed_is_left_out_and_the_others_settle_it(label: str) -> None:
    machine, said = Failing(label, lambda repeat: repeat in (3, 5)), list[str]()
    records = added(machine, Until(), said)
    assert said[-1] == f"speeds are settled after {machine.rounds_of('ddp')} rounds"
    (order,) = Comparison(records).rankings.values()
    assert order.base == "ddp"
    assert {order.to_base[name].order for name in ("fsdp", "zero3")} == {"slower"}
    assert order.to_base["fsdp"].rounds == machine.rounds_of("fsdp") - 2
    assert order.to_base["zero3"].rounds == machine.rounds_of("zero3") - (2 if label == "ddp" else 0)


@pytest.mark.parametrize(
    ("label", "rounds", "told"),
    [
        ("fsdp", {"fsdp": 5, "zero3": FIRST_LOOK}, "no further round of fsdp on 2: failed or diverged"),
        ("ddp", dict.fromkeys(SECONDS, 5),
         "no further round of ddp on 2: failed or diverged; nor of cells that are compared with it"),
    ],
)  # fmt: skip
def test_a_cell_that_fails_from_some_round_on_is_run_no_more(
    label: str, rounds: dict[str, int], told: str
) -> None:
    machine, said = Failing(label, lambda repeat: repeat >= 3), list[str]()
    added(machine, Until(), said)
    assert {name: machine.rounds_of(name) for name in rounds} == rounds
    assert told in said


def test_a_base_that_diverges_gives_its_place_to_the_next_one() -> None:
    class Diverging(Failing):
        def record(self, name: str, repeat: int) -> Record:
            record = Machine.record(self, name, repeat)
            return record.model_copy(update={"status": "diverged"}) if self.failed(name, repeat) else record

    machine, said = Diverging("ddp", lambda repeat: repeat == 3), list[str]()
    added(machine, Until(), said)
    assert machine.rounds_of("ddp") == FIRST_LOOK
    # fsdp is compared with zero0, the first that is listed.
    assert {name for name in SECONDS if machine.rounds_of(name) > FIRST_LOOK} == {"zero0", "fsdp"}
    assert "no further round of ddp on 2: failed or diverged" in said


def test_no_cell_joins_rounds_that_an_earlier_command_ran_without_it() -> None:
    """An earlier command left fsdp out after eight rounds of twelve; the newest round may be an open one."""
    machine, said = Machine(), list[str]()
    earlier = [
        machine.record(label, n) for label in SECONDS for n in range(FIRST_LOOK if label == "fsdp" else 12)
    ]
    begin = [machine.record("single", 0), *(record for record in earlier if record.repeat == 0)]
    added(machine, Until(), said, begin, earlier)
    assert {repeat for _, repeat in machine.ran} == set(range(11, machine.rounds_of("fsdp")))
    assert {label for label, _ in machine.ran} == {"ddp", "fsdp"}


def test_a_round_that_was_interrupted_is_completed() -> None:
    machine = Machine()
    earlier = [machine.record(label, n) for n in range(3) for label in ("ddp", "zero0")]
    added(machine, Until(), [], earlier=earlier)
    assert ("fsdp", 2) in machine.ran
    assert ("ddp", 2) not in machine.ran


def test_an_interruption_ends_it() -> None:
    machine = Machine()
    machine.interrupted = True
    added(machine, Until(), [])
    assert machine.ran == []


def test_a_precision_is_percent() -> None:
    assert parse_within("3%") == 0.03
    for text in ("3", "0%", "x%", "100 %"):
        with pytest.raises(HarnessError, match="give half the width of an interval, such as 3%"):
            parse_within(text)


DRY_RUN = ("compare", "--dry-run")
SET = ["compare.noise_runs=false", "training.steps=4"]
SET_WORDS = [word for setting in SET for word in ("--set", setting)]


@pytest.fixture(scope="module")
def cells() -> dict[str, RunRequest]:
    return {cell.backend: cell for cell in plan(load_experiment(None, SET), ["ddp", "zero3"], [2], 1, "cpu")}


def test_what_cannot_run_is_not_counted(tmp_path: Path) -> None:
    done = succeeds(
        *DRY_RUN, "--wide", "--backends", "ddp,trainer-fsdp", "--nproc", "2", *SET_WORDS,
        cwd=tmp_path,
    )  # fmt: skip
    (line,) = (line for line in done.stdout.splitlines() if "trainer-fsdp" in line)
    assert "unsupported: accelerate ignores an FSDP plugin" in line
    assert "2 of 3 cells would run" in done.stderr


def test_what_does_not_fit_is_said_and_not_counted(tmp_path: Path) -> None:
    """A model of the catalogue that no check of the job has built, in the words of a run's prediction."""
    words = ["--model", "llama-3.1-8b", "--backends", "ddp,fsdp", "--nproc", "2", *SET_WORDS]
    words += ["--set", "runtime.memory_limit=1GB"]
    words += ["--set", "training.precision=bf16-mixed"]  # its profile is shipped
    done = succeeds(*DRY_RUN, *words, cwd=tmp_path)
    assert re.search(
        r"predicted memory: fsdp on 2 ranks: cannot fit: [\d.]+ GB of 1 GB per rank", done.stderr
    )
    assert "typical error, full training under " in done.stderr
    assert "0 of 3 cells would run" in done.stderr
    found = json.loads(harness(*DRY_RUN, "--json", *words, cwd=tmp_path).stdout)["cells"]
    assert {cell["prediction"]["verdict"] for cell in found} == {"does not fit"}
    assert all(cell["prediction"]["refused"] and cell["prediction"]["typical_error"] for cell in found)
    forced = harness(*DRY_RUN, "--force", *words, cwd=tmp_path)
    assert "3 of 3 cells would run" in forced.stderr


def test_why_nothing_is_predicted_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    found = dry_run(tmp_path, settings=[*SET, "model.factory=own.py:build"])
    assert found["ddp"]["prediction"] is None
    assert "there is no file" in found["ddp"]["no_prediction"]


def recorded(cell: RunRequest, /, **changes: object) -> Record:
    """A record of a cell as a run of it leaves it."""
    record = make_record(
        run_id=f"run-{cell.backend}", label=cell.backend, cell=cell.key, job_id=cell.job_id,
        repeat=cell.repeat, measure=cell.measure.model_dump(),
    )  # fmt: skip
    return record.model_copy(update={"job": cell.job, **changes})


def dry_run(folder: Path, *records: Record, settings: list[str] = SET) -> dict[str, dict]:
    runs = folder / "runs"
    written(runs, *records)
    before = sorted(runs.glob("*"))
    words = [word for setting in settings for word in ("--set", setting)]
    done = succeeds(*DRY_RUN, "--json", "--backends", "ddp,zero3", "--nproc", "2", *words, cwd=folder)
    assert sorted(runs.glob("*")) == before
    return {cell["backend"]: cell for cell in json.loads(done.stdout)["cells"]}


@pytest.mark.parametrize(
    ("changes", "setting", "why"),
    [
        ({}, "training.steps=5", "another job: training.steps"),
        ({}, "measure.probed_steps=1", "measured with other settings: measure.probed_steps"),
        ({"status": "failed"}, "training.steps=4", "the last run is failed"),
        ({"cell": "of other code"}, "training.steps=4", "code, machine, device or threads changed"),
    ],
)
def test_why_a_record_does_not_count_is_said(
    tmp_path: Path, cells: dict, changes: dict, setting: str, why: str
) -> None:
    record = changed(recorded(cells["ddp"], **changes), backend={"versions": {}})
    found = dry_run(tmp_path, record, settings=[*SET, setting])
    assert found["ddp"]["why"] == why


def test_cells_with_a_record_are_named_and_the_others_have_a_reason(tmp_path: Path, cells: dict) -> None:
    """And no time is claimed but that of like runs; no folder is made."""
    found = dry_run(tmp_path)
    assert {(cell["seconds"], cell["seconds_from"]) for cell in found.values()} == {(None, None)}
    assert not (tmp_path / "runs").exists()
    found = dry_run(tmp_path, recorded(cells["ddp"], created_at=datetime.now(UTC).isoformat()))
    assert (found["ddp"]["run_id"], found["ddp"]["why"]) == ("run-ddp", None)
    assert (found["zero3"]["run_id"], found["zero3"]["why"]) == (None, "never ran in this folder")
    assert found["zero3"]["seconds_from"] == "runs"


LIMIT = "runtime.memory_limit"
LIMIT_BYTES = "1800000"
"""Between what DDP and FSDP need."""


def compare(folder: Path, limit: str, *arguments: str) -> tuple[str, dict[str, dict], list[Record]]:
    """Standard error, rows of `compare --json` and the records; `fsdp` fits where `ddp` does not."""
    done = succeeds(
        "compare", "--json", "--backends", "ddp,fsdp", "--nproc", "2", "--runs", "runs", *SHORT,
        "--set", f"{LIMIT}={limit}", "--set", "compare.noise_runs=false", *arguments, cwd=folder,
    )  # fmt: skip
    rows = {row["backend"]: row for row in json.loads(done.stdout)["rows"]}
    return done.stderr, rows, records(folder / "runs")


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict], list[Record], Path]:
    folder = tmp_path_factory.mktemp("between")
    return *compare(folder, LIMIT_BYTES), folder


TORCHRUN = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
}  # fmt: skip
TWO = ("--nproc", "2")


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        ((*TWO, *SHORT), {}, "of 0.01 MB per rank; --force starts it anyway"),
        ((*TWO, "--config", "@own-model", "--set", "compare.backends=[ddp]"), {}, "at least "),
        # Before the rank meets the others.
        pytest.param(SHORT, TORCHRUN, "", marks=pytest.mark.costly),
    ],
    ids=["a run", "a model of one's own", "a rank of torchrun"],
)
def test_a_run_that_cannot_fit_is_one_line(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], told: str
) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", *words, "--set", f"{LIMIT}=10kB", **variables)
    assert "ddp on 2 ranks: cannot fit: " in line
    assert told in line
    assert list((tmp_path / "runs").iterdir()) == []


def test_cells_that_cannot_fit_are_listed_and_the_others_run(between) -> None:
    shown, rows, _, _ = between
    assert "predicted memory: fsdp on 2 ranks: " in shown
    assert "predicted memory: ddp on 2 ranks: cannot fit: " in shown
    assert {name: row["status"] for name, row in rows.items()} == {
        "single": "unsupported", "ddp": "unsupported", "fsdp": "ok",
    }  # fmt: skip
    assert rows["ddp"]["reason"].startswith("cannot fit: ")


def test_the_record_holds_the_prediction_and_that_it_was_refused(between) -> None:
    _, rows, found, _ = between
    for record in found:
        assert record.prediction.device_limit_bytes == record.world.memory_limit_bytes
        assert is_refused(record) == (record.backend.label != "fsdp")
        assert rows[record.backend.label]["predicted_peak_bytes"] == record.prediction.peak_bytes
        assert bool(record.ranks) != is_refused(record)


def test_refused_cells_are_judged_again_and_have_one_record(between) -> None:
    _, rows, before, folder = between
    shown, again, found = compare(folder, LIMIT_BYTES)
    assert "1 of 3 cells have a record" in shown
    assert len(found) == len(before)
    assert again["fsdp"]["run_id"] == rows["fsdp"]["run_id"]
    assert again["ddp"]["run_id"] != rows["ddp"]["run_id"]


DEEPSPEED = {
    "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 1000},
    "gradient_clipping": 0.25, "bf16": {"enabled": False}, "steps_per_print": 5,
}  # fmt: skip
ACCELERATE = """
distributed_type: FSDP
mixed_precision: no
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_offload_params: false}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    return tmp_path


def labels(folder: Path, *words: str) -> list[str]:
    done = succeeds(
        *DRY_RUN, "--json", "--backends", "ddp", "--set", "compare.noise_runs=false", *words,
        cwd=folder,
    )  # fmt: skip
    return [cell["backend"] for cell in json.loads(done.stdout)["cells"]]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--from-accelerate", "fsdp.yaml", "--from-mode", "like-for-like"],
         ["fsdp:row=fsdp", "zero1:overlap_comm=True,row=ds"]),
        # Both bring the reference of the job as given, too.
        (["--from-mode", "both", "--set", "training.gradient_clipping=1"],
         ["zero1:overlap_comm=True,row=ds", "single",
          "zero1:overlap_comm=True,preset=library-defaults,reduce_bucket_size=1000,row=ds-as-given"]),
    ],
)  # fmt: skip
def test_files_are_more_rows_of_a_comparison(folder: Path, words: list[str], rows: list[str]) -> None:
    assert labels(folder, "--from-deepspeed", "ds.json", *words) == ["single", "ddp", *rows]


def test_run_takes_one_row(folder: Path) -> None:
    for words in ([], ["--backend", "ddp", "--from-deepspeed", "ds.json"]):
        done = harness("run", *words, cwd=folder)
        assert done.returncode == 2
        assert "Give one of --backend" in done.stderr


def test_a_typing_error_is_one_line(folder: Path) -> None:
    (folder / "odd.json").write_text('{"zero_optimization": {"stge": 2}}')
    text = refused(folder, "compare", "--from-deepspeed", "odd.json")
    assert "'zero_optimization.stge' is unknown" in text
    assert "Did you mean 'stage'" in text


def planned(folder: Path, *words: str) -> dict[str, Any]:
    done = succeeds(*words, "--model", "bloom-560m", "--gpu", "A100-80", "--json", cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_plan_takes_a_file_and_says_what_it_leaves_out(folder: Path) -> None:
    zero = {**DEEPSPEED["zero_optimization"], "overlap_com": True}  # type: ignore[dict-item]
    document = {**DEEPSPEED, "zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    (folder / "ds.json").write_text(json.dumps(document))
    found = planned(folder, "estimate", "--from-deepspeed", "ds.json")
    (row,) = found["rows"]
    assert row["backend"] == "zero1:overlap_comm=True,reduce_bucket_size=1000"
    assert row["micro_batch_size"] == 2
    assert (found["job"]["gradient_clipping"], found["job"]["precision"]) == (0.25, "fp32")
    assert found["job"]["preset"] == "library-defaults"
    taken, idle, left, *_ = found["remarks"]
    assert taken.startswith("from ds.json: zero_optimization.stage=1, zero_optimization.overlap_comm=true, ")
    assert idle == "without effect on a run, in ds.json: steps_per_print"
    assert left.startswith(
        "not understood in ds.json, and left out: 'zero_optimization.overlap_com' is unknown"
    )
    assert "overlap_com' is unknown" in refused(folder, "compare", "--from-deepspeed", "ds.json")


def test_a_recommendation_takes_the_job_of_a_file_and_leaves_its_strategy_open(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**DEEPSPEED, "train_micro_batch_size_per_gpu": 2}))
    found = planned(folder, "recommend", "--gpus", "2", "--from-deepspeed", "ds.json")
    assert any("from 1 micro-step of 2 samples on 2 GPUs" in remark for remark in found["remarks"])
    assert len({one["backend"] for one in found["fitting"]}) > 3
    (line, *_) = found["commands"]["compare"]
    assert "--set training.gradient_clipping=0.25" in line


def test_a_plan_takes_one_file(folder: Path) -> None:
    two = ("--from-deepspeed", "ds.json", "--from-accelerate", "fsdp.yaml")
    assert "2 files are given; a plan takes one" in refused(folder, "estimate", "--model", "gpt2", *two)
