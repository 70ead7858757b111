"""Whether kernels run on a GPU; against what torch's wheels list."""

import pytest

from harness.gpus.found import runs_on

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), CUDA_13, False),  # V100
        ((7, 5), CUDA_13, True),
        ((8, 9), CUDA_13, True),  # L4: sm_86 is of the same major
        ((10, 3), CUDA_13, True),
        ((11, 0), CUDA_13, False),
        ((12, 1), ("compute_120",), True),
        ((13, 0), ("compute_120",), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100a",), False),
        ((8, 0), ("sm_86",), False),
    ],
)
def test_kernels_run_on_later_minors_and_intermediate_code_on_all_later(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(capability, architectures) is runs
