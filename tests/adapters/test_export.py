"""Adapters exported from real runs under sharding strategies are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.rank.models.adapter_export import export_adapters
from harness.run_directory.request import checkpoint_folder
from tests.traps.matrix import Matrix

from .test_strategies import LORA

pytestmark = pytest.mark.long(seconds=10)

KEPT = (*LORA, "measure.checkpoint=neutral", "measure.keep_checkpoint=true")
FILES = {"adapter": "adapter_model.safetensors", "merged": "model.safetensors"}


def exported(matrix: Matrix, label: str, world_size: int, what: str, folder: Path) -> dict[str, torch.Tensor]:
    record = matrix.record(label, world_size, KEPT)
    assert record.status == "ok", record.error
    output = folder / f"{label}-{what}"
    checkpoint = checkpoint_folder(matrix.store.root / record.run_id)
    assert export_adapters(checkpoint, output, merged=what == "merged") == 6
    return load_file(output / FILES[what])


@pytest.mark.parametrize("what", list(FILES))
@pytest.mark.parametrize("label", ["zero3", "fsdp"])
@pytest.mark.costly
def test_the_export_is_that_of_one_process(label: str, what: str, matrix: Matrix, tmp_path: Path) -> None:
    expected = exported(matrix, "single", 1, what, tmp_path)
    found = exported(matrix, label, 2, what, tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    trained = [tensor for name, tensor in expected.items() if "lora_B" in name]
    assert all(tensor.abs().max() > 1e-3 for tensor in trained)  # B begins at 0
