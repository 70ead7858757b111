"""Settings that nobody writes by accident are refused in one line, at once."""

from pathlib import Path

import pytest

from harness.backends import registry
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.cells import plan
from tests.plugins import register

BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{{key}: [{', '.join(['*' + before] * 10)}]}}\n"
    for before, name, key in zip("abcdefghi", "bcdefghij", ("<<", "!!merge k", "<<") * 3, strict=True)
)
WIDE = (
    "a: &a {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}\nb: {<<: [" + ", ".join(["*a"] * 2000) + "]}"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MERGES, "more than 20,000 values"),
        (WIDE, "more than 20,000 values"),
        (BOMB, "more than 20,000 values"),
        ("model: &m {config: *m}", "alias that contains itself"),
        ("training: {steps: " + "9" * 5000 + "}", "cannot be read"),
        ("training: {steps: " + "9" * 4000 + "}", "too large"),
        ("training: {seed: 1" + "0" * 30 + "}", "too large"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
    ids=["merges", "wide merge", "bomb", "circle", "5000 digits", "4000 digits", "31 digits", "deep"],
)
def test_configuration_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError) as refused:
        load_experiment(path)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_repeats_beyond_reason_are_refused_before_they_are_planned() -> None:
    with pytest.raises(HarnessError, match="less than or equal to 1000"):
        load_experiment(None, ["compare.repeats=1000000"])
    with pytest.raises(HarnessError, match="at most 1000"):
        plan(load_experiment(None), ["ddp"], [2], 10**6, "cpu")


def test_plugin_that_exits_when_it_is_imported_only_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('good bye')\n")
    register(tmp_path, {"leaving": "leaving:Backend"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(registry.UnknownBackend, match="SystemExit: good bye"):
        registry.parse("leaving")
