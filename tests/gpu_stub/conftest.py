"""The machine of the CUDA stub, where these tests run on it; elsewhere they are skipped."""

import os
from pathlib import Path

import pytest

from tests.gpu_stub.machine import Machine

HERE = Path(__file__).parent
ELSEWHERE = "needs torch's CUDA wheel over a stub of the driver, 4.7 GB: run `make test-gpu-stub`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "CUDA_STUB" not in os.environ:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=ELSEWHERE))


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))
