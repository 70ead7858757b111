"""Accelerate's and Trainer's FSDP run on CUDA alone: they wrap, gather and cast as closed forms say."""

from itertools import product

import pytest

from tests.gpu_stub.machine import Machine
from tests.representatives import first
from tests.traps.matrix import ABOUT_TIME

TIED, ACCUMULATED = "model.config.tie_word_embeddings=true", "training.accumulation_steps=2"
BF16 = "training.precision=bf16-mixed"
TWICE, DEFAULTS = (BF16, ACCUMULATED), (BF16, "runtime.preset=library-defaults", TIED)
ACCELERATE = ("accelerate-fsdp", "accelerate-fsdp1")
SETTINGS = ((), (TIED,), TWICE, ("training.global_batch_size=12", "training.accumulation_steps=3"), DEFAULTS)
TRAINER = ("trainer-fsdp", "trainer-fsdp1", "trainer-ddp")
ALL = (*product(ACCELERATE, SETTINGS), *product(TRAINER, ((TIED,), (ACCUMULATED,))))
FEW = (
    ("accelerate-fsdp", DEFAULTS), ("accelerate-fsdp1", TWICE), ("trainer-fsdp", (ACCUMULATED,)),
    ("trainer-fsdp1", (TIED,)),
)  # fmt: skip


@pytest.mark.parametrize(("label", "settings"), first(FEW, ALL))
def test_nothing_is_unexpected(label: str, settings: tuple[str, ...], machine: Machine) -> None:
    comparison = machine.compare([label], settings=settings)
    assert {row.record.status for row in comparison.rows} == {"ok"}
    assert [(f.id, f.text) for f in comparison.findings if f.id not in ABOUT_TIME] == []


@pytest.mark.parametrize("label", first(["trainer-fsdp"], ["trainer-fsdp", "trainer-fsdp1"]))
def test_trainer_reduces_in_the_compute_dtype_and_a_finding_says_so(label: str, machine: Machine) -> None:
    comparison = machine.compare(["ddp", label], settings=[BF16])
    found = {f.id: f.text for f in comparison.findings if f.id not in ABOUT_TIME}
    assert list(found) == ["reduce-dtype-differs"]
    assert "bfloat16" in found["reduce-dtype-differs"]


@pytest.mark.parametrize("label", first(["trainer-fsdp1"], ["accelerate-fsdp", "trainer-fsdp1"]))
def test_weights_of_rank_0_reach_the_others_as_the_closed_forms_say(label: str, machine: Machine) -> None:
    comparison = machine.compare([f"{label}:cpu_ram_efficient_loading=true"])
    assert {row.record.status for row in comparison.rows} == {"ok"}
    assert [(f.id, f.text) for f in comparison.findings if f.id not in ABOUT_TIME] == []


def test_offload_of_fsdp2_is_refused_since_its_norm_cannot_be_reduced(machine: Machine) -> None:
    record = machine.run("trainer-fsdp:offload=cpu")
    assert record.status == "unsupported"
    assert "which NCCL cannot reach" in record.reasons[0]
