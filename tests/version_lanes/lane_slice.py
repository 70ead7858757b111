"""The fixed slice of tests that every lane of versions runs; pytest collects it only where it is named."""

from collections.abc import Iterator
from importlib.metadata import version
from itertools import product

import pytest

from harness.backends.libraries.facts import fact
from tests.traps.matrix import Matrix, planted_matrix
from tests.traps.planted import BF16, TIED, UNCLIPPED

CONTRACT = ("ddp", "zero2", "zero3", "fsdp", "accelerate-zero3", "trainer-ddp")
LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "peft")


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property) -> dict[str, str]:
    found = {name: version(name) for name in LIBRARIES}
    for name, value in found.items():
        record_testsuite_property(name, value)
    return found


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with planted_matrix(tmp_path_factory.mktemp("traps")) as matrix:
        yield matrix


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, matrix: Matrix) -> None:
    """Losses, norms and weights of jobs on 2 ranks equal one process's, but for faults that are known."""
    known = name == "zero2" and fact("zero2-loses-micro-steps").includes(version("deepspeed"))
    for micro_steps, tied in product((1, 2), (TIED, TIED.replace("true", "false"))):
        settings = (tied, f"training.accumulation_steps={micro_steps}", "training.gradient_clipping=0.5")
        (row,) = (row for row in matrix.compare([name], 2, settings).rows if row.label == name)
        if row.record.status == "unsupported":
            pytest.skip(f"unsupported: {'; '.join(row.record.reasons)}")
        assert row.record.status == "ok", row.record.error
        differs = row.judgement.parity not in ("exact", "tight")
        assert differs is (known and micro_steps > 1), (settings, row.judgement)


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
