"""The fixed slice of tests that every lane of versions runs; pytest collects it only where it is named."""

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from harness.backends import registry
from harness.backends.base import World
from harness.backends.libraries.facts import fact
from tests.contract.deeds import CASES
from tests.contract.ranks import traces
from tests.contract.test_contract import violations
from tests.traps.matrix import Matrix, planted_matrix
from tests.traps.planted import BF16, UNCLIPPED

CONTRACT = ("ddp", "zero2", "zero3", "fsdp", "accelerate-zero3", "trainer-ddp")
LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "peft")


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property) -> dict[str, str]:
    found = {name: version(name) for name in LIBRARIES}
    for name, value in found.items():
        record_testsuite_property(name, value)
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list:
    return traces(registry.REFERENCE, 1, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with planted_matrix(tmp_path_factory.mktemp("traps")) as matrix:
        yield matrix


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, reference: list, tmp_path) -> None:
    """Losses, norms and weights of 8 cases on 2 ranks equal one process's, but for faults that are known."""
    world = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")
    if reasons := registry.create(name).unmet_requirements(world):
        pytest.skip(f"unsupported: {'; '.join(reasons)}")
    known = name == "zero2" and fact("zero2-loses-micro-steps").includes(version("deepspeed"))
    found = {
        case.name: broken
        for case, expected, trace in zip(CASES["trained"], reference, traces(name, 2, tmp_path), strict=True)
        if (broken := violations(expected, trace, case))
    }
    affected = {case.name for case in CASES["trained"] if case.accumulation_steps > 1} if known else set()
    assert set(found) == affected, found


def test_default_clipping(matrix: Matrix) -> None:
    """DeepSpeed left to its default in a job without clipping: a difference exactly where versions clip."""
    findings = matrix.findings(["zero1:default_clipping=true"], 2, (UNCLIPPED,))
    named = [f for f in findings if f.id == "clipping-differs"]
    assert bool(named) is fact("zero-clips-by-default").includes(version("deepspeed")), findings


def test_zero0_bf16(matrix: Matrix) -> None:
    """Stage 0 in bf16 departs from one process exactly where the fault is known, and is named there."""
    comparison = matrix.compare(["zero0"], 2, (BF16,))
    (row,) = (row for row in comparison.rows if row.label == "zero0")
    assert row.record.status == "ok", row.record.error
    named = [f for f in comparison.findings if f.id == "faulty-version"]
    known = fact("zero0-bf16-scales-gradients").includes(version("deepspeed"))
    assert bool(named) is known
    assert (row.judgement.parity == "diverged") is known, row.judgement
