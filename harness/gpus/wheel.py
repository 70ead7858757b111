"""Which build of torch is installed, read from its files: importing torch takes seconds."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Vendor = Literal["NVIDIA", "AMD", "Intel", "Apple"]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One build of torch."""

    version: str = "of unknown version"
    cuda: str | None = None
    """Version of CUDA that it was built for, such as '13.0'."""
    hip: str | None = None
    """The same of ROCm's HIP."""
    xpu: str | None = None
    """The same of Intel's oneAPI."""
    is_known: bool = True
    """False: its files do not say what it was built for."""

    @property
    def vendor(self) -> Vendor | None:
        """Whose GPUs it can drive; None: nobody's, or not known."""
        if self.hip:
            return "AMD"
        if self.cuda:
            return "NVIDIA"
        return "Intel" if self.xpu else None

    def __str__(self) -> str:
        """'torch 2.13.0+cu130 (CUDA 13.0)'."""
        builds = {"ROCm": self.hip, "CUDA": self.cuda, "XPU": self.xpu}
        built_for = next((f" ({name} {version})" for name, version in builds.items() if version), "")
        return f"torch {self.version}{built_for}"


def installed_wheel() -> Wheel | None:
    """The torch that a new process of this interpreter would import; None: there is none."""
    try:
        spec = find_spec("torch")
    except ModuleNotFoundError:  # of a finder that refuses it by name
        spec = None
    if spec is None:
        return None
    folders = spec.submodule_search_locations or ()
    files = [file for folder in folders if (file := Path(folder) / "version.py").is_file()]
    return read_wheel(files[0]) if files else Wheel(is_known=False)


def read_wheel(file: Path) -> Wheel:
    """What torch's `version.py` says."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return Wheel(is_known=False)
    found: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                found[target.id] = value.value if isinstance(value.value, str) else None
    return Wheel(
        version=found.get("__version__") or Wheel.version,
        cuda=found.get("cuda"), hip=found.get("hip"), xpu=found.get("xpu"),
        is_known="cuda" in found,
    )  # fmt: skip
