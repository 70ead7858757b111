"""Prints what this project and these of its extras depend on, a line each, for pip."""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """As `pyproject.toml` has them."""
    given = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return [
        *given["dependencies"],
        *(line for name in extras for line in given["optional-dependencies"][name]),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1:])))
