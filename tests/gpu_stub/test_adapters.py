"""Jobs with adapters on devices of the stub: Accelerate's and Trainer's FSDP, offload, fp16, checkpoints."""

from itertools import product

import pytest

from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import findings
from tests.representatives import EXHAUSTIVE, first

LORA = "kind: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj, up_proj]"
COMMON = ("optimizer.learning_rate=2e-2", "measure.traced_steps=0")
FP32 = (f"adapter={{{LORA}}}", *COMMON)
BF16 = (f"adapter={{{LORA}, base_dtype: bf16}}", *COMMON, "training.precision=bf16-mixed")
FP16 = (*FP32, "training.precision=fp16-mixed", "training.global_batch_size=16")
THROUGH = {
    "few": ("accelerate-fsdp1", "trainer-fsdp", "trainer-fsdp1", "trainer-zero3"),
    "others": ("accelerate-fsdp", "accelerate-zero3", "trainer-ddp", "trainer-zero2"),
}
OFFLOAD = ("zero2:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu", "accelerate-fsdp:offload=cpu")
NATIVE = ("ddp", "zero2", "zero3", "fsdp", "fsdp1")
REDUCED = "frozen-weights-reduced"
"""What FSDP1 does with adapters, whoever wraps."""


def found_in(machine: Machine, labels: tuple[str, ...], settings: tuple[str, ...]) -> set[tuple[str, str]]:
    """Findings and whom they concern; every run must have trained as the reference did."""
    comparison = machine.compare(labels, settings=settings)
    assert {row.record.backend.label: row.record.error for row in comparison.rows if row.record.error} == {}
    assert {row.judgement.parity for row in comparison.rows} <= {"exact", "tight"}
    return {(found.id, label) for found in findings(comparison) for label in found.backends}


@pytest.mark.parametrize("those", first(["few"], THROUGH))
def test_through_accelerate_and_trainer_only_fsdp1_reduces_frozen_weights(
    those: str, machine: Machine
) -> None:
    expected = {(REDUCED, label) for label in THROUGH[those] if label.endswith("fsdp1")}
    assert found_in(machine, THROUGH[those], FP32) == expected


@pytest.mark.parametrize("preset", first(["library-defaults"], ["like-for-like", "library-defaults"]))
def test_accelerate_leaves_frozen_bf16_weights_as_they_are(preset: str, machine: Machine) -> None:
    """https://github.com/huggingface/accelerate/issues/3844: earlier releases made them fp32."""
    settings = (*BF16, f"runtime.preset={preset}")
    assert found_in(machine, ("accelerate-fsdp",), settings) == set()
    record = machine.run("accelerate-fsdp", settings=settings)
    assert record.observed.frozen_dtypes == ["bfloat16"]


@EXHAUSTIVE
def test_accelerate_sends_each_weight_in_its_dtype_when_rank_0_loads(machine: Machine) -> None:
    assert found_in(machine, ("accelerate-fsdp:cpu_ram_efficient_loading=true",), BF16) == set()


@EXHAUSTIVE
def test_offloaded_states_and_fp16_train_alike(machine: Machine) -> None:
    assert found_in(machine, OFFLOAD, FP32) == set()
    labels = (*NATIVE, "accelerate-fsdp")
    assert found_in(machine, labels, FP16) == {(REDUCED, "fsdp1")}


RESUMED = ("zero3", "fsdp", "accelerate-fsdp", "trainer-zero3")


@pytest.mark.parametrize(
    ("label", "form"), first([("accelerate-fsdp", "native")], product(RESUMED, ("native", "neutral")))
)
def test_a_resumed_run_goes_on_to_the_bit(label: str, form: str, machine: Machine) -> None:
    keep = (f"measure.checkpoint={form}", "measure.keep_checkpoint=true")
    whole = machine.run(label, settings=(*FP32, *keep))
    assert whole.status == "ok", whole.error
    rest = machine.run(label, settings=FP32, resume_from=whole)
    assert rest.resumed is not None, rest.error
    expected = [(step.loss, step.gradient_norm) for step in whole.steps[rest.resumed.step :]]
    assert [(step.loss, step.gradient_norm) for step in rest.steps] == expected
    assert rest.final_weights.digest == whole.final_weights.digest
