"""What papers and publications say of bytes, floating-point operations and devices."""

from dataclasses import replace

import pytest

from harness.backends.registry import BUILT_IN
from harness.forms.terms import GRADIENTS, STEP_PHASES, Collective
from harness.forms.textbook import (
    DEVICE_PEAKS,
    ModelGeometry,
    find_peak,
    hardware_flops_per_token,
    least_flops_per_token,
    model_flops_per_token,
    term_differences,
    textbook_collectives,
    textbook_sent_bytes,
    textbook_states,
)
from harness.forms.workload import Workload
from harness.job.job import OptimizerSection
from tests.built_in import DATA_PARALLEL, strategy
from tests.geometries import bloom_workload, under, volume_of

BLOOM_560M = 559_214_592


def sent(backend: str, workload: Workload) -> float:
    volume = volume_of(backend, workload)
    return sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in STEP_PHASES)


def textbook_of(backend: str, workload: Workload, weight_dtype: str = "float32") -> list[Collective]:
    given = under(backend, workload)
    return textbook_collectives(given, weight_dtype=weight_dtype, reduce_dtype="float32")


def test_zero_2_reduces_in_every_micro_step_and_zero_1_does_not() -> None:
    workload = bloom_workload(accumulation_steps=4)
    difference = sent("zero2", workload) - sent("zero1", workload)
    assert difference == 3 * BLOOM_560M * 4


@pytest.mark.parametrize("backend", sorted(DATA_PARALLEL))
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_terms_explain_the_whole_difference_to_the_textbook(
    backend: str, accumulation_steps: int, precision: str
) -> None:
    kind = strategy(backend)
    workload = bloom_workload(
        world_size=8, shard_size=4 if kind.sharding == "hybrid" else 8, precision=precision,
        accumulation_steps=accumulation_steps,
    )  # fmt: skip
    volume = volume_of(backend, workload)
    weights = "float32" if precision == "fp32" or kind.family == "ddp" else "bfloat16"
    textbook = textbook_of(backend, workload, weights)
    given = textbook_sent_bytes(
        kind.sharding, BLOOM_560M, 8, weight_bytes=4 if weights == "float32" else 2, reduce_bytes=4,
        shard_size=workload.shard_size,
    )  # fmt: skip
    assert sum(c.sent_bytes(workload) for c in textbook) == pytest.approx(given, abs=1)
    terms = term_differences(workload, volume, textbook)
    explained = sum(term.difference for term in terms)
    assert explained == pytest.approx(sent(backend, workload) - (given or 0), abs=1)
    assert all(term.remark for term in terms), [term.term for term in terms if not term.remark]


def test_the_norm_separates_fsdp_from_the_textbook_and_the_all_reduce_zero_1() -> None:
    workload = bloom_workload(world_size=8)
    fsdp, zero1 = (
        {t.term: t for t in term_differences(workload, volume_of(of, workload), textbook_of(of, workload))}
        for of in ("fsdp", "zero1")
    )
    assert {name: term.difference for name, term in fsdp.items()} == {"gradient norm": 14.0}
    assert zero1[GRADIENTS].difference == BLOOM_560M * 4 * 7 / 8
    assert "all-reduces" in zero1[GRADIENTS].remark


def gigabytes(backend: str, parameters: float, ranks: int, precision: str = "bf16-mixed") -> float:
    return sum(states_of(backend, int(parameters), ranks, precision).values()) / 1e9


def states_of(backend: str, parameters: int, ranks: int, precision: str) -> dict[str, float]:
    return textbook_states(strategy(backend).stage, parameters, ranks, precision)


@pytest.mark.parametrize(
    ("backend", "published"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9), ("fsdp", 1.9)]
)
def test_figure_1_of_the_zero_paper(backend: str, published: float) -> None:
    assert gigabytes(backend, 7.5e9, 64) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(("precision", "size"), [("fp32", 28e9), ("bf16", 14e9)])
def test_seven_billion_parameters_in_one_precision_throughout(precision: str, size: float) -> None:
    states = states_of("ddp", 7 * 10**9, 1, precision)
    assert states == {"weights": size, "gradients": size, "masters": 0, "optimizer": 2 * size}


@pytest.mark.parametrize(
    ("settings", "moments"), [({}, 2), ({"kind": "sgd"}, 0), ({"kind": "sgd", "momentum": 0.9}, 1)]
)
def test_sgd_keeps_one_momentum_or_nothing(settings: dict, moments: int) -> None:
    assert OptimizerSection.model_validate(settings).moments == moments
    states = textbook_states(0, 10**9, 1, "bf16-mixed", moments=moments)
    assert states == {"weights": 2e9, "gradients": 2e9, "masters": 4e9, "optimizer": moments * 4e9}


@pytest.mark.parametrize(
    ("sharding", "weight_bytes", "reduce_bytes", "gigabytes"),
    [
        ("none", 4, 4, 3.915), ("none", 2, 2, 1.957), ("full-shard", 2, 2, 2.936),
        ("full-shard", 2, 4, 3.915), ("grad-op", 2, 2, 1.957), ("grad-op", 4, 4, 3.915),
        ("single", 4, 4, 0.0),
    ],
)  # fmt: skip
def test_bloom_560m_on_eight_ranks(
    sharding: str, weight_bytes: int, reduce_bytes: int, gigabytes: float
) -> None:
    sent = textbook_sent_bytes(sharding, BLOOM_560M, 8, weight_bytes=weight_bytes, reduce_bytes=reduce_bytes)
    assert round(sent / 1e9, 3) == gigabytes


