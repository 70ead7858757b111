"""What commands print at a terminal fits 100 columns."""

from pathlib import Path
from unittest.mock import patch

import pytest

from harness.cli import COMMANDS, output
from harness.record.store import write_record
from harness.tell.formats import WIDTH, fitted, folded
from tests.harness.cli.command_line import harness
from tests.records import make_record, make_steps
from tests.representatives import COSTLY, EXHAUSTIVE

LLAMA = ("--model", "llama-3.1-8b", "--gpu", "H100-80", "--fabric", "NDR400")
OPTIONS = "fsdp1:auto_wrap=none,backward_prefetch=post,forward_prefetch=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of long names, one of which failed with a long message."""
    made = tmp_path_factory.mktemp("width")
    command = ["harness", "compare", *["--set", "training.precision=bf16-mixed"] * 8]
    for record in (
        make_record(run_id="20261123-100232-single-n1-r0-0201c6", label="single", world_size=1),
        make_record(run_id="20261123-100319-fsdp1-n2-r0-299849", label=OPTIONS, world_size=2,
                    steps=make_steps(seconds=0.25)).model_copy(update={"command": command}),
        make_record(run_id="20261123-100336-fsdp1-n4-r0-66dff1", label="fsdp1-hybrid", world_size=4, steps=[],
                    status="unsupported", reasons=["hybrid sharding needs at least two replicas " * 4]),
    ):  # fmt: skip
        run = made / "runs" / record.run_id
        run.mkdir(parents=True)
        write_record(run, record)
    return made


@pytest.mark.parametrize(
    "words",
    [
        *([command, "--help"] for command in COMMANDS),
        ["labs", "run", "--help"], ["labs", "table", "--help"], ["slurm", "render", "--help"],
        ["backends"], ["settings"], ["explain", "gradient-scale"],
        ["list"], ["show"], ["show", "0201c6"], ["clean"],
        ["compare", "--dry-run", "--backends", "ddp,fsdp1-hybrid-grad-op,trainer-fsdp"],
        pytest.param(["compare", "--dry-run", "--backends", "all"], marks=EXHAUSTIVE),
        ["labs", "list"], ["labs", "table", "model-memory"], ["labs", "table", "fsdp-lecture"],
        ["estimate", *LLAMA, "--world-size", "8,64"], ["estimate", "--list", "models"],
        ["estimate", *LLAMA, "--world-size", "8", "--backends", "zero3,fsdp1", "--details"],
        ["estimate", "--list", "hardware"],
        pytest.param(["recommend", *LLAMA, "--gpus", "8", "--tokens-per-step", "4M"], marks=COSTLY),
        pytest.param(["recommend", *LLAMA, "--gpus", "64", "--tokens-per-step", "4M"], marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_line_fits(words: list[str], folder: Path) -> None:
    with patch.object(output, "_at_terminal", return_value=True):
        done = harness(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\r")[-1] for line in (done.stdout + done.stderr).splitlines()]
    assert [line for line in lines if len(line) > WIDTH and not is_to_copy(line)] == []


def is_to_copy(line: str) -> bool:
    """A command, or a path that is longer than a line: neither is broken."""
    return line.startswith("  harness ") or len(line.split()) <= 2


def test_what_a_program_reads_is_not_folded(folder: Path) -> None:
    long = harness("backends", "--json", cwd=folder).stdout
    with patch.object(output, "_at_terminal", return_value=True):
        assert harness("backends", "--json", cwd=folder).stdout == long
    assert max(map(len, long.splitlines())) > WIDTH


def test_sentences_fold_below_their_beginning_and_tables_do_not() -> None:
    sentence = "- " + "word " * 40
    first, *others = folded(sentence).splitlines()
    assert first.startswith("- word")
    assert all(line.startswith("  word") for line in others)
    assert " ".join([first, *others]).split() == sentence.split()
    row = "name  " + "column " * 30
    assert folded(row) == row


def test_cells_break_at_words_and_keep_all_of_them() -> None:
    why = "a reason of many words " * 6
    table = fitted([["fsdp1", why.strip(), "ok"], ["zero3", "short", "ok"]], ["backend", "why", "status"])
    assert max(map(len, table.splitlines())) <= WIDTH
    assert table.count("reason") == 6
    assert table.splitlines()[2].endswith("ok")


def test_a_table_that_fits_is_left_alone() -> None:
    assert fitted([["ddp", "1"]], ["backend", "ranks"], alignments={"ranks": "right"}).splitlines() == [
        "backend  ranks", "-------  -----", "ddp          1",
    ]  # fmt: skip
