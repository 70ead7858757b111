"""The table of journeys in CONTRIBUTING.md names every journey with the commands that it runs."""

import ast
from pathlib import Path

import pytest

from harness.cli import COMMANDS
from tests.docs.markdown import ROOT

HERE = Path(__file__).parent
HEAD = "| journey | commands | test |"
GROUPS = ("export", "labs", "slurm")
MODULES = sorted(path.name for path in HERE.glob("test_*.py") if path.name != "test_table.py")


def table() -> dict[str, list[str]]:
    """Commands in backticks by module; a row may go on in the next one."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition(f"{HEAD}\n| --- | --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    found: dict[str, list[str]] = {}
    for row in rows:
        _, commands, test = (cell.strip() for cell in row.strip("|").split(" | "))
        found.setdefault(test.strip("`"), []).extend(commands.split("`")[1::2])
    return found


def run_by(path: Path) -> set[str]:
    """Commands of the harness in the calls of a module: `journey.harness("slurm", "render", ...)`.

    A run that journeys share is a fixture (`conftest.py`).
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg) and node.arg == "bare_model_observed":
            found.add("observe")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        if node.func.attr == "harness" and words:
            found.add(" ".join(words[:2]) if words[0] in GROUPS else str(words[0]))
        if node.func.attr == "reports":
            found.add("report")
    return found


def test_the_table_names_every_module_and_no_other() -> None:
    assert sorted(table()) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_table_names_the_commands_that_the_module_runs(name: str) -> None:
    told = {command for command in table()[name] if command.split()[0] in COMMANDS}
    run = run_by(HERE / name)
    assert run <= told
    # A command that another one printed is named by nobody.
    assert told == run or ".printed(" in (HERE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_what_else_the_table_names_is_in_the_module(name: str) -> None:
    text = (HERE / name).read_text(encoding="utf-8")
    others = [told for told in table()[name] if told.split()[0] not in COMMANDS]
    assert [told for told in others if told not in text] == []
