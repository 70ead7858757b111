"""What DeepSpeed cannot do with weights in files is named before ranks fail."""

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.backends import registry
from harness.backends.base import World
from harness.backends.model.swapped_weights import COUNT, locked_bytes, mapped, weight_buffers
from harness.backends.options import Zero3Options
from harness.backends.refusals import Unsupported

TWO = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")
RELEASED = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
MEBIBYTE = 1024**2


def buffers(zero: dict = RELEASED, **options: object) -> dict[str, int]:
    """Of a model whose pieces on 2 ranks take 3 MiB, 1 MiB less 4 bytes and 2 MiB in fp32."""
    with torch.device("meta"):
        layers = [nn.Linear(width, 2, bias=False) for width in (3 * MEBIBYTE // 4, MEBIBYTE // 4 - 1)]
        model = nn.Sequential(*layers, nn.Bilinear(MEBIBYTE // 4, 1, 2, bias=True))
    return weight_buffers(model, Zero3Options(offload="nvme-all", **options), zero, 2, 4)  # type: ignore[arg-type]


def test_buffers_hold_the_largest_piece_unless_more_is_asked() -> None:
    assert buffers() == {"buffer_count": COUNT, "buffer_size": 3 * MEBIBYTE // 4}
    assert buffers(buffer_count=7, buffer_size=10**6) == {"buffer_count": 7, "buffer_size": 10**6}
    with pytest.raises(Unsupported, match=r"buffer_size=786431 does not hold .* give 786432 or more"):
        buffers(buffer_size=3 * MEBIBYTE // 4 - 1)


def test_a_module_needs_a_buffer_for_each_of_its_weights() -> None:
    with torch.device("meta"):
        model = nn.MultiheadAttention(1024, 1, kdim=1024, vdim=1025, bias=False)  # three matrices of its own
    given = Zero3Options(offload="nvme-all", buffer_count=2)
    with pytest.raises(Unsupported, match=r"gathers 3 weights .* give buffer_count=3 or more"):
        weight_buffers(model, given, RELEASED, 2, 4)
    assert weight_buffers(model, given, RELEASED, 2, 1)["buffer_count"] == 2


@pytest.mark.parametrize(
    "zero", [{}, {"stage3_max_reuse_distance": 0}, RELEASED | {"stage3_max_reuse_distance": 1}]
)
def test_weights_that_stay_gathered_would_keep_their_buffers(zero: dict) -> None:
    with pytest.raises(Unsupported, match="Not enough buffers"):
        buffers(zero)


def test_without_prefetch_weights_may_be_live() -> None:
    assert buffers({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0})


def test_what_would_be_ignored_or_crash_is_refused() -> None:
    (reason,) = registry.unmet_requirements(registry.create("zero3:buffer_count=2,buffer_size=9"), TWO)
    assert reason.startswith("buffer_count and buffer_size: without offload=nvme-all")
    four = World(rank=0, world_size=4, local_rank=0, ranks_per_node=4, device="cpu")
    (reason,) = registry.unmet_requirements(registry.create("zero3:offload=nvme-all,hpz=2"), four)
    assert "second copy where the weights lie" in reason


def test_locked_memory_counts_aligned_buffers_and_whole_weights() -> None:
    settings = {"buffer_count": 2, "buffer_size": 257}
    assert locked_bytes(settings, [[10], [256, 1]], 4, 4) == 2 * 2048 + 4096 + 1024


def test_a_mapped_tensor_leaves_no_file(tmp_path: Path) -> None:
    first, second = (mapped(tmp_path, 1000, torch.bfloat16) for _ in range(2))
    first.fill_(3)
    assert not second.any()
    assert list(tmp_path.iterdir()) == []
