"""What torch was built for, from its files."""

from pathlib import Path

import torch

from harness.gpus.found import Wheel, installed_wheel, read_wheel


def test_the_installed_torch_is_read_as_it_says_itself() -> None:
    wheel = installed_wheel()
    assert wheel is not None
    assert (wheel.version, wheel.cuda, wheel.hip) == (
        torch.__version__,
        torch.version.cuda,
        torch.version.hip,
    )
    assert wheel.is_known


def test_a_file_that_says_nothing_leaves_the_build_unknown(tmp_path: Path) -> None:
    assert not read_wheel(tmp_path / "version.py").is_known
    (tmp_path / "version.py").write_text("from torch._version import *\n")
    assert not read_wheel(tmp_path / "version.py").is_known


def test_builds_are_named() -> None:
    assert str(Wheel(version="2.13.0+rocm7.1", hip="7.1.2", cuda=None)) == "torch 2.13.0+rocm7.1 (ROCm 7.1.2)"
    assert str(Wheel(version="2.13.0+cpu")) == "torch 2.13.0+cpu"
