"""States of an optimizer other than AdamW in the masters' dtype, tensor by tensor that a rank updates."""

from __future__ import annotations

from harness.theory.common_states import ADAM_MOMENTS
from harness.theory.optimizer_step import updated_tensors
from harness.theory.terms import ModelStates, Term, states
from harness.theory.workload import Workload

LEAST_ELEMENTS = 4096
BLOCK_ELEMENTS = 256
"""torchao 0.18, `optim/adam.py`, `_AdamBase._new_buffer`: smaller tensors, and those whose elements are no
multiple of a block, keep moments in the parameters' dtype, without a word."""
SCALE_BYTES = 4
"""fp32, one per block (`optim/subclass_8bit.py`, `OptimState8bit.zeros`)."""
TABLE_BYTES = 256 * 4
"""`qmap`, fp32, one per tensor."""
WIDE = "Adam's moments of tensors that are not quantised"
COUNTERS = "step counters"


def with_optimizer(workload: Workload, expected: ModelStates) -> ModelStates:
    """The same states with the moments of the optimizer that the job has."""
    if workload.optimizer != "adamw-8bit":
        return expected
    host = any(term.host for term in expected.terms if term.kind == "optimizer" and "moments" in term.name)
    kept = [t for t in expected.terms if t.kind != "optimizer" or COUNTERS in t.name]
    sizes = [size for call in updated_tensors(workload) for size in call]
    low = [size for size in sizes if is_quantised(size)]
    wide = sum(size for size in sizes if not is_quantised(size))
    blocks = sum(size // BLOCK_ELEMENTS for size in low)

    def optimizer(name: str, size: int, *, extra: bool = False) -> Term:
        return Term(kind="optimizer", name=name, bytes=ADAM_MOMENTS * size, host=host, extra=extra)

    return states(
        [
            *kept,
            optimizer("Adam's moments in 8 bits", sum(low)),
            optimizer("scales of their blocks", SCALE_BYTES * blocks, extra=True),
            optimizer("tables of their values", TABLE_BYTES * len(low), extra=True),
            optimizer(WIDE, wide * workload.master_bytes),
        ],
        expected.files,
    )


def is_quantised(elements: int) -> bool:
    """Whether torchao keeps the moments of a tensor of so many elements in 8 bits."""
    return elements >= LEAST_ELEMENTS and elements % BLOCK_ELEMENTS == 0
