from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from harness.cli.export import export_adapter
from harness.errors import HarnessError
from harness.rank.models.adapter import is_adapter
from harness.rank.models.adapter_export import export_adapters
from harness.run_directory.request import SavedCheckpoint
from tests.harness.rank.loading.models import CONFIGS, job_of
from tests.harness.rank.models.test_adapter import built, lora

TOKENS = torch.arange(8)[None]


def trained(job, folder: Path, **changes) -> nn.Module:
    """A model whose adapters are not zero, and its checkpoint."""
    model = built(job).eval()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.1)
    folder.mkdir()
    save_file({n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    described = {
        "format": "neutral", "native_format": "x", "run_id": "r", "backend": "ddp", "world_size": 2,
        "job_id": "j", "job": job, "step": 1,
    }  # fmt: skip
    SavedCheckpoint(**(described | changes)).write(folder)
    return model


@pytest.mark.parametrize("architecture", ["tied llama", "gpt2"])
def test_both_exports_compute_what_the_run_did(architecture: str, tmp_path: Path) -> None:
    from peft import PeftModel

    job = lora(CONFIGS[architecture])
    model = trained(job, tmp_path / "checkpoint")
    expected = model(input_ids=TOKENS).logits
    assert export_adapters(tmp_path / "checkpoint", tmp_path / "merged", merged=True) == 2 * (
        1 if architecture == "gpt2" else 2
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    export_adapters(tmp_path / "checkpoint", tmp_path / "adapter", merged=False)
    plain = built(job_of(CONFIGS[architecture])).eval()
    assert not torch.allclose(plain(input_ids=TOKENS).logits, expected, atol=1e-2)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.costly
def test_a_checkpoint_of_partitioned_parameters_is_refused(tmp_path: Path) -> None:
    """T37: peft's state dict of a model under ZeRO-3 has tensors of shape (0,)."""
    trained(lora(CONFIGS["tied llama"]), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = {n: torch.empty(0) if is_adapter(n) else t for n, t in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(HarnessError, match=r"shape \(0,\) in the checkpoint.*gather"):
        export_adapter(tmp_path / "checkpoint", tmp_path / "out", merged=False)
    assert not (tmp_path / "out").exists()


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="has no checkpoint"):
        export_adapter(tmp_path, tmp_path / "out", merged=False)
    trained(lora(CONFIGS["tied llama"]), tmp_path / "native", format="native")
    with pytest.raises(HarnessError, match="native to x"):
        export_adapters(tmp_path / "native", tmp_path / "out", merged=False)
    trained(job_of(CONFIGS["tied llama"]), tmp_path / "plain")
    with pytest.raises(HarnessError, match="without adapters"):
        export_adapters(tmp_path / "plain", tmp_path / "out", merged=True)
