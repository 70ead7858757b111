import pytest

from harness.record import LayoutPart, TensorPart
from harness.theory.memory import Setting
from harness.theory.memory.gathered import most_gathered_bytes


def setting(ranks: int, *tensors: tuple[str, list[int]]) -> Setting:
    parts = [TensorPart(name=name, shape=shape, dtype="float32") for name, shape in tensors]
    layout = LayoutPart(parameters=parts, decaying=[], buffers=[], blocks=["h.0", "h.1", "h.2"])
    return Setting(layout=layout, backend="fsdp", precision="fp32", preset="like-for-like", world_size=ranks)


BLOCKS = (("h.0.w", [8, 4]), ("h.1.w", [16, 4]), ("h.2.w", [4, 4]))


@pytest.mark.parametrize(("blocks", "elements"), [(1, 40 + 64), (2, 40 + 64 + 32), (9, 40 + 64 + 32 + 16)])
def test_the_root_and_the_largest_blocks(blocks: int, elements: int) -> None:
    units = 1 + min(blocks, 3)
    on_two = most_gathered_bytes(setting(2, ("embedding", [10, 4]), *BLOCKS), 4, blocks)
    assert on_two == (elements + 2 * units) * 4


def test_rows_are_padded_to_the_ranks_and_scalars_aligned() -> None:
    held = most_gathered_bytes(setting(4, ("embedding", [5, 4]), ("scale", []), ("h.0.w", [])), 2, 1)
    assert held == (8 * 4 + 8 + 4 + 8 + 4) * 2


def test_a_model_without_a_root() -> None:
    assert most_gathered_bytes(setting(2, *BLOCKS), 4, 1) == (64 + 2) * 4
