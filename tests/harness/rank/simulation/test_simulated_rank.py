"""Simulated ranks against closed forms of the same rank; tensors without data against tensors with data."""

import pytest

from harness.job.config import load_experiment
from harness.plan.simulation import (
    SimulatedRow,
    compare_with_closed_forms,
    plan_simulation,
    run_simulations,
    simulated_peaks,
)
from harness.rank.simulation import FEW, in_words
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=25)

RANKS, RANK = 4, 3
ALWAYS = ("tp:tensor=2", "pp")
WIDE = (
    "cp", "autotp-zero1", "fsdp-tp", "pp:schedule=gpipe", "pp:schedule=interleaved,stages=2", "fsdp-cp",
    "cp:rotation=all-to-all",
    "ulysses-zero1", "ulysses-zero2", "ulysses-zero3", "autotp-zero2", "autotp-zero3", "zero3:hpz=2",
    "fsdp:reshard=2",
)  # fmt: skip
PEAK_SHARE = 0.03
"""Of a peak, that a prediction may be off."""


def simulated(labels: tuple[str, ...], *settings: str) -> list[SimulatedRow]:
    given = ("training.micro_batch_size=4", "data.sequence_length=64", *settings)
    experiment = load_experiment(None, given)
    asked = [plan_simulation(experiment, label, RANKS, ranks_per_node=2, rank=RANK) for label in labels]
    results = run_simulations(asked)
    return [compare_with_closed_forms(one, result) for one, result in zip(asked, results, strict=True)]


def assert_agrees(row: SimulatedRow) -> None:
    name = row.asked.run.backend
    assert row.result.status == "ok", f"{name}: {row.result.reason}"
    assert row.collectives
    for part in row.collectives:
        where = f"{name}: {part.phase} {part.op} {part.dtype} along {part.role}"
        assert part.payload_bytes == part.expected_payload_bytes, where
        assert part.expected_calls in (None, part.calls), where
    for state in row.states:
        assert state.bytes == state.expected_bytes, f"{name}: {state.name}"
    for peak in row.peaks:
        assert peak.bytes == pytest.approx(peak.expected_bytes, rel=PEAK_SHARE), f"{name}: {peak.name}"


@pytest.mark.costly
def test_ranks_that_share_samples_agree_with_closed_forms() -> None:
    for row in simulated(ALWAYS):
        assert_agrees(row)


@pytest.mark.exhaustive
@pytest.mark.long(seconds=120)
def test_all_of_them_agree_with_closed_forms() -> None:
    for row in simulated(WIDE):
        assert_agrees(row)


EACH_MICRO_STEP = tuple(
    f"{label}sync_each_batch=true"
    for label in (
        "ddp:", "fsdp:", "fsdp-grad-op:", "fsdp1:", "fsdp1-grad-op:", "fsdp-hybrid:shard_size=2,",
        "fsdp-tp:tensor=2,",
    )
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_reductions_in_every_micro_step_agree_with_closed_forms(precision: str) -> None:
    settings = ("training.accumulation_steps=3", f"training.precision={precision}")
    for row in simulated(EACH_MICRO_STEP, *settings):
        assert_agrees(row)


ROUNDED_BYTES = 1024
"""Empty shards that have a size in one of both, and scalars that kernels allocate."""


@pytest.mark.parametrize("backend", first(["fsdp"], ["fsdp", "fsdp1"]))
def test_tensors_without_data_give_the_same_figures(backend: str) -> None:
    """Where libraries cut parameters into many pieces."""
    ranks = 2 * FEW
    asked = [
        plan_simulation(load_experiment(None), backend, ranks, ranks_per_node=8, rank=ranks - 1, tensors=kind)
        for kind in ("fake", "real")
    ]
    fake, real = run_simulations(asked)
    assert (fake.status, real.status) == ("ok", "ok"), (fake.reason, real.reason)
    key = ("phase", "op", "dtype", "group_ranks", "calls", "payload_bytes", "largest_bytes")
    counted, expected = (
        [[getattr(part, name) for name in key] for part in one.communication] for one in (fake, real)
    )
    assert counted == expected != []
    for moment, peak in simulated_peaks(fake).items():
        assert 0 <= simulated_peaks(real)[moment] - peak <= ROUNDED_BYTES, moment


def test_experts_in_another_dtype_than_their_kernel_s_say_which_to_set() -> None:
    raised = RuntimeError("Expected inputs of BF16 type but got mat_a.dtype=torch.float32 and more.")
    assert in_words(raised).endswith("takes bf16 alone; set training.precision=bf16-mixed")
    assert in_words(ValueError("two\n  lines")) == "ValueError: two lines"
