"""Closed forms of floating-point operations, and the table of device peaks."""

from dataclasses import replace

import pytest

from harness.forms.textbook import (
    DEVICE_PEAKS,
    ModelGeometry,
    find_peak,
    hardware_flops_per_token,
    least_flops_per_token,
    model_flops_per_token,
)

GEOMETRY = ModelGeometry(
    multiplying_parameters=1000, block_parameters=600, layers=2, attention_width=8, sequence_length=16
)


def test_palm_540b_is_the_figure_of_the_paper() -> None:
    """Appendix B with Table 1: 118 layers, 48 heads of 256, 2048 tokens, 540.35e9 parameters."""
    palm = ModelGeometry(
        multiplying_parameters=540_350_000_000,
        block_parameters=0,
        layers=118,
        attention_width=48 * 256,
        sequence_length=2048,
    )
    # 238.3e3 tokens/s on 6144 TPU v4 of 275 TFLOP/s: the paper reports 46.2 % with attention, 45.7 % without.
    peak = 6144 * 275e12
    assert 238.3e3 * model_flops_per_token(palm) / peak == pytest.approx(0.462, abs=5e-4)
    assert 238.3e3 * 6 * palm.multiplying_parameters / peak == pytest.approx(0.457, abs=5e-4)


def test_model_flops_are_six_per_parameter_and_twelve_per_attended_position() -> None:
    assert model_flops_per_token(GEOMETRY) == 6 * 1000 + 12 * 2 * 8 * 16


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    """Forward and the gradient of its input, 2 each; the 50 of adapters beside 950 frozen ones have three."""
    adapted = replace(GEOMETRY, frozen_parameters=950)
    assert model_flops_per_token(adapted) == 4 * 950 + 6 * 50 + 12 * 2 * 8 * 16


def test_recomputation_adds_one_forward_pass_of_the_blocks() -> None:
    assert hardware_flops_per_token(GEOMETRY, recomputation=False) == model_flops_per_token(GEOMETRY)
    added = hardware_flops_per_token(GEOMETRY, recomputation=True) - model_flops_per_token(GEOMETRY)
    assert added == 2 * 600 + 4 * 2 * 8 * 16


def test_the_least_skips_the_masked_half_of_attention() -> None:
    assert model_flops_per_token(GEOMETRY) - least_flops_per_token(GEOMETRY) == 6 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H100 NVL", "float32", 60),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "float32", 80),
        ("NVIDIA H20", "bfloat16", 148),
        ("NVIDIA H800", "bfloat16", 989.5),
        ("NVIDIA A10G", "tf32", 35),
        ("NVIDIA A100-SXM-64GB", "float32", 22.4),
        ("AMD Instinct MI250X / MI250", "float16", 191.5),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_a_device_is_found_by_the_name_that_torch_gives(name: str, dtype: str, teraflops: float) -> None:
    found = find_peak(name, dtype)
    assert found is not None
    assert found[0] == pytest.approx(teraflops * 1e12)
    assert found[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "float32"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("NVIDIA A4000", "bfloat16"),
    ],
)
def test_what_the_table_does_not_have_is_unknown(name: str, dtype: str) -> None:
    assert find_peak(name, dtype) is None


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