@pytest.mark.parametrize(
    ("sharding", "ranks", "shards", "sent"),
    [
        # Within 4 ranks: 3/4 x 1000 x (2 x 2 + 4); across 2 replicas: 2 x 1/2 x 1000/4 x 4.
        ("hybrid", 8, 4, 6000 + 1000),
        # Over all ranks it is full-shard; of single ranks DDP.
        ("hybrid", 8, 8, 7000), ("full-shard", 8, None, 7000),
        ("hybrid", 8, 1, 7000), ("none", 8, None, 7000),
        ("hybrid", 8, None, None), ("tensor-parallel", 8, None, None),
    ],
)  # fmt: skip
def test_hybrid_adds_an_all_reduce_across_the_replicas(
    sharding: str, ranks: int, shards: int | None, sent: float | None
) -> None:
    assert sent == textbook_sent_bytes(
        sharding, 1000, ranks, weight_bytes=2, reduce_bytes=4, shard_size=shards
    )


def test_a_second_copy_is_gathered_within_its_group_in_the_backward_pass() -> None:
    # 7/8 x 1000 x (2 + 4) over all ranks, 1/2 x 1000 x 2 within 2.
    sent = textbook_sent_bytes("full-shard", 1000, 8, weight_bytes=2, reduce_bytes=4, second_copy_ranks=2)
    assert sent == 5250 + 1000


def test_every_built_in_backend_has_a_textbook_strategy() -> None:
    for kind in map(strategy, BUILT_IN):
        sent = textbook_sent_bytes(kind.sharding, 1000, 4, weight_bytes=4, reduce_bytes=4, shard_size=2)
        # Where layers are cut, activations cross, which the number of parameters does not tell.
        assert (sent is None) == kind.facts.cuts_layers
        assert 0 <= kind.stage <= 3


GEOMETRY = ModelGeometry(
    multiplying_parameters=1000, block_parameters=600, layers=2, attention_width=8, sequence_length=16
)


def test_palm_540b_is_the_figure_of_the_paper() -> None:
    """Appendix B with Table 1: 118 layers, 48 heads of 256, 2048 tokens, 540.35e9 parameters."""
    palm = ModelGeometry(
        multiplying_parameters=540_350_000_000, block_parameters=0, layers=118, attention_width=48 * 256,
        sequence_length=2048,
    )  # fmt: skip
    # 238.3e3 tokens/s on 6144 TPU v4 of 275 TFLOP/s: the paper reports 46.2 % with attention, 45.7 % without.
    peak = 6144 * 275e12
    assert 238.3e3 * model_flops_per_token(palm) / peak == pytest.approx(0.462, abs=5e-4)
    assert 238.3e3 * 6 * palm.multiplying_parameters / peak == pytest.approx(0.457, abs=5e-4)


def test_flops_are_six_per_parameter_and_twelve_per_attended_position() -> None:
    """Recomputation adds a forward pass of the blocks; the least skips the masked half of attention."""
    plain = model_flops_per_token(GEOMETRY)
    assert plain == hardware_flops_per_token(GEOMETRY, recomputation=False) == 6 * 1000 + 12 * 2 * 8 * 16
    recomputed = hardware_flops_per_token(GEOMETRY, recomputation=True)
    assert recomputed - plain == 2 * 600 + 4 * 2 * 8 * 16
    assert plain - least_flops_per_token(GEOMETRY) == 6 * 2 * 8 * 16


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    """Forward and the gradient of its input, 2 each; the 50 of adapters beside 950 frozen ones have three."""
    adapted = replace(GEOMETRY, frozen_parameters=950)
    assert model_flops_per_token(adapted) == 4 * 950 + 6 * 50 + 12 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312), ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5), ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5), ("NVIDIA H100 NVL", "float32", 60),
        ("NVIDIA H200", "bfloat16", 989.5), ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112), ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA L40S", "bfloat16", 362.05), ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "float32", 80), ("NVIDIA H20", "bfloat16", 148), ("NVIDIA H800", "bfloat16", 989.5),
        ("NVIDIA A10G", "tf32", 35), ("NVIDIA A100-SXM-64GB", "float32", 22.4),
        ("AMD Instinct MI250X / MI250", "float16", 191.5), ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        # What the table does not have is unknown.
        ("cpu", "float32", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("Tesla V100-SXM2-32GB", "bfloat16", None), ("NVIDIA A4000", "bfloat16", None),
    ],
)  # fmt: skip
def test_a_device_is_found_by_the_name_that_torch_gives(
    name: str, dtype: str, teraflops: float | None
) -> None:
    found = find_peak(name, dtype)
    assert (found and found[0]) == (teraflops and pytest.approx(teraflops * 1e12))
    assert found is None or found[1]


def test_no_rate_is_the_one_with_sparsity() -> None:
    """TF32 is half of bf16, which a rate with sparsity beside one without would not be."""
    for device in DEVICE_PEAKS:
        if {"tf32", "bfloat16"} <= device.teraflops.keys():
            ratio = device.teraflops["tf32"] / device.teraflops["bfloat16"]
            assert ratio == pytest.approx(0.5, abs=0.011), device.words


@pytest.mark.parametrize(
    ("checkpointing", "blocks"), [("every-2", 2), ("every-3", 1), ("every-7", 1), ("selective", 0), (True, 3)]
)
def test_recomputation_of_some_blocks_adds_their_share(checkpointing: bool | str, blocks: int) -> None:
    three = replace(GEOMETRY, layers=3, block_parameters=600)
    added = hardware_flops_per_token(three, recomputation=checkpointing) - model_flops_per_token(three)
    assert added == blocks * (2 * 200 + 4 * 8 * 16)
