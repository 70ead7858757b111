"""Rows of scripts: what is refused, in which order they run, and what makes them another cell."""

from pathlib import Path

import pytest

from harness.cli.output import View
from harness.cli.scripts import Scripts, named_rows, observed_measure, strategy_rows
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import MeasureSection
from harness.record.store import Store
from tests.harness.cli.command_line import harness


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- torchrun train.py", "names a launcher"),
        ("-- none.py", "script 'none.py' does not exist"),
        ("--backends ddp,tp -- train.py", "a script cannot be given 'tp'; Accelerate takes ddp,"),
        ("--backends zerro -- train.py", "backend 'zerro' is unknown"),
        ("--set training.steps=3 -- train.py", "training.steps would be ignored: the script decides"),
        ("--batch largest -- train.py", "--batch would be ignored: the script decides"),
        ("--script a", "give NAME=COMMAND"),
        ("--script a=x --script a=y", "with a name of its own"),
        ("--script a='x", "give NAME=COMMAND"),
        ("--script a=x --nproc 2", "--nproc would be ignored"),
    ],
)
def test_what_a_script_decides_is_refused(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = harness("compare", *words.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_base_is_first_and_every_second_round_is_reversed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    rows = strategy_rows(["python", str(script), "--x"], ["zero2", "fsdp", "ddp"])
    assert list(rows) == ["ddp", "zero2", "fsdp"]
    assert set(rows.values()) == {(str(script), "--x")}

    def cells() -> list[tuple[str, str]]:
        made = Scripts(
            rows=rows, is_given=True, world_size=2, device="cpu", experiment=load_experiment(None, ()),
            store=Store(tmp_path), view=View(), files={},
        )  # fmt: skip
        return [(cell.label, cell.key) for cell in made.plan(2)]

    before = cells()
    moved = ["ddp", "ddp, moved"]
    assert [name for name, _ in before] == [*moved, "zero2", "fsdp", "ddp", "fsdp", "zero2"]
    assert len({key for _, key in before}) == 7
    assert cells() == before
    script.write_text("print(2)")
    assert not {key for _, key in cells()} & {key for _, key in before}


def test_commands_are_rows_by_name() -> None:
    assert named_rows(["a=torchrun 'x y.py'", "b=python z.py"]) == {
        "a": ("torchrun", "x y.py"), "b": ("python", "z.py")
    }  # fmt: skip
    with pytest.raises(HarnessError, match="NAME=COMMAND"):
        named_rows(["a b=x"])


def test_windows_are_those_of_observing_unless_set() -> None:
    assert observed_measure(MeasureSection()).cooldown_steps == 3
    own = observed_measure(MeasureSection(cooldown_steps=7, weight_digests=True))
    assert (own.cooldown_steps, own.probed_steps, own.weight_digests) == (7, 2, False)
