"""Prefetch options reach FSDP, and what is in force is read back into the record."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.command_line import SHORT, harness

DEFAULT_FSDP1 = {
    "forward_prefetch": False, "backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("fsdp", {"forward_prefetch": "implicit", "backward_prefetch": "implicit"}),
        ("fsdp:prefetch=1", {"forward_prefetch": 1, "backward_prefetch": 1}),
        ("fsdp1", DEFAULT_FSDP1),
        (
            "fsdp1:forward_prefetch=true,backward_prefetch=none,limit_all_gathers=false",
            {"forward_prefetch": True, "backward_prefetch": "none", "limit_all_gathers": False},
        ),
    ],
)
def test_settings_in_force_are_recorded(label: str, expected: dict[str, Any], tmp_path: Path) -> None:
    done = harness("run", "--backend", label, "--nproc", "1", *SHORT, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    details = json.loads(done.stdout)["backend"]["effective"]["details"]
    assert {name: details[name] for name in expected} == expected
