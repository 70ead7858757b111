"""Prefetch options reach FSDP, and what is in force is read back into the record."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.command_line import SHORT, succeeds
from tests.representatives import EXHAUSTIVE

DEFAULT_FSDP1 = {
    "forward_prefetch": False, "backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        pytest.param(
            "fsdp", {"forward_prefetch": "implicit", "backward_prefetch": "implicit"}, marks=EXHAUSTIVE
        ),
        ("fsdp:prefetch=1", {"forward_prefetch": 1, "backward_prefetch": 1}),
        pytest.param("fsdp1", DEFAULT_FSDP1, marks=EXHAUSTIVE),
        (
            "fsdp1:forward_prefetch=true,backward_prefetch=none,limit_all_gathers=false",
            {"forward_prefetch": True, "backward_prefetch": "none", "limit_all_gathers": False},
        ),
    ],
)
def test_settings_in_force_are_recorded(label: str, expected: dict[str, Any], tmp_path: Path) -> None:
    done = succeeds("run", "--backend", label, "--nproc", "1", *SHORT, "--json", cwd=tmp_path)
    details = json.loads(done.stdout)["backend"]["effective"]["details"]
    assert {name: details[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("preset", "ahead"), [("like-for-like", "none"), ("library-defaults", "50000000 elements")]
)
def test_zero3_says_what_it_really_gathers_ahead(preset: str, ahead: str, tmp_path: Path) -> None:
    """Its bucket for it is 50000000 elements in both, but like for like it may keep none live."""
    preset = f"runtime.preset={preset}"
    options = ("--backend", "zero3", "--nproc", "1", "--set", preset, "--json")
    done = succeeds("run", *options, *SHORT, cwd=tmp_path)
    assert json.loads(done.stdout)["backend"]["effective"]["prefetch"] == ahead
