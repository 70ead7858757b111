"""Lanes of library versions: `nox -s versions` runs a small selection of tests in each (docs/versions.md).

A lane shares every package with the environment that nox runs in, and installs only what it pins: so no lane
downloads another build of torch. `nox -s torch` is for machines whose index has the build wanted.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["versions"]

LANES: dict[str, tuple[str, ...]] = {
    "as-pinned": (),
    "deepspeed-0.18.0": ("deepspeed==0.18.0",),
    "deepspeed-0.18.5": ("deepspeed==0.18.5",),
    "deepspeed-0.18.6": ("deepspeed==0.18.6",),
    "deepspeed-0.19.2": ("deepspeed==0.19.2",),
    "deepspeed-0.19.3": ("deepspeed==0.19.3",),
    "transformers-5.10.1": ("transformers==5.10.1",),
    "accelerate-1.10.0": ("accelerate==1.10.0",),
    "newest": ("--upgrade", "deepspeed", "transformers", "accelerate", "peft"),
}
TORCH = ("2.12.1", "2.14.1", "2.15.0")
SLICE = "tests/version_lanes/lane_slice.py"
RESULTS = Path(".nox") / "results"


@nox.session
@nox.parametrize("lane", list(LANES), ids=list(LANES))
def versions(session: nox.Session, lane: str) -> None:
    """Run the slice with one library at another version."""
    _share(session)
    if LANES[lane]:
        session.install("--no-build-isolation", *LANES[lane], f"torch=={_installed('torch')}")
    _test(session, lane)


@nox.session
@nox.parametrize("torch", TORCH)
def torch(session: nox.Session, torch: str) -> None:
    """Run the slice with another torch, which pip takes from wherever it is told to."""
    _share(session)
    session.install(f"torch=={torch}")
    _test(session, f"torch-{torch}")


def _share(session: nox.Session) -> None:
    """Let the session import what is installed where nox runs; its own packages come first."""
    paths = sysconfig.get_paths(vars={"base": session.virtualenv.location})
    folder = Path(paths["purelib"])
    folder.joinpath("shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")


def _installed(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def _test(session: nox.Session, lane: str) -> None:
    """Run the slice; its junit file is what `python -m tests.version_lanes` makes the table of."""
    environment = {"PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}
    result = RESULTS / f"{lane}.xml"
    session.run(
        "python", "-m", "pytest", "-q", SLICE, f"--junitxml={result}", *session.posargs, env=environment
    )
