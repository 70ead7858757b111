"""torch.compile of blocks and of the whole model under each strategy. Compiling takes most of the time."""

import pytest

from .parity import NATIVE, assert_parity

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=240)]


@pytest.mark.parametrize("compiled", ["block", "model"])
def test_every_strategy_trains_the_compiled_job(compiled: str, matrix) -> None:
    records = assert_parity(matrix, [f"model.compile={compiled}"], NATIVE)
    for label, record in records.items():
        assert record.observed.compiled, label
        assert record.observed.compiled_graphs > 0, label
