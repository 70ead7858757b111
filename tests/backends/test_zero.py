"""Locks that killed builds left, and what the fork server imports for DeepSpeed's ranks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.libraries.facts import CPU_ADAM
from harness.backends.presets import takes_bf16_optimizer
from harness.backends.zero import preload as zero_preload
from harness.backends.zero.extension_builds import QUIET_SECONDS, abandoned_seconds, build_folder, unmet_build

pytestmark = pytest.mark.long(seconds=10)
TWO = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = build_folder(CPU_ADAM) / "lock"
    assert path.is_relative_to(tmp_path)
    path.touch()
    age(path)
    return path


def age(lock: Path) -> None:
    old = time.time() - 3 * QUIET_SECONDS
    for path in (lock, lock.parent):
        os.utime(path, (old, old))


def test_a_lock_left_behind_is_named_with_its_age_and_what_to_do(lock: Path) -> None:
    backend = registry.create("zero2:offload=optimizer,adam=deepspeed")
    (reason,) = registry.unmet_requirements(backend, TWO)
    assert str(lock) in reason
    assert "is 6 min old" in reason
    assert "remove it" in reason
    lock.unlink()
    assert registry.unmet_requirements(backend, TWO) == []


def test_another_accelerator_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("cuda", ["DS_ACCELERATOR=cuda is set, and ranks are on cpu: unset it"]), ("cpu", [])):
        monkeypatch.setenv("DS_ACCELERATOR", name)
        for backend in ("zero2", "accelerate-zero3"):
            assert registry.unmet_requirements(registry.create(backend), TWO) == why
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert registry.unmet_requirements(registry.create("ddp"), TWO) == []


def test_a_lock_that_a_build_holds_is_left_alone(lock: Path) -> None:
    lock.unlink()
    hold = "import sys, os; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        builder.stdout.readline()
        age(lock)
        assert abandoned_seconds(lock) is None
        builder.stdin.close()
    assert abandoned_seconds(lock) == pytest.approx(3 * QUIET_SECONDS, abs=30)


def test_a_folder_that_changes_may_be_a_build_elsewhere(lock: Path) -> None:
    (lock.parent / "cpu_adam.o").touch()
    assert unmet_build(CPU_ADAM) == []


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unmet_build(CPU_ADAM) == [
        "DeepSpeed compiles its extension cpu_adam with ninja and c++, not found here"
    ]


@pytest.mark.parametrize(
    ("stage", "precision", "offload", "taken"),
    [
        (1, "bf16-mixed", "none", True), (1, "bf16", "none", True), (1, "bf16", "cpu", False),
        (1, "fp16-mixed", "none", False), (2, "bf16", "none", False),
    ],
)  # fmt: skip
def test_stage_1_takes_another_optimizer_for_bf16_that_is_added_up_in_fp32(
    stage: int, precision: str, offload: str, taken: bool
) -> None:
    assert takes_bf16_optimizer(stage, precision, "fp32", offload) is taken
    assert not takes_bf16_optimizer(stage, precision, "bf16", offload)


def test_what_is_compiled_before_ranks_start_follows_from_the_options() -> None:
    def of(label: str) -> tuple[str, ...]:
        return registry.parse(label)[1].extensions()

    assert of("zero2:offload=optimizer,adam=deepspeed") == (CPU_ADAM,)
    assert of("zero2:adam=deepspeed") == of("zero3:offload=cpu") == of("fsdp") == ()


def doubled(value: int) -> int:
    return 2 * value


def test_a_function_is_compiled_once_and_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []

    def compile_(function: Callable[[int], int], **settings: Any) -> Callable[[int], int]:
        made.append((function, settings))
        return lambda value: function(value) + 1

    monkeypatch.setattr(zero_preload, "COMPILE", compile_)
    deferred = zero_preload.at_first_call(doubled, dynamic=True)
    assert made == []
    assert (deferred(2), deferred(3), deferred.__name__) == (5, 7, "doubled")
    assert made == [(doubled, {"dynamic": True})]


@pytest.mark.costly
def test_torch_s_compiler_is_not_imported_for_deepspeed_alone() -> None:
    code = (
        "import sys, torch; before = torch.compile; import harness.backends.zero.preload; "
        "import deepspeed.runtime.engine; assert torch.compile is before; "
        "assert 'deepspeed.runtime.zero.muon.original_muon' in sys.modules; "
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
