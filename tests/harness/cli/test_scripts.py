"""Rows of scripts: what is refused, in which order they run, and what makes them another cell."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.cli.output import View
from harness.cli.scripts import ScriptCell, Scripts, named_rows, of_script, strategy_rows
from harness.exported.scripts import StrategyFile
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import reusable
from harness.launch.observed_command import RowLaunch, files_of
from harness.record import ObservationPart, Record
from harness.record.store import Store, write_record
from harness.run_directory.observed_record import ScriptRow
from harness.tell.first_page import same_training
from tests.harness.cli.command_line import harness
from tests.records import changed, make_record

FILES = {
    "zero.yaml": 'distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: "a\\0b"}',
    "train.py": "", "zero0.json": "{}", "tpu.yaml": "distributed_type: XLA",
    "stage0.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}",
    "number.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: 3}",
    "ddp.json": '{"zero_optimization": {"stage": 2}}',
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("distributed_type: MULTI_GPU", "ddp"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", "fsdp"),
        ("distributed_type: FSDP", "fsdp1"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", "zero3"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ddp.json}", "zero2"),
    ],
)
def test_the_strategy_of_a_file_is_what_accelerate_makes_of_it(
    text: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ddp.json").write_text(FILES["ddp.json"])
    Path("a.yaml").write_text(text)
    assert StrategyFile.read(Path("a.yaml"), "accelerate").strategy == strategy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- torchrun train.py", "names a launcher"),
        ("-- none.py", "script 'none.py' is not a file"),
        ("--backends ddp,tp -- train.py", "a script cannot be given 'tp'; Accelerate takes ddp,"),
        ("--backends zerro -- train.py", "backend 'zerro' is unknown"),
        ("--set training.steps=3 -- train.py", "training.steps would be ignored: the script decides"),
        ("--batch largest -- train.py", "--batch would be ignored: the script decides"),
        ("--script a", "give NAME=COMMAND"),
        ("--script a=x --script a=y", "with a name of its own"),
        ("--script a='x", "give NAME=COMMAND"),
        ("--script a=x --nproc 2", "--nproc would be ignored"),
        ("--script a=x -- train.py", "exclude each other"),
        ("--script a=x --reference y", "--reference would be ignored"),
        ("--reference 'x -- train.py", "give a command, such as"),
        ("--reference x --backends ddp", "--reference is for a script"),
        ("--script zero-3=x", "letters, digits and _"),
        ("--nproc 2,4 -- train.py", "a script takes one number"),
        ("--backends ddp:sync_each_batch=true -- train.py", "its own accumulation decides"),
        (
            "--backends ddp:static_graph=true -- train.py",
            "option 'static_graph' of backend 'accelerate-ddp' is unknown",
        ),
        ("--set runtime.threads_per_rank=1 -- train.py", "runtime.threads_per_rank would be ignored"),
        ("-- /other/bin/python train.py", "another Python"),
        (
            "--from-deepspeed none.json -- train.py",
            "none.json cannot be read: No such file or directory; give a JSON file that can be read",
        ),
        (
            "--from-deepspeed zero0.json -- train.py",
            "deepspeed file zero0.json gives a script 'zero0'; its row",
        ),
        ("--from-accelerate tpu.yaml -- train.py", "gives a script 'XLA'"),
        ("--from-accelerate zero.yaml -- train.py", "cannot be read: embedded null byte"),
        ("--from-accelerate stage0.yaml -- train.py", "gives a script 'zero0'"),
        ("--from-accelerate number.yaml -- train.py", "accelerate file 3 cannot be read"),
        ("--from-deepspeed ddp.json -- train.py", "two rows would be named 'ddp'"),
        ("--from-deepspeed ddp.json --from-mode both -- train.py", "--from-mode would be ignored"),
    ],
)
def test_what_a_script_decides_is_refused(words: str, said: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = harness("compare", *words.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_base_is_first_and_every_second_round_is_reversed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Mock(wraps=files_of)
    monkeypatch.setattr("harness.cli.scripts.files_of", reading)
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    rows = strategy_rows(["python", str(script), "--x"], "zero2,fsdp,ddp", [2])
    assert list(rows) == ["ddp", "zero2", "fsdp"]
    assert set(rows.values()) == {(str(script), "--x")}

    def cells() -> list[tuple[str, str]]:
        made = Scripts(
            rows=rows, is_given=True, world_size=2, device="cpu", experiment=load_experiment(None, ()),
            store=Store(tmp_path), view=View(), found=[],
        )  # fmt: skip
        return [(cell.label, cell.key) for cell in made.plan(2)]

    (tmp_path / "part.py").write_text("import deeper")
    (tmp_path / "deeper.py").write_text("x = 1")
    script.write_text("def later():\n    import part, absent")
    before = cells()
    moved = ["ddp", "ddp, moved"]
    assert [name for name, _ in before] == [*moved, "zero2", "fsdp", "ddp", "fsdp", "zero2"]
    assert len({key for _, key in before}) == 7
    reading.assert_called_once()
    assert cells() == before
    (tmp_path / "unrelated.py").write_text("x = 1")
    assert cells() == before
    (tmp_path / "deeper.py").write_text("x = 2")
    after = cells()
    assert not {key for _, key in after} & {key for _, key in before}
    script.write_text("def later(:")
    assert not {key for _, key in cells()} & {key for _, key in after}


def test_the_first_row_that_trains_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[ScriptRow] = []
    ends = {"a": "failed", "b": "unsupported", "c": "timeout"}
    now = count()

    def observed(row: ScriptRow, _launch: RowLaunch, store: Store, *_: object) -> Record:
        starts.append(row)
        status = ends.get(row.label, "ok")
        seen = ObservationPart(
            command=[row.label], frameworks=[], judged_by=row.judged_by, is_moved=row.is_moved, base="ddp"
        )
        record = make_record(
            label=row.label, run_id=f"run-{next(now)}", created_at=f"2026-01-02T03:04:{next(now):02}+00:00",
            status=status, job_id=row.job_id or f"own-{row.label}", cell=row.key, observation=seen,
            backend={"name": "observed-ddp"}, reasons=["planted"] * (status == "unsupported"),
        )  # fmt: skip
        write_record(store.run_directory(record.run_id), record)
        return record

    def compared(found: Sequence[tuple[Path, Record]], edited: str = "") -> tuple[list[Record], list[str]]:
        starts.clear()
        made = Scripts(
            rows={name: (name, "edited" if name == edited else "") for name in "abcde"},
            is_given=False, world_size=2, device="cpu", experiment=load_experiment(None, ()),
            store=Store(tmp_path), view=View(), found=found,
        )  # fmt: skip
        cells = made.plan(1)
        kept = reusable([record for _, record in found], lambda _: True)
        return made.records(cells, kept), [row.label for row in starts]

    monkeypatch.setattr("harness.cli.scripts.observe_row", observed)
    records, ran = compared([])
    assert ran == ["a", "b", "c", "d", "d, moved", "e"]
    assert {r.job_id for r in records} == {"own-d"}
    comparison = Comparison(records)
    parity = {row.backend: row.judgement.parity for row in comparison.rows}
    assert parity == {"a": "unjudged", "b": "unjudged", "c": "unjudged", "d": "exact", "e": "exact"}
    said = same_training(comparison)
    assert said.startswith("yes")
    assert said.endswith("; d is the base, since a, b and c on 2 ranks did not train")
    stored, _ = Store(tmp_path).runs()
    assert {r.job_id for _, r in stored} == {"own-d"}
    ends.clear()
    again, ran = compared(stored, edited="d")
    assert ran == ["a", "c", "d", "d, moved"]
    assert {r.observation.judged_by for r in again if r.observation} == {"d"}
    assert {r.job_id for r in again} == {"own-d"}
    assert same_training(Comparison(again)).endswith("; d is the base, since b on 2 ranks did not train")
    ends["d"] = "failed"
    again, ran = compared(stored, edited="d")
    assert ran == ["a", "c", "d", "e, moved"]
    assert {r.observation.judged_by for r in again if r.observation} == {"e"}


def test_commands_are_rows_by_name() -> None:
    assert named_rows(["a=torchrun 'x y.py'", "b=python z.py"]) == {
        "a": ("torchrun", "x y.py"), "b": ("python", "z.py")
    }  # fmt: skip


def test_a_script_is_neither_traced_nor_digested() -> None:
    own = of_script(load_experiment(None, ("measure.cooldown_steps=7",))).measure
    assert (own.cooldown_steps, own.traced_steps, own.weight_digests) == (7, 0, False)


def test_without_backends_a_script_runs_under_all_that_accelerate_has(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = harness("compare", "--dry-run", "--json", "--", "train.py", cwd=tmp_path)
    rows = {cell["row"]: cell["unsupported"] for cell in json.loads(done.stdout)["cells"]}
    assert list(rows) == ["ddp", "ddp, moved", "zero1", "zero2", "zero3", "fsdp", "fsdp1"]
    assert [name for name, why in rows.items() if why] == ["fsdp", "fsdp1"]


def test_a_plan_says_why_a_row_has_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")

    def planned(*words: str, found: Sequence[Record] = ()) -> tuple[list[ScriptCell], str]:
        made = Scripts(
            rows={"a": (str(script), *words)}, is_given=False, world_size=2, device="cpu",
            experiment=load_experiment(None, ()), store=Store(tmp_path), view=View(wide=True),
            found=[(tmp_path, run) for run in found],
        )  # fmt: skip
        made.show(made.plan(1), {}, as_json=False)
        return made.plan(1), capsys.readouterr().out

    (cell,), said = planned()
    assert "none: never ran in this folder" in said
    seen = ObservationPart(command=[str(script)], frameworks=[], files=files_of([str(script)]))
    failed = changed(make_record(label="a", status="failed", cell=cell.key), observation=seen)
    assert "none: the last run is failed" in planned(found=[failed])[1]
    assert "none: the newest differs in command " in planned("--x", found=[failed])[1]
    script.write_text("print()")
    assert f"none: the newest differs in {script} " in planned(found=[failed])[1]
    other = changed(failed, cell="b", observation=seen.model_copy(update={"files": files_of([str(script)])}))
    assert "none: the newest differs in ranks, a setting" in planned(found=[other])[1]


def test_the_reference_of_a_script_is_the_last_row_and_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ("--backends", "zero2,ddp", "--nproc", "2", "--reference", "python train.py --batch 8")
    done = harness("compare", "--dry-run", "--json", *words, "--", "train.py", cwd=tmp_path)
    cells = json.loads(done.stdout)["cells"]
    assert [cell["row"] for cell in cells] == ["ddp", "ddp, moved", "zero2", "one-process"]
    assert cells[-1]["command"] == ["python", "train.py", "--batch", "8"]
