"""Under every strategy adapters train as under the reference, also in checkpoints; mistakes are named."""

import pytest
import torch
from safetensors.torch import load_file

from harness.rank.models.model import is_adapter
from harness.run_directory.request import checkpoint_folder
from tests.representatives import EXHAUSTIVE, cheap, first
from tests.traps.clean import assert_clean
from tests.traps.matrix import Matrix
from tests.traps.planted import BF16, Trap

pytestmark = pytest.mark.long(seconds=40)
LORA = (
    "adapter={kind: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj, up_proj]}",
    "optimizer.learning_rate=2e-2",
    "measure.traced_steps=0",
)
STRATEGIES = ("ddp", "zero0", "zero2", "zero3", "fsdp", "fsdp1", "fsdp1-no-shard", "accelerate-zero3")
FEW = ("zero2", "fsdp1")
ADAPTERS = 1664
"""Elements of all adapters: per block 2 x (4 x 32 + 32 x 4) + 4 x 32 + 48 x 4."""


@pytest.mark.parametrize("strategies", [FEW, pytest.param(STRATEGIES, marks=EXHAUSTIVE)], ids=["few", "all"])
def test_every_strategy_trains_the_same_adapters(strategies: tuple[str, ...], matrix: Matrix) -> None:
    records = assert_clean(strategies, 2, LORA, matrix, true=("frozen-weights-reduced",))
    named = {label for f in matrix.findings(strategies, 2, LORA) for label in f.backends}
    assert named == {"fsdp1", "fsdp1-no-shard"} & {*strategies}
    assert len({record.initial_weights.digest for record in records.values()}) == 1
    losses = [step.loss for step in records["single"].steps]
    assert losses[0] - losses[-1] > 0.05  # adapters do learn


@pytest.mark.costly
def test_four_bit_weights_train_alike_under_every_strategy(matrix: Matrix) -> None:
    settings = (LORA[0].replace("}", ", base_dtype: nf4}"), *LORA[1:])
    for record in assert_clean(("zero3", "fsdp"), 2, settings, matrix, derived=False).values():
        assert "uint8" in record.observed.frozen_dtypes


@pytest.mark.parametrize("strategy", first(["zero2", "fsdp"], ["ddp", "zero2", "fsdp"]))
def test_only_adapters_are_reduced(strategy: str, matrix: Matrix) -> None:
    record = matrix.record(strategy, 2, LORA)
    reduced = {
        row.rank: row.payload_bytes
        for row in record.comm
        if row.phase == "backward" and row.op in ("all_reduce", "reduce_scatter")
    }
    assert reduced == dict.fromkeys((0, 1), 2 * 4 * ADAPTERS)  # two probed steps


KEPT = (*LORA, "measure.checkpoint=neutral", "measure.keep_checkpoint=true")


def saved(matrix: Matrix, label: str, world_size: int) -> dict[str, torch.Tensor]:
    record = matrix.record(label, world_size, KEPT)
    assert record.status == "ok", record.error
    tensors = load_file(checkpoint_folder(matrix.store.root / record.run_id) / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)}


@pytest.mark.parametrize("label", ["zero3", "fsdp"])
@pytest.mark.costly
def test_saved_adapters_are_those_of_one_process(label: str, matrix: Matrix) -> None:
    expected, found = saved(matrix, "single", 1), saved(matrix, label, 2)
    assert found.keys() == expected.keys()
    assert len(expected) == 12
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    trained = [tensor for name, tensor in expected.items() if "lora_B" in name]
    assert all(tensor.abs().max() > 1e-3 for tensor in trained)  # B begins at 0


BASE = "adapter={kind: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj, up_proj], base_dtype: bf16}"
ADAPTED = [
    Trap(name="T37", label="planted-NotGathered", finding="parameters-differ", says="34,016 against 35,680",
         what="PEFT's state dict under ZeRO-3 without gathering: tensors of shape (0,)"),
    Trap(name="T38", label="fsdp1", finding="frozen-weights-reduced", says="frozen weights cross the wire",
         what="FSDP1 with blocks as units, which reduces the gradients of frozen neighbours too"),
    Trap(name="T39", label="planted-Bf16Key", finding="adapters-cast", says="compute in bfloat16",
         settings=(BASE,), what="DeepSpeed's key bf16 on a bf16 base, which makes the adapters bf16 too"),
    Trap(name="T41", label="planted-OneRankInBf16", finding="master-dtype-differs", says="bfloat16",
         world_size=1, settings=(BF16,),
         what="bf16=True on one rank, where Accelerate keeps bf16 weights and no fp32 masters"),
    Trap(name="unseen frozen weights upcast", label="planted-Upcast", finding="frozen-dtype-differs",
         says="float32, the job's are bfloat16: 2 x", settings=(BF16, BASE),
         what="frozen weights made fp32 before they are sharded"),
]  # fmt: skip


@pytest.mark.parametrize("trap", cheap(ADAPTED[:1], ADAPTED), ids=lambda trap: trap.name)
def test_a_planted_mistake_is_named(trap: Trap, matrix: Matrix) -> None:
    found = matrix.findings([trap.label], trap.world_size, (*LORA, *trap.settings))
    named = [f for f in found if f.id == trap.finding and trap.says in f.message]
    assert named, [(f.id, f.message) for f in found]
    assert all(f.backends == (trap.label,) for f in found), found
