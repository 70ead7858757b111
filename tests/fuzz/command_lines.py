"""Command lines: every command with its own options, and values that nobody means."""

import click
from click.testing import CliRunner
from hypothesis import strategies as st

from harness.cli import COMMANDS, harness
from harness.errors import HarnessError
from tests.fuzz.documents import TEXTS, as_json, hostile

OUTPUTS = ("-o", "--output", "--report", "--plot", "--save-calibration", "--bundle", "--runs")
"""Options that name what is written: of these only names within the folder are drawn."""
INSIDE = (
    "out.md", "out.html", "a/b/c.json", "x" * 300, "", "-", "runs", "é.svg", "folder", "fifo", "a\x00b",
    "\ud800",
)  # fmt: skip
PRESENT = ("runs", "job.yaml", "fifo", "zero", "sparse", "missing", "folder", "loop", "@default", ".")
"""Files and folders of the working directory; `tests/fuzz/__main__.py` makes them."""


def invoke(words: list[str]) -> None:
    """Run a command in this process. Raises HarnessError and what no command may raise, as it was raised."""
    result = CliRunner().invoke(harness, ["--debug", *words])
    error = result.exception
    if isinstance(error, OSError) and error.strerror:
        raise HarnessError(error.strerror)
    if error is not None and not isinstance(error, SystemExit):
        raise error
    assert result.exit_code in (0, 1, 2, 3, 130), result.exit_code
    assert "Traceback" not in result.output, result.output[-2000:]


def commands() -> list[tuple[list[str], click.Command]]:
    """The words of every command, with it."""
    context = click.Context(harness)
    waiting = [([name], harness.get_command(context, name)) for name in COMMANDS]
    found: list[tuple[list[str], click.Command]] = []
    for words, command in waiting:
        if isinstance(command, click.Group):
            inner = command.list_commands(context)
            waiting += [([*words, name], command.get_command(context, name)) for name in inner]
        elif command is not None:
            found.append((words, command))
    return found


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with a few of its options, right and wrong ones."""
    words, command = draw(st.sampled_from(commands()))
    words = list(words)
    for _ in range(draw(st.integers(0, 5))):
        parameter = draw(st.sampled_from(command.params))
        value = draw(_values(parameter))
        if isinstance(parameter, click.Argument):
            words.append(value)
        elif parameter.is_flag or parameter.name in ("debug", "help"):  # type: ignore[attr-defined]
            words.append(parameter.opts[-1])
        else:
            words += [parameter.opts[-1], value]
    return words


def _values(parameter: click.Parameter) -> st.SearchStrategy[str]:
    if set(parameter.opts) & set(OUTPUTS) or parameter.name in ("output", "file"):
        return st.sampled_from(INSIDE)
    choices = getattr(parameter.type, "choices", None)
    right = st.sampled_from([str(choice) for choice in choices]) if choices else st.sampled_from(PRESENT)
    usual = st.sampled_from(["1", "2", "8", "ddp", "llama-3.1-8b", "H100-80", "1e9", "0", "-1", "1000000000"])
    texts = st.one_of(right, usual, st.sampled_from(TEXTS), hostile().map(as_json))
    return texts.filter(lambda text: "\0" not in text)  # no process can be given one
