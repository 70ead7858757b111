"""Which wheel of torch a GPU needs."""

import pytest

from harness.gpus.found import Wheel, unfit_wheel

CUDA_13 = Wheel(version="2.13.0+cu130", cuda="13.0")
CUDA_12_6 = Wheel(version="2.13.0+cu126", cuda="12.6")


def test_a_v100_needs_the_wheel_for_cuda_12_6() -> None:
    refusal = unfit_wheel(CUDA_13, (7, 0))
    assert refusal == (
        "torch 2.13.0+cu130 (CUDA 13.0) has no kernels for sm_70; install torch's wheel for CUDA 12.6 "
        "(https://download.pytorch.org/whl/cu126)"
    )
    assert unfit_wheel(CUDA_12_6, (7, 0)) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_what_came_later_runs_on_cuda_13(capability: tuple[int, int]) -> None:
    assert unfit_wheel(CUDA_13, capability) is None


def test_a_b200_needs_a_later_wheel_than_12_6() -> None:
    assert "CUDA 13 (https://download.pytorch.org/whl/cu130)" in str(unfit_wheel(CUDA_12_6, (10, 0)))


def test_a_wheel_for_the_cpu_is_named() -> None:
    refusal = unfit_wheel(Wheel(version="2.13.0+cpu"), (8, 0))
    assert str(refusal).startswith(
        "torch 2.13.0+cpu is not built for CUDA; install torch's wheel for CUDA 13"
    )


def test_a_build_that_the_table_does_not_have_is_not_judged() -> None:
    assert unfit_wheel(Wheel(version="2.13.0+own", cuda="12.4"), (7, 0)) is None
    assert unfit_wheel(Wheel(is_known=False), (7, 0)) is None
