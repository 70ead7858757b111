from harness.judge.comparison import Comparison
from harness.tell.document import Code, Line
from harness.tell.short.outline import MOST_WORDS_CHECK as MOST_WORDS
from harness.tell.short.outline import VERIFY, check_section
from tests.records import make_record


def shown(*commands: str) -> tuple[list[str], str]:
    """Lines of the code block and the line about running it again."""
    records = [
        make_record(run_id=f"run-{n}", repeat=n, command=command.split())
        for n, command in enumerate(commands)
    ]
    code, again, verify = check_section(Comparison(records), "all").blocks
    assert isinstance(code, Code)
    assert isinstance(again, Line)
    assert isinstance(verify, Line)
    assert (again.details, verify.details) == ("reproduce", "records")
    return code.text.splitlines(), again.text


def test_the_command_that_made_the_runs_stands_above_the_one_that_verifies_them() -> None:
    lines, again = shown("harness compare --backends ddp", "harness compare --backends ddp")
    assert lines == ["harness compare --backends ddp", VERIFY]
    assert "more" not in again


def test_further_and_long_commands_are_in_the_details() -> None:
    lines, again = shown("harness compare", "harness compare --resume")
    assert lines == ["harness compare", VERIFY]
    assert again.endswith("1 more command:")
    lines, again = shown("harness compare" + " --set a=b" * MOST_WORDS)
    assert lines == [VERIFY]
    assert "1 more command" in again
