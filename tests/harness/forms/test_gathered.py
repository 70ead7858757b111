import pytest

from harness.backends.strategy import StrategyKind
from harness.forms.layout import Layout, Tensor
from harness.forms.peak_memory.families import most_gathered_bytes
from harness.forms.workload import Workload


def workload(ranks: int, *tensors: tuple[str, list[int]]) -> Workload:
    parts = tuple(Tensor(name, tuple(shape), "float32") for name, shape in tensors)
    layout = Layout(parameters=parts, decaying=frozenset(), blocks=("h.0", "h.1", "h.2"))
    strategy = StrategyKind(family="fsdp2", sharding="full-shard")
    return Workload(layout=layout, strategy=strategy, world_size=ranks)


BLOCKS = (("h.0.w", [8, 4]), ("h.1.w", [16, 4]), ("h.2.w", [4, 4]))


@pytest.mark.parametrize(("blocks", "elements"), [(1, 40 + 64), (2, 40 + 64 + 32), (9, 40 + 64 + 32 + 16)])
def test_the_root_and_the_largest_blocks(blocks: int, elements: int) -> None:
    units = 1 + min(blocks, 3)
    on_two = most_gathered_bytes(workload(2, ("embedding", [10, 4]), *BLOCKS), 4, blocks)
    assert on_two == (elements + 2 * units) * 4


def test_rows_are_padded_to_the_ranks_and_scalars_aligned() -> None:
    held = most_gathered_bytes(workload(4, ("embedding", [5, 4]), ("scale", []), ("h.0.w", [])), 2, 1)
    assert held == (8 * 4 + 8 + 4 + 8 + 4) * 2


def test_a_model_without_a_root() -> None:
    assert most_gathered_bytes(workload(2, *BLOCKS), 4, 1) == (64 + 2) * 4
