"""Every known trap is planted and must be found, named, and told of the right backend."""

from dataclasses import replace

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings import timing
from harness.rank.probes.time import accounted_seconds
from tests.records import changed, make_record, make_steps
from tests.representatives import cheap, first

from .matrix import Matrix
from .planted import ACCUMULATED, BF16, DIVIDED, LIBRARIES, TIED, TRAPS, Trap, assert_named

pytestmark = pytest.mark.long(seconds=90)

IN_BF16 = [
    replace(trap, name=f"{trap.name} in bf16", settings=(*trap.settings, BF16))
    for trap in (*DIVIDED, *LIBRARIES)
    if not trap.diverges_in_bf16
]
BOTH = "unseen gradients of a rank dropped in bf16"
KEPT_BY = {
    "T12": "tests/memory/test_defects.py", "T24": "tests/memory/test_defects.py",
    "T18 swapped groups": "T18", "unseen decay on everything": "T18", "unseen epsilon": "unseen beta2",
    "T28 stage 1": "T28 stage 2", "T34, AutoTP": "T34",
    "late same batch": "late gradients of a rank dropped", "late decay on everything": "late loss of rank 0",
}  # fmt: skip
"""Traps of a kind that is planted elsewhere too: where, or as which trap."""
AGAIN = [
    trap
    for trap in (*TRAPS, *DIVIDED)
    if trap.name in KEPT_BY or (trap.name.endswith(" in bf16") and trap.name != BOTH)
]
"""What is found in fp32 too, or of another trap of its kind."""
ALWAYS = (
    "T01", "T17 never", "T22", "T28 stage 2", "late gradients of a rank dropped",
    "unseen beta2",
)  # fmt: skip
"""One of each family: batches, gradients, settings, precision, optimizer."""
ONCE = [trap for trap in (*TRAPS, *DIVIDED) if trap not in AGAIN]


@pytest.mark.parametrize(
    "trap",
    [
        *cheap([trap for trap in ONCE if trap.name in ALWAYS], ONCE),
        *(pytest.param(trap, marks=pytest.mark.exhaustive) for trap in (*AGAIN, *LIBRARIES, *IN_BF16)),
    ],
    ids=lambda trap: trap.name,
)
def test_a_planted_trap_is_named(trap: Trap, matrix: Matrix, tally) -> None:
    assert_named(trap, matrix, tally)


EVEN = TIED.replace("}", ", vocab_size: 258}")
"""All ranks have parts of one size, whichever ranks share them."""
OTHER_BYTES = {
    "T17 volume": ("SynchronisedAtEveryMicroStep", "ddp", (ACCUMULATED,), "synchronised at every micro-step"),
    "T15 volume": ("ReplicasNeverReduced", "fsdp-hybrid", (), "never reduces across replicas"),
    "low": ("LibraryDefaultReduction", "fsdp", (BF16,), "runs in bfloat16, expected float32"),
    "low under DDP": ("Bf16Reduction", "ddp", (), "runs in bfloat16, expected float32"),
    "wide": (
        "WideReduction", "fsdp", (BF16, "runtime.preset=library-defaults"),
        "runs in float32, expected bfloat16",
    ),
    "other ranks": (
        "OtherReplicas", "fsdp-hybrid", (EVEN,), "runs in ranks 0, 3, expected the replica group",
    ),
}  # fmt: skip
"""What is planted, as which backend, in which job, and what must be said."""


@pytest.mark.parametrize("name", first(list(OTHER_BYTES)[:3], OTHER_BYTES))
def test_a_known_implementation_that_moves_other_bytes(name: str, matrix: Matrix, tally) -> None:
    """What should cross the wire is known of built-in backends only, so records are given their names."""
    tally["planted"][1] += 1
    planted, name, settings, says = OTHER_BYTES[name]
    label, world_size = (
        (f"planted-{planted}:shard_size=2", 4) if "hybrid" in name else (f"planted-{planted}", 2)
    )
    record = matrix.record(label, world_size, settings)
    found = Comparison([changed(record, backend={"label": name, "name": name})]).findings
    (finding,) = [f for f in found if f.id == "communication-differs"]
    assert says in finding.message
    assert finding.backends == (name,)
    tally["planted"][0] += 1


@pytest.mark.skipif(accounted_seconds() is None, reason="this system does not say what a thread waited for")
@pytest.mark.parametrize("where", ["Forward", "Backward"])
@pytest.mark.costly
def test_a_rank_that_sleeps_in_each_step_is_named(where: str, matrix: Matrix, tally) -> None:
    tally["planted"][1] += 1
    label = f"planted-SleepsIn{where}"
    found = matrix.compare(["ddp", label], 2, ("training.steps=7", "measure.traced_steps=4")).findings
    (finding,) = [f for f in found if f.id == "slow-rank"]
    assert (finding.backends, finding.values["rank"]) == ((label,), 1)
    assert finding.values["what"] == timing.ASLEEP
    tally["planted"][0] += 1


def test_T23_several_jobs_in_one_table_are_named_by_setting(tally) -> None:
    tally["planted"][1] += 1
    other = make_record(label="ddp", job_id="b" * 12, training={"global_batch_size": 16})
    found = [f for f in Comparison([make_record(), other]).findings if f.id == "several-jobs"]
    assert [f.values for f in found] == [{"training.global_batch_size": [8, 16]}]
    tally["planted"][0] += 1


def test_T25_steps_that_a_loss_scaler_skipped_are_counted(tally) -> None:
    tally["planted"][1] += 1
    training = {"precision": "fp16-mixed"}
    steps = make_steps(norms=(None, None, 1.25, 1.0))
    other = make_record(label="ddp", training=training, steps=steps, skipped_steps=2)
    comparison = Comparison([make_record(training=training), other])
    (found,) = [f for f in comparison.findings if f.id == "skipped-steps"]
    assert found.values == {"skipped": 2, "steps": 4}
    tally["planted"][0] += 1
