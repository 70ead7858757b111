"""`harness backends`."""

import json
from pathlib import Path

import pytest

from tests.plugins import register
from tests.representatives import first

from .command_line import harness, harness_process


def test_backends_are_listed_as_one_document(tmp_path: Path) -> None:
    done = harness("backends", "--json", cwd=tmp_path)
    listed = {backend["name"]: backend for backend in json.loads(done.stdout)["backends"]}
    assert {"single", "ddp", "zero3", "fsdp"} <= set(listed)
    assert "offload" in listed["zero3"]["options"]


@pytest.mark.parametrize("target", first(["json:dumps"], ["no_such_module:Mine", "json:dumps"]))
def test_a_broken_third_party_does_not_hide_the_others(tmp_path: Path, target: str) -> None:
    register(tmp_path, {"broken": target})
    done = harness_process("backends", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout
    assert "broken" in done.stdout + done.stderr


def test_what_is_not_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    listed = json.loads(harness("backends", "--json", cwd=tmp_path).stdout)["not_run"]
    reasons = {feature["name"]: feature["reason"] for feature in listed}
    assert "scrambles the model" in reasons["ZenFlow"]
    assert "removed from DeepSpeed" in reasons["MiCS"]
    shown = harness("backends", cwd=tmp_path).stdout
    assert "MiCS removed from DeepSpeed" in " ".join(shown.split())
