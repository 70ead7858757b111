"""What NVMe offload needs of the machine is named before anything waits or crashes."""

import resource
from pathlib import Path

import pytest
import torch

from harness.backends import registry
from harness.backends.base import World
from harness.backends.refusals import Unsupported
from harness.backends.zero import extension_builds, swapping

TWO = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")


def reasons(label: str) -> list[str]:
    return registry.unmet_requirements(registry.create(label), TWO)


def test_without_libaio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_builds, "LIBRARY", "libnothing.so.1")
    (reason,) = reasons("zero3:offload=nvme")
    assert "libnothing.so.1" in reason
    assert "install libaio-dev" in reason


def test_without_the_header_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extension_builds, "HEADER", "nothing.h")
    monkeypatch.setattr(extension_builds, "load_libaio", lambda: None)
    (reason,) = reasons("zero3:offload=nvme")
    assert "with nothing.h, not found here" in reason


@pytest.mark.parametrize("where", ["nvme", "nvme-all"])
@pytest.mark.parametrize("backend", ["zero2", "accelerate-zero3", "ulysses-zero3"])
def test_others_refuse_it(backend: str, where: str) -> None:
    (reason,) = reasons(f"{backend}:offload={where}")
    assert "zero3" in reason or "stage 3 only" in reason


def test_buffers_that_may_not_be_locked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (7999, 7999))
    monkeypatch.setattr(swapping.os, "geteuid", lambda: 1000)
    with pytest.raises(Unsupported, match=r"locks 8,000 bytes of memory .* may lock 7,999"):
        swapping.require_lockable([[20], [300, 200]])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8000, 8000))
    swapping.require_lockable([[20], [300, 200]])
    with pytest.raises(Unsupported, match="locks 8,001 bytes"):
        swapping.require_lockable([[20], [300, 200]], 1)


def test_a_sub_group_closes_at_its_size() -> None:
    groups = [{"params": [torch.empty(count) for count in (100, 61, 300, 8)]}, {"params": [torch.empty(5)]}]
    assert swapping.sub_groups_of(groups, 2, 10**9) == [[50, 31, 150, 4], [3]]
    assert swapping.sub_groups_of(groups, 2, 80) == [[50, 31], [150], [4], [3]]
    assert swapping.sub_groups_of(groups, 2, 1) == [[50], [31], [150], [4], [3]]


def test_gradients_that_would_be_lost_are_refused() -> None:
    large = swapping.LEAST_BYTES // 4
    with pytest.raises(Unsupported, match=r"lose gradients.* begin 1,049,344 bytes into .* sub_group_size=1"):
        swapping.require_aligned([[large], [large + 192, large]])
    swapping.require_aligned([[large], [large + 128, large]])
    swapping.require_aligned([[large + 192], [large]])
    swapping.require_aligned([[large, 3, large - 1]])  # what is smaller than a mebibyte stays in memory


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="nothing-there cannot be written"):
        swapping.swap_folder(str(tmp_path / "nothing-there"))
