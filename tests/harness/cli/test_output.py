"""What reaches a terminal, and readers that leave early."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.output import echo
from tests.harness.cli.command_line import HARNESS, environment, harness
from tests.patience import SECONDS
from tests.records import make_record

PRINT = "import sys; from harness.cli.output import echo; "


def run(code: str, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PRINT + code], text=True, **streams)


def test_reader_that_left_ends_nothing(tmp_path: Path) -> None:
    """As `harness run 2>&1 | head -1` does."""
    done = tmp_path / "done"
    code = f"[echo('x' * 10000, err=n % 2 == 0) for n in range(20)]; open({str(done)!r}, 'w').close()"
    process = run(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=SECONDS) == 0
    assert done.exists()


def test_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*HARNESS, "backends"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "harness: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("err", [False, True])
def test_whatever_is_printed_holds_neither_secrets_nor_escapes(
    err: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    echo("https://user:hunter22@example.org \x1b[2J", err=err)
    printed = capsys.readouterr()
    assert (printed.err if err else printed.out) == "https://***@example.org \\u001b[2J\n"


def test_terminal_escapes_of_records_are_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(make_record(status="failed").model_dump_json())
    other = make_record(run_id="\x1b[2Jevil\x9b", status="failed")
    path.with_name("other.json").write_text(other.model_dump_json())
    done = harness("diagnose", path, path.with_name("other.json"), cwd=tmp_path)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr


def test_password_in_a_refused_address_is_not_echoed(tmp_path: Path) -> None:
    address = "https://user:hunter22@example.org/corpus.txt"
    done = harness("run", "--backend", "ddp", "--set", f"data.sauce={address}", cwd=tmp_path)
    assert done.returncode == 1
    assert "hunter22" not in done.stderr
    done = harness("run", "--backend", "ddp", "--set", f"training.steps={address}", cwd=tmp_path)
    assert "hunter22" not in done.stderr
    assert "***@example.org" in done.stderr
