"""Weights that a strategy starts from, the memory that loading them takes, and their digests."""

import hashlib
import math
import sys
from pathlib import Path

import pytest
from torch import Tensor

from harness.backends.model_source import AskedLoading
from harness.forms.layout import elements
from harness.plan.prediction import loading_bytes
from harness.plan.scenario import Scenario, job_model
from harness.rank.probes.weights import content_sum, sketch
from harness.record.run import DIGEST_KIND
from tests.contract.cases import Case
from tests.contract.deeds import LOADED, LOADINGS
from tests.contract.loading import MODELS, NAMES, setup_job, tensors
from tests.contract.ranks import on_ranks
from tests.representatives import COSTLY, EXHAUSTIVE, first

pytestmark = pytest.mark.long(seconds=30)
SHARDING = [
    ("fsdp", 2), ("fsdp-hybrid", 4), ("fsdp1", 2), ("fsdp1-hybrid-grad-op", 4), ("zero3", 2), ("fsdp", 3),
]  # fmt: skip
FEW = [("fsdp", 3), ("fsdp1", 2), ("zero3", 2)]
"""Each library's; of hybrids the clean matrix sees that they train from the same weights."""
FEW_LOADED = [LOADED[0], LOADED[3]]


@pytest.mark.parametrize(
    ("name", "ranks", "cases"),
    [
        *((*case, FEW_LOADED) for case in FEW),
        *(pytest.param(*case, LOADED, marks=EXHAUSTIVE) for case in SHARDING),
    ],
)
def test_slices_equal_the_whole_model(name: str, ranks: int, cases: list[Case], tmp_path: Path) -> None:
    for per_rank in on_ranks("load", name, ranks, tmp_path, *cases):
        for per_case in per_rank:
            assert [said for said, *_ in per_case] == list(LOADINGS)
            whole = per_case[0][1:]
            assert all(loaded[1:] == whole for loaded in per_case)


@pytest.mark.parametrize("name", first(["zero2"], ["ddp", "zero2", "fsdp1-no-shard"]))
def test_a_strategy_that_holds_the_whole_model_builds_it(name: str, tmp_path: Path) -> None:
    for per_rank in on_ranks("load", name, 2, tmp_path, *FEW_LOADED):
        assert {said for per_case in per_rank for said, *_ in per_case} == {"full"}


AT_SETUP = "tests.contract.loading:measure_setup"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")


@ON_LINUX
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp", "fsdp1", "zero3"])
def test_a_digest_needs_one_unit_and_a_copy(name: str, tmp_path: Path) -> None:
    for rank in on_ranks(AT_SETUP, name, 2, tmp_path, "slices", "blocks"):
        assert rank.digest_peak <= 2 * rank.block + rank.parameters / 10


MOST = 1.05
FIRST_LOADED: list[tuple[str, AskedLoading, str]] = [
    ("fsdp", "slices", "blocks"), ("fsdp", "full", "blocks"), ("zero1", "slices", "blocks"),
]  # fmt: skip
FURTHER: list[tuple[str, AskedLoading, str]] = [
    ("fsdp", "broadcast", "blocks"), ("fsdp", "slices", "embedding"), ("fsdp", "full", "embedding"),
    ("fsdp:offload=cpu", "slices", "blocks"), ("fsdp1", "slices", "blocks"), ("fsdp1", "full", "blocks"),
    ("zero3", "slices", "blocks"), ("zero3", "full", "blocks"), ("accelerate-zero3", "slices", "blocks"),
    ("ddp", "slices", "blocks"), ("pp", "slices", "blocks"),
]  # fmt: skip
"""Whole, the first model has 208 MB, the second 147 and a tied output layer."""


def planned(label: str, loading: AskedLoading, model: str) -> Scenario:
    job = setup_job(MODELS[model][0])
    found = Scenario.of(
        label, job_model(job), job, world_size=2, ranks_per_node=2, preset="like-for-like",
        micro_batch_size=2, accumulation_steps=1, loading=loading, torch_device="cpu",
    )  # fmt: skip
    assert found is not None
    return found


@ON_LINUX
@pytest.mark.parametrize(
    ("label", "loading", "model"),
    [
        *(pytest.param(*case, marks=COSTLY) for case in FIRST_LOADED),
        *(pytest.param(*case, marks=EXHAUSTIVE) for case in FURTHER),
    ],
)
def test_ranks_that_load_hold_the_least_and_at_most_one_unit_more(
    label: str, loading: AskedLoading, model: str, tmp_path: Path
) -> None:
    plan = planned(label, loading, model)
    layout = plan.model.layout
    units = [elements(tensors) for name, tensors in layout.units() if name]
    least, unit = loading_bytes(plan) / 2, 4 * max(*units, *(one.numel for one in layout.parameters))
    in_step = sum(plan.held_states.values())
    for rank in on_ranks(AT_SETUP, label, 2, tmp_path, loading, model):
        assert least <= rank.loading_peak <= MOST * (least + unit)
        assert rank.added_peak <= MOST * max(least + unit, in_step)


LOADING = "tests.contract.loading"


def expected(held: dict[str, Tensor]) -> str:
    lines = [
        f"{name} {tuple(tensor.shape)} {content_sum(name, tensor.view(-1), 0):016x}"
        for name, tensor in held.items()
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() + DIGEST_KIND


@pytest.mark.parametrize("ranks", first([2], [1, 2, 4]))
def test_digest_shared_over_ranks_is_that_of_one(ranks: int, tmp_path: Path) -> None:
    held = tensors()
    for part in on_ranks(f"{LOADING}:of_equal_ranks", "ddp", ranks, tmp_path):
        assert part.digest == expected(held)
        assert part.parameter_count == sum(tensor.numel() for tensor in held.values())
        assert part.sketch == {name: sketch(name, held[name]) for name in NAMES}
        assert list(part.sketch) == list(NAMES)
        assert part.l2_norm == pytest.approx(math.sqrt(sum(float((t**2).sum()) for t in held.values())))


@pytest.mark.parametrize("ranks", first([4], [2, 4]))
def test_digest_of_shards_is_that_of_the_whole(ranks: int, tmp_path: Path) -> None:
    held = tensors()
    for part in on_ranks(f"{LOADING}:of_shards", "ddp", ranks, tmp_path):
        assert part.digest == expected(held)
        assert part.sketch is not None
        for name, tensor in held.items():
            assert part.sketch[name] == pytest.approx(sketch(name, tensor))


def test_elements_that_no_rank_lists_are_an_error(tmp_path: Path) -> None:
    for message in on_ranks(f"{LOADING}:of_missing_elements", "ddp", 2, tmp_path):
        assert "the ranks' ranges of embed are not its 21 elements: 0 to 11, 11 to 20" in message


def test_each_rank_tells_its_own_weights_where_they_differ(tmp_path: Path) -> None:
    first, second = on_ranks(f"{LOADING}:of_a_rank_that_differs", "ddp", 2, tmp_path)
    assert first.digest == expected(tensors())
    assert second.digest == expected(tensors(differing=0.5))


EVALUATED = ("ddp", "zero3", "fsdp", "fsdp-grad-op", "fsdp1-grad-op", "pp")


@pytest.mark.parametrize("name", first(["zero3", "fsdp1-grad-op"], EVALUATED))
def test_evaluation_leaves_the_full_weights_as_they_are(name: str, tmp_path: Path) -> None:
    assert on_ranks("evaluate", name, 2, tmp_path) == [0.0, 0.0]
