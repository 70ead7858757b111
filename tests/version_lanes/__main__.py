"""`python -m tests.version_lanes`: the table of lanes and tests, from the junit files that the lanes wrote
(.nox/results/*.xml), into docs/versions.md.

A test that passes because a version is wrong as it is known to be says so.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree.ElementTree import Element, parse

from harness.backends.libraries.facts import fact

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- lanes -->\n\n", "<!-- end of lanes -->"
_LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "peft")
_KNOWN_WRONG = {
    "test_contract[zero2]": "zero2-loses-micro-steps",
    "test_zero0_bf16": "zero0-bf16-scales-gradients",
}
"""Tests that pass if DeepSpeed is wrong in versions of a fact."""


def table(files: Iterable[Path]) -> str:
    """Markdown: a line per lane with its versions, and how each test of the slice ended."""
    lanes = {file.stem: _suite(file) for file in files}
    tests = list(dict.fromkeys(test for suite in lanes.values() for test in _outcomes(suite)))
    notes: list[str] = []
    lines = [
        f"| environment | {' | '.join(_LIBRARIES)} | {' | '.join(map(_shown, tests))} |",
        "|" + " --- |" * (1 + len(_LIBRARIES) + len(tests)),
    ]
    for lane, suite in lanes.items():
        versions, outcomes = _properties(suite), _outcomes(suite)
        cells = [versions.get(name, "n/a") for name in _LIBRARIES]
        cells += [_cell(_known(test, versions, outcomes.get(test, "not run")), notes) for test in tests]
        lines.append(f"| {lane} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + "".join(f"\n[{n}] {note}\n" for n, note in enumerate(notes, start=1))


def _suite(file: Path) -> Element:
    root = parse(file).getroot()
    suite = root if root.tag == "testsuite" else root.find("testsuite")
    if suite is None:
        raise ValueError(f"{file} has no test suite")
    return suite


def _properties(suite: Element) -> dict[str, str]:
    return {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}


def _outcomes(suite: Element) -> dict[str, str]:
    """By test: 'pass', 'fail: why' or 'unsupported: why'."""
    return {case.attrib["name"]: _outcome(case) for case in suite.iter("testcase")}


def _outcome(case: Element) -> str:
    skipped = case.find("skipped")
    if skipped is not None:
        return str(skipped.attrib.get("message", "skipped"))
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            lines = found.attrib.get("message", "").strip().splitlines()
            return f"fail: {lines[0] if lines else kind}"
    return "pass"


def _known(test: str, versions: dict[str, str], outcome: str) -> str:
    """The outcome; 'wrong, as known' where passing means that."""
    known = _KNOWN_WRONG.get(test)
    if outcome == "pass" and known is not None and fact(known).includes(versions["deepspeed"]):
        return "wrong, as known"
    return outcome


def _cell(outcome: str, notes: list[str]) -> str:
    word, separator, why = outcome.partition(": ")
    if not separator:
        return outcome
    if why not in notes:
        notes.append(why)
    return f"{word} [{notes.index(why) + 1}]"


def _shown(test: str) -> str:
    found = re.fullmatch(r"test_contract\[(.+)\]", test)
    return found[1] if found else test.removeprefix("test_").replace("_", " ")


def main() -> int:
    files = sorted((ROOT / ".nox" / "results").glob("*.xml"))
    if not files:
        sys.stderr.write("no results in .nox/results; run nox -s versions\n")
        return 1
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(files) + "\n" + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
