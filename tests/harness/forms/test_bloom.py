"""Against the published size of BLOOM-560M: figures by arithmetic, not by any run."""

import pytest

from harness.backends.registry import BUILT_IN
from harness.forms.terms import GRADIENTS, STEP_PHASES, Collective
from harness.forms.textbook import term_differences, textbook_collectives, textbook_sent_bytes
from harness.forms.workload import Workload
from tests.built_in import DATA_PARALLEL
from tests.geometries import bloom_560m, bloom_workload, under, volume_of

PARAMETERS = 559_214_592


def sent(backend: str, workload: Workload) -> float:
    volume = volume_of(backend, workload)
    return sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in STEP_PHASES)


def textbook_of(backend: str, workload: Workload, weight_dtype: str = "float32") -> list[Collective]:
    given = under(backend, workload)
    return textbook_collectives(given, weight_dtype=weight_dtype, reduce_dtype="float32")


def test_the_geometry_has_the_published_number_of_parameters() -> None:
    assert sum(t.numel for t in bloom_560m()) == PARAMETERS


@pytest.mark.parametrize(
    ("backend", "precision", "gigabytes"),
    [
        ("ddp", "fp32", 3.915),
        ("ddp", "bf16", 1.957),
        ("zero3", "bf16", 2.936),
        ("fsdp", "bf16-mixed", 3.915),  # gathers bf16, reduces fp32: as much as DDP in fp32
        ("fsdp-grad-op", "fp32", 3.915),
        ("zero0", "fp32", 3.915),
    ],
)
def test_bytes_sent_on_eight_ranks(backend: str, precision: str, gigabytes: float) -> None:
    workload = bloom_workload(world_size=8, precision=precision)
    assert round(sent(backend, workload) / 1e9, 3) == gigabytes


def test_zero_1_sends_one_and_a_half_times_the_textbook() -> None:
    workload = bloom_workload(world_size=8)
    textbook = textbook_sent_bytes("grad-op", PARAMETERS, 8, weight_bytes=4, reduce_bytes=4)
    assert textbook is not None
    assert sent("zero1", workload) / textbook == pytest.approx(1.5, rel=1e-6)


def test_zero_2_reduces_in_every_micro_step_and_zero_1_does_not() -> None:
    workload = bloom_workload(accumulation_steps=4)
    difference = sent("zero2", workload) - sent("zero1", workload)
    assert difference == 3 * PARAMETERS * 4


@pytest.mark.parametrize("backend", sorted(DATA_PARALLEL))
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_terms_explain_the_whole_difference_to_the_textbook(
    backend: str, accumulation_steps: int, precision: str
) -> None:
    strategy = BUILT_IN[backend].strategy
    assert strategy is not None
    workload = bloom_workload(
        world_size=8,
        shard_size=4 if strategy.sharding == "hybrid" else 8,
        precision=precision,
        accumulation_steps=accumulation_steps,
    )
    volume = volume_of(backend, workload)
    weights = "float32" if precision == "fp32" or strategy.family == "ddp" else "bfloat16"
    textbook = textbook_of(backend, workload, weights)
    given = textbook_sent_bytes(
        strategy.sharding, PARAMETERS, 8, weight_bytes=4 if weights == "float32" else 2, reduce_bytes=4,
        shard_size=workload.shard_size,
    )  # fmt: skip
    assert sum(c.sent_bytes(workload) for c in textbook) == pytest.approx(given, abs=1)
    terms = term_differences(workload, volume, textbook)
    explained = sum(term.difference for term in terms)
    assert explained == pytest.approx(sent(backend, workload) - (given or 0), abs=1)
    assert all(term.remark for term in terms), [term.term for term in terms if not term.remark]


def test_only_the_norm_separates_fsdp_from_the_textbook_on_this_geometry() -> None:
    workload = bloom_workload(world_size=8)
    terms = term_differences(workload, volume_of("fsdp", workload), textbook_of("fsdp", workload))
    assert [(term.term, term.difference) for term in terms] == [("gradient norm", 14.0)]


def test_zero_1_owes_its_excess_to_the_all_reduce() -> None:
    workload = bloom_workload(world_size=8)
    found = term_differences(workload, volume_of("zero1", workload), textbook_of("zero1", workload))
    terms = {t.term: t for t in found}
    assert terms[GRADIENTS].difference == PARAMETERS * 4 * 7 / 8
    assert "all-reduces" in terms[GRADIENTS].remark
