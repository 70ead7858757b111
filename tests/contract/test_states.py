"""What engines hold after a backward pass is the closed form, to the byte, at every precision."""

from pathlib import Path
from typing import Any

import pytest

from harness.backends import registry
from harness.forms.families import model_states
from harness.forms.layout import Layout
from harness.forms.workload import Workload
from tests.built_in import NATIVE, strategy
from tests.contract.cases import GLOBAL_BATCH, LENGTH, Case
from tests.contract.deeds import CASES, Held
from tests.contract.ranks import on_ranks
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=15)

KINDS = ("weights", "gathered", "gradients", "masters", "optimizer", "communication", "buffers")
FEW = ("zero3", "fsdp1")
"""Of FSDP2 an option follows; the clean matrix (tests/traps/test_clean.py) has every backend."""
WITH_OPTIONS = (
    "fsdp:master_dtype=compute", "fsdp-grad-op:master_dtype=compute", "fsdp:offload=cpu",
    "zero1:offload=optimizer", "zero2:offload=optimizer", "zero3:offload=optimizer", "zero3:offload=cpu",
    "zero3:reduce_bucket_size=1000",
)  # fmt: skip
FEW_OPTIONS = ("fsdp:master_dtype=compute", "fsdp:offload=cpu", "zero3:offload=cpu")
CPU_ADAM = [
    pytest.param(f"{label},adam=deepspeed", marks=pytest.mark.exhaustive)
    for label in ("zero1:offload=optimizer", "zero2:offload=optimizer", "zero3:offload=cpu")
]
"""Its extension is compiled once, for a minute or more."""
ALONE = ("single", "single:precision=fp32", "single:precision=cast")


@pytest.mark.parametrize("label", first(ALONE[:1], ALONE))
def test_states_of_one_process_are_the_closed_form_to_the_byte(label: str, tmp_path: Path) -> None:
    assert_closed_forms(label, 1, tmp_path)


@pytest.mark.parametrize(
    "label",
    [
        *cheap(FEW[:1], FEW),
        *first([], [name for name in (*NATIVE, *WITH_OPTIONS, "trainer-ddp") if name not in FEW]),
        *CPU_ADAM,
    ],
)
def test_states_are_the_closed_form_to_the_byte(label: str, tmp_path: Path) -> None:
    assert_closed_forms(label, 2, tmp_path)


@pytest.mark.parametrize("label", cheap(FEW_OPTIONS[:1], FEW_OPTIONS))
def test_states_with_options_are_the_closed_form_to_the_byte(label: str, tmp_path: Path) -> None:
    assert_closed_forms(label, 2, tmp_path, "held, few")


def assert_closed_forms(label: str, ranks: int, folder: Path, cases: str = "held") -> None:
    per_rank = on_ranks("hold", label, ranks, folder, cases)
    for rank, of_cases in enumerate(per_rank):
        for case, held in zip(CASES[cases], of_cases, strict=True):
            assert (held is None) == is_unsupported(label, case), case
            if held is not None:
                expected = expected_kinds(label, case, held, ranks, rank)
                assert {kind: held.kinds.get(kind, 0) for kind in KINDS} == expected, (rank, case)


def is_unsupported(label: str, case: Case) -> bool:
    """Whether the library refuses, or would train something else."""
    if case.precision == "bf16":
        # DeepSpeed keeps fp32 masters at stage 0, and offloads bf16 masters to an Adam of its own only.
        offloads = label.startswith("zero") and "offload" in label
        return label == "zero0" or (offloads and "adam=deepspeed" not in label)
    # Tied gradients of several micro-steps are not added up.
    no_shard = label.startswith("fsdp1-no-shard")
    return no_shard and case.precision == "bf16-mixed" and case.accumulation_steps > 1


def expected_kinds(label: str, case: Case, held: Held, ranks: int, rank: int) -> dict[str, int]:
    of_rank = workload(label, case, held.layout, ranks, rank, shard_size=held.shard_size)
    kinds = model_states(of_rank).kinds()
    return {kind: kinds.get(kind, 0) for kind in KINDS}


def workload(label: str, case: Case, layout: Layout, ranks: int, rank: int, **more: Any) -> Workload:
    """What a rank of a backend trains in a case."""
    mesh = registry.mesh_of(label, ranks)
    return Workload(
        layout=layout,
        strategy=strategy(label.partition(":")[0]),
        precision=case.precision,
        preset=case.preset,
        world_size=ranks,
        mesh=mesh,
        rank=rank,
        micro_batch_size=GLOBAL_BATCH // mesh.data_size // case.accumulation_steps,
        accumulation_steps=case.accumulation_steps,
        sequence_length=LENGTH,
        gradient_clipping=case.clipping,
        options=registry.parse(label)[1].model_dump(exclude_none=True),
        **more,
    )
