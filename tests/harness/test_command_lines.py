from pathlib import Path

import pytest

from harness.command_lines import by_name, inside
from harness.compare.comparison import Comparison
from harness.report.document import Code, Folded, Paragraph
from harness.report.sections.reproduce import reproduce_section
from tests.records import make_record


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_a_configuration_file_loses_the_folders_of_its_machine(form: list[str]) -> None:
    def line(path: str) -> list[str]:
        return ["harness", "run", *(word.format(path) for word in form), "--runs", "/shared/runs"]

    assert inside(Path("/home/me"), line("/home/me/configs/a.yaml")) == line("configs/a.yaml")
    assert inside(Path("/home/me"), line("/tmp/a.yaml")) == line("/tmp/a.yaml")
    assert by_name(line("/tmp/a.yaml")) == line("a.yaml")
    assert by_name(line("configs/a.yaml")) == line("configs/a.yaml")


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
