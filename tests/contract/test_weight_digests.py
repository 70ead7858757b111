import hashlib
import math
from pathlib import Path

import pytest
from torch import Tensor

from harness.rank.probes.weights import content_sum, sketch
from harness.record.run import DIGEST_KIND
from tests.contract.ranks import on_ranks
from tests.contract.weight_digests import NAMES, tensors
from tests.representatives import first

MODULE = "tests.contract.weight_digests"


def expected(held: dict[str, Tensor]) -> str:
    lines = [
        f"{name} {tuple(tensor.shape)} {content_sum(name, tensor.view(-1), 0):016x}"
        for name, tensor in held.items()
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() + DIGEST_KIND


@pytest.mark.parametrize("ranks", first([2], [1, 2, 4]))
def test_digest_shared_over_ranks_is_that_of_one(ranks: int, tmp_path: Path) -> None:
    held = tensors()
    for part in on_ranks(f"{MODULE}:of_equal_ranks", "ddp", ranks, tmp_path):
        assert part.digest == expected(held)
        assert part.parameter_count == sum(tensor.numel() for tensor in held.values())
        assert part.sketch == {name: sketch(name, held[name]) for name in NAMES}
        assert list(part.sketch) == list(NAMES)
        assert part.l2_norm == pytest.approx(math.sqrt(sum(float((t**2).sum()) for t in held.values())))


@pytest.mark.parametrize("ranks", first([4], [2, 4]))
def test_digest_of_shards_is_that_of_the_whole(ranks: int, tmp_path: Path) -> None:
    held = tensors()
    for part in on_ranks(f"{MODULE}:of_shards", "ddp", ranks, tmp_path):
        assert part.digest == expected(held)
        assert part.sketch is not None
        for name, tensor in held.items():
            assert part.sketch[name] == pytest.approx(sketch(name, tensor))


def test_elements_that_no_rank_lists_are_an_error(tmp_path: Path) -> None:
    for message in on_ranks(f"{MODULE}:of_missing_elements", "ddp", 2, tmp_path):
        assert "the ranks' ranges of embed are not its 21 elements: 0 to 11, 11 to 20" in message


def test_each_rank_tells_its_own_weights_where_they_differ(tmp_path: Path) -> None:
    first, second = on_ranks(f"{MODULE}:of_a_rank_that_differs", "ddp", 2, tmp_path)
    assert first.digest == expected(tensors())
    assert second.digest == expected(tensors(differing=0.5))
