"""Prints what this project and the extras given depend on, a line each, for pip."""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

if __name__ == "__main__":
    extras = (PROJECT["optional-dependencies"][name] for name in sys.argv[1:])
    sys.stdout.write("\n".join(sum(extras, PROJECT["dependencies"])))
