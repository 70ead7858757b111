"""`harness doctor`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.backends import registry
from harness.backends.libraries import facts
from harness.cli import doctor
from harness.doctor import self_check
from tests.forkserver import launcher
from tests.representatives import first

from .command_line import harness


def called(*options: str) -> tuple[int, str]:
    done = harness("doctor", *options, cwd=Path.cwd())
    return done.returncode, done.stdout or done.stderr


def test_without_torch_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher()  # needs torch, also where this is the process's first test
    monkeypatch.setattr(facts, "installed_version", {"transformers": "5.23"}.get)
    code, said = called()
    assert code == 1
    assert said == (
        "harness: torch is not installed, which ranks need: pip install 'sharding-harness[train]'\n"
    )


def test_an_unknown_backend_is_one_line() -> None:
    code, said = called("--backends", "zero4")
    assert code == 1
    assert "backend 'zero4' is unknown" in said.splitlines()[0]


@pytest.mark.parametrize("ranks", first([2], [1, 2]))
@pytest.mark.costly
def test_an_installation_that_can_be_trusted(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as one backend: three planted defects are found on one rank as on two."""
    monkeypatch.setattr(doctor, "RANKS", ranks)
    code, said = called("--backends", "fsdp")
    assert code == 0, said
    assert "3 of 3 injected faults found" in said
    assert "deepspeed: clips gradients at 1.0" in said
    assert said.splitlines()[-1].startswith("this installation can be trusted")
    assert ("reduction and sharding over ranks" in said) == (ranks == 1)


@pytest.mark.costly
def test_a_broken_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = called("--backends", "planted-divided-again")
    assert code == 1
    assert "- gradient-scale: planted-divided-again on 2 ranks: all gradients x 0.5" in said
    assert said.splitlines()[-1] == "this installation cannot be trusted until these are resolved"


@pytest.mark.costly
def test_a_missing_library_is_named_and_the_rest_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.package_versions

    def without_deepspeed(extra: tuple[str, ...]) -> dict[str, str]:
        return {name: version for name, version in real(extra).items() if name != "deepspeed"}

    monkeypatch.setattr(doctor, "package_versions", without_deepspeed)
    code, said = called("--backends", "ddp,zero3")
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("zero3")]
    assert "deepspeed is not installed (pip install deepspeed)" in line
    assert (
        said.splitlines()[-1]
        == "this installation can be trusted, as far as it was tried: 1 line above was not"
    )


@pytest.mark.costly
def test_what_two_minutes_do_not_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "BUDGET_SECONDS", 0.0)
    only_ddp = {
        name: replace(entry, in_short_check=name == "ddp") for name, entry in registry.BUILT_IN.items()
    }
    monkeypatch.setattr(registry, "BUILT_IN", only_ddp)
    code, said = called("--json")
    document = json.loads(said)
    assert code == 0, document["self_check"]
    ran = {backend["name"] for backend in document["backends"]}
    assert ran == {"single", "ddp"}
    assert "two minutes" in document["not_covered"]["fsdp1"]


@pytest.mark.exhaustive
@pytest.mark.long(seconds=15)
def test_this_installation_can_be_trusted() -> None:
    code, text = called("--json")
    said = json.loads(text)
    assert said["trusted"], said["self_check"]
    assert code == 0
    assert {b["name"] for b in said["backends"] if b["status"] == "ok"} >= {"ddp", "zero3", "fsdp"}
