"""Mistakes of jobs with adapters are planted and must be named."""

from __future__ import annotations

import pytest

from tests.representatives import cheap
from tests.traps.matrix import Matrix
from tests.traps.planted import BF16, Trap

from .test_strategies import LORA

pytestmark = pytest.mark.long(seconds=15)
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
