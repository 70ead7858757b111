"""`python -m tests.version_lanes`: writes the lanes' results (.nox/results/*.xml) into docs/versions.md."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.version_lanes.table import BEGIN, END, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"


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
