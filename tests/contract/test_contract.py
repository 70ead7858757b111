"""Every registered backend trains as one process does; engines that do not are rejected."""

from pathlib import Path

import pytest

from harness.backends import registry
from harness.backends.base import World
from tests.built_in import EACH_MICRO_STEP, HYBRID, SEQUENCE, TENSOR
from tests.contract.cases import Case
from tests.contract.deeds import CASES
from tests.contract.ranks import on_ranks, traces
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=20)

LOSS_TOLERANCE = 5e-6
"""Nats per token. 5e-5 would be fair where a library clips by an fp32 norm; none needs it here."""
NORM_TOLERANCE = 1e-5
"""Relative. Norms are accumulated in fp64 by every backend; what is left is fp32 gradients."""
WEIGHT_TOLERANCE = 1e-5
"""Absolute, after 6 steps that move weights by up to 6e-3."""


def runnable() -> list[str]:
    """Registered backends that can run on CPU ranks; not those whose ranks share samples."""
    names = []
    for name in registry.entries():
        size = 4 if name in HYBRID else 2
        world = World(rank=0, world_size=size, local_rank=0, ranks_per_node=size, device="cpu")
        elsewhere = name in (registry.REFERENCE, *SEQUENCE, *TENSOR)
        if not elsewhere and not registry.create(name).unmet_requirements(world):
            names.append(name)
    return names


def violations(reference, trace, case: Case) -> list[str]:
    """What of the contract a trace breaks; empty: nothing."""
    loss, norm, weight = reached(reference, trace)
    found = []
    if not loss <= LOSS_TOLERANCE:
        found.append(f"{case.name}: loss differs by {loss:.1e}")
    if not norm <= NORM_TOLERANCE:
        found.append(f"{case.name}: gradient norm differs by {norm:.1e}")
    if not weight <= WEIGHT_TOLERANCE:
        found.append(f"{case.name}: a weight differs by {weight:.1e}")
    return found


def reached(reference, trace) -> tuple[float, float, float]:
    """Largest differences: loss, relative gradient norm, weight."""
    loss = max(abs(a - b) for a, b in zip(reference.losses, trace.losses, strict=True))
    norm = max(abs(a - b) / a for a, b in zip(reference.norms, trace.norms, strict=True))
    assert reference.weights.keys() == trace.weights.keys()
    weight = max(
        float((reference.weights[name] - trace.weights[name]).abs().max()) for name in reference.weights
    )
    return loss, norm, weight


def test_the_cases_are_worth_comparing(reference) -> None:
    for case, trace in zip(CASES["trained"], reference, strict=True):
        assert trace.losses[-1] < trace.losses[0] - 0.02, case.name
        if case.clipping:
            assert min(trace.norms) > case.clipping, f"{case.name}: clipping never acts"


PREFETCH = ["fsdp:prefetch=2", "fsdp1:backward_prefetch=post,forward_prefetch=true,limit_all_gathers=false"]
"""When weights are gathered must not change what is computed."""
SECOND_COPY = ["zero3:hpz=2", "fsdp:reshard=2"]
"""Nor from which copy; they need two groups of two ranks."""


CPU_ADAM = [
    pytest.param(label, marks=pytest.mark.exhaustive)
    for label in ("zero2:offload=optimizer,adam=deepspeed", "zero3:offload=cpu,adam=deepspeed")
]
"""Nor which Adam updates: DeepSpeed's, whose extension is compiled once, for a minute or more."""


REPRESENTATIVES = ["ddp", "zero3", "fsdp", "fsdp1", "accelerate-zero2"]
"""Each library's ways to shard, one through another library.

The clean matrix (tests/traps/test_clean.py) has every backend, and groups of ranks in fp32.
"""
IN_EVERY_CASE = ("fsdp",)
"""Others in the hardest cases, natives in every case where all are asked for."""
REPRESENTATIVES += ["fsdp:sync_each_batch=true"]
"""Nor in which micro-steps gradients are reduced."""
ALL = [*runnable(), *PREFETCH, *SECOND_COPY, *EACH_MICRO_STEP]


@pytest.mark.parametrize("name", [*first(REPRESENTATIVES, ALL), *CPU_ADAM])
def test_backend_trains_as_one_process_does(name, reference, tmp_path, contract_table) -> None:
    assert_trains(name, reference, tmp_path, contract_table, name in IN_EVERY_CASE)


def assert_trains(name: str, reference: list, tmp_path: Path, contract_table: list, every_case: bool) -> None:
    size = 4 if name in SECOND_COPY or name.partition(":")[0] in HYBRID else 2
    which = "trained" if every_case else "hardest"
    cases, found = CASES[which], []
    of_reference = reference[-len(cases) :]
    for case, expected, trace in zip(cases, of_reference, traces(name, size, tmp_path, which), strict=True):
        contract_table.append((name, size, case.name, *reached(expected, trace)))
        found += violations(expected, trace, case)
    assert found == []


@pytest.mark.parametrize(
    "defect",
    [*cheap([], ["LossScaledTwice", "NoClipping"]), "GradientsSummed", "LastMicroStepOnly"],
)
def test_a_wrong_engine_is_rejected(defect, reference, tmp_path) -> None:
    result = traces(f"tests.contract.wrong:{defect}", 2, tmp_path)
    rejected = {
        case
        for case, expected, trace in zip(CASES["trained"], reference, result, strict=True)
        if violations(expected, trace, case)
    }
    cases = CASES["trained"]
    affected = {
        "NoClipping": {case for case in cases if case.clipping},
        "LastMicroStepOnly": {case for case in cases if case.accumulation_steps > 1},
    }.get(defect, set(cases))
    assert rejected == affected


RESUMED = ("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3", "pp")
EVALUATED = ("ddp", "zero3", "fsdp", "fsdp-grad-op", "fsdp1-grad-op", "pp")


@pytest.mark.parametrize("name", first(["zero3", "fsdp", "fsdp1", "pp"], [*RESUMED]))
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(name, tmp_path) -> None:
    assert on_ranks("resume", name, 2, tmp_path) == [0.0, 0.0]


@pytest.mark.parametrize("name", first(["zero3", "fsdp1-grad-op"], [*EVALUATED]))
def test_evaluation_leaves_the_full_weights_as_they_are(name, tmp_path) -> None:
    assert on_ranks("evaluate", name, 2, tmp_path) == [0.0, 0.0]
