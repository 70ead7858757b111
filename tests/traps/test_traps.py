"""Every known trap is planted and must be found, named, and told of the right backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from harness.compare.findings.catalogue import find_all
from harness.compare.findings.finding import Finding
from harness.compare.rows import make_rows
from harness.record import Record
from tests.records import make_ranks, make_record, make_steps

from .matrix import CLEAN_SIZES, Matrix, clean_labels, padded_documents

UNCLIPPED = "training.gradient_clipping=null"
ACCUMULATED = "training.accumulation_steps=4"
BF16 = "training.precision=bf16-mixed"
TIED = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16, tie_word_embeddings: true}"
)


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A defect, the job in which it shows, and the finding that must name it."""

    name: str
    label: str
    finding: str
    says: str = ""
    """Words of the message."""
    also: tuple[str, ...] = ()
    """Further findings that are true of it; the one above comes first, and any other is an untrue cause."""
    settings: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    world_size: int = 2
    padded: bool = field(default=False)


TRAPS = [
    Trap(name="T01", label="zero1:default_clipping=true", finding="clipping-differs",
         says="differs: 1 against none", settings=(UNCLIPPED,), also=("update-differs",)),
    Trap(name="T02", label="fsdp:masters=compute", finding="master-dtype-differs", says="bfloat16",
         settings=(BF16,), also=("lost-updates", "update-differs", "memory-differs")),
    Trap(name="T03", label="planted-Bf16Reduction", finding="reduce-dtype-differs",
         says="reduced in bfloat16", beside=("ddp",), also=("gradient-differs",)),
    Trap(name="T04", label="planted-GradientsSummed", finding="gradient-scale",
         says="x 2: summed over 2 ranks"),
    Trap(name="T05", label="planted-DividedTwice", finding="gradient-scale",
         says="x 0.25: divided by the 4 accumulation steps again", settings=(ACCUMULATED,)),
    Trap(name="T06", label="planted-StepsAtEveryMicroBatch", finding="optimizer-steps-differ",
         says="24 against 6", settings=(ACCUMULATED,), also=("replicas-differ",)),
    Trap(name="T07", label="planted-MeanPerRank", finding="loss-normalisation", says="per-rank means",
         padded=True),
    Trap(name="T08", label="planted-SameBatchOnEveryRank", finding="samples-repeated"),
    Trap(name="T09", label="planted-ShardedTwice", finding="samples-missing"),
    Trap(name="T10", label="planted-SeedPerRank", finding="initial-weights-differ"),
    Trap(name="T11", label="planted-ScheduleOncePerProcess", finding="learning-rate-differs"),
    Trap(name="T13", label="planted-Untied", finding="parameters-differ", says="tied parameters",
         settings=(TIED,)),
    Trap(name="T14", label="fsdp1", finding="strategy-differs", says="NO_SHARD differs", world_size=1),
    Trap(name="T12", label="planted-WholeModelInOneUnit", finding="one-wrap-unit", says="of 2 blocks"),
    Trap(name="T15", label="planted-ReplicasNeverReduced:shard_size=2", finding="replicas-differ",
         says="ranks 0, 1 against ranks 2, 3", world_size=4),
    Trap(name="T17 never", label="planted-NeverReduced", finding="replicas-differ",
         says="ranks 0 against ranks 1", settings=(ACCUMULATED,)),
    Trap(name="T17 always", label="planted-SynchronisedAtEveryMicroStep", finding="synchronised-early",
         says="in every micro-step", settings=(ACCUMULATED,)),
    Trap(name="T16", label="planted-NormOfTheShard", finding="norm-of-shard"),
    Trap(name="T18", label="planted-DecayOnEverything", finding="optimizer-differs", says="constants",
         also=("update-differs",)),
    Trap(name="T18 swapped groups", label="planted-SwappedDecayGroups", finding="optimizer-differs",
         says="weight_decay 0.0", also=("update-differs",)),
    Trap(name="T18 rate of a group", label="planted-LearningRateOfOneGroup",
         finding="learning-rate-differs"),
    Trap(name="T21 checkpointing", label="planted-Checkpointed", finding="step-environment-differs",
         says="activation checkpointing"),
    Trap(name="T21 attention", label="planted-EagerAttention", finding="step-environment-differs",
         says="attention kernel"),
    Trap(name="T21 compile", label="planted-Compiled", finding="step-environment-differs", says="compiled"),
    Trap(name="T21 TF32", label="planted-Tf32", finding="step-environment-differs", says="TF32"),
    Trap(name="T22", label="planted-LiveDropout", finding="not-deterministic"),
    Trap(name="T24", label="planted-HoardingRank", finding="memory-imbalance"),
    Trap(name="unseen clipping", label="planted-OwnClipping", finding="clipping-differs",
         says="0.25 against 1", also=("update-differs",)),
    Trap(name="unseen gradient cut", label="planted-NoGradientOfOneParameter", finding="gradient-differs",
         says="no gradient reaches model.layers.1.post_attention_layernorm.weight"),
    Trap(name="unseen optimizer by hand", label="planted-HandWrittenOptimizer", finding="update-differs"),
    Trap(name="late gradients of a rank dropped", label="planted-LateGradientsOfOneRankDropped",
         finding="gradient-differs", says="of step 3"),
    Trap(name="late same batch", label="planted-LateSameBatchOnEveryRank", finding="samples-repeated",
         says="of step 3"),
    Trap(name="late loss of rank 0", label="planted-LateLossOfRankZero", finding="loss-of-one-rank",
         says="from step 3 on"),
    Trap(name="late decay on everything", label="planted-LateDecayOnEverything",
         finding="optimizer-differs", says="weight_decay 10.0", also=("update-differs",)),
]  # fmt: skip
UNSEEN = [
    Trap(name="beta2", label="planted-WrongBeta2", finding="optimizer-differs", says="0.999",
         also=("update-differs",)),
    Trap(name="epsilon", label="planted-WrongEpsilon", finding="optimizer-differs", says="eps 1e-05",
         also=("update-differs",)),
    Trap(name="parameter left out", label="planted-ParameterLeftOut", finding="optimizer-differs",
         says="model.layers.1.mlp.up_proj.weight", also=("parameters-not-updated",)),
    Trap(name="decay on everything", label="planted-OwnDecayOnEverything", finding="optimizer-differs",
         says="constants", also=("update-differs",)),
    Trap(name="micro-step skipped", label="planted-LastMicroStepSkipped", finding="gradient-differs",
         settings=(ACCUMULATED,)),
    Trap(name="gradients of a rank dropped", label="planted-GradientsOfOneRankDropped",
         finding="gradient-differs"),
    Trap(name="stale weights", label="planted-StaleWeightsOnOneRank", finding="replicas-differ"),
    Trap(name="loss of rank 0", label="planted-LossOfRankZero", finding="loss-of-one-rank"),
    Trap(name="loss of rank 0 on all", label="planted-LossOfRankZeroForAll", finding="loss-of-one-rank"),
]  # fmt: skip


TRAPS += [replace(trap, name=f"unseen {trap.name}") for trap in UNSEEN]
TRAPS += [
    replace(trap, name=f"unseen {trap.name} in bf16", settings=(*trap.settings, BF16)) for trap in UNSEEN
]


@pytest.mark.long
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_planted_trap_is_named(trap: Trap, matrix: Matrix, tally, tmp_path_factory) -> None:
    tally["planted"][1] += 1
    settings = trap.settings
    if trap.padded:
        path = matrix.store.root.parent / "documents.jsonl"
        settings += ("data.source=jsonl", f"data.path={padded_documents(path)}")
    found = matrix.findings([*trap.beside, trap.label], trap.world_size, settings)
    named = [f for f in found if f.id == trap.finding and trap.says in f.message]
    label = trap.label.replace("=true", "=True")
    assert named, [(f.id, f.message) for f in found]
    assert all(f.backends == (label,) for f in found), found
    ids = [f.id for f in found if f.id != "diverged"]
    assert ids[0] == trap.finding
    assert set(ids) <= {trap.finding, *trap.also}
    tally["planted"][0] += 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("label", "name", "world_size", "says"),
    [
        ("planted-SynchronisedAtEveryMicroStep", "ddp", 2, "synchronised at every micro-step"),
        ("planted-ReplicasNeverReduced:shard_size=2", "fsdp-hybrid", 4, "never reduces across replicas"),
    ],
    ids=["T17 volume", "T15 volume"],
)
def test_a_known_implementation_that_moves_other_bytes(
    label: str, name: str, world_size: int, says: str, matrix: Matrix, tally
) -> None:
    """What should cross the wire is known of built-in backends only, so records are given their names."""
    tally["planted"][1] += 1
    planted = matrix.record(label, world_size, (ACCUMULATED,) if world_size == 2 else ())
    backend = planted.backend.model_copy(update={"label": name, "name": name})
    found = find_all(make_rows([planted.model_copy(update={"backend": backend})]))
    (finding,) = [f for f in found if f.id == "communication-differs"]
    assert says in finding.message
    assert finding.backends == (name,)
    tally["planted"][0] += 1


def timed_findings(record: Record) -> list[Finding]:
    """Of one run beside a reference whose steps are timed alike."""
    phases = {"forward": [0.1] * 4, "backward": [0.3] * 4, "step": [0.05] * 4}
    parts = [part.model_copy(update={"phase_seconds": phases}) for part in record.ranks]
    return find_all(make_rows([make_record(), record.model_copy(update={"ranks": parts})]))


def test_T19_a_timer_that_stops_before_the_device_has_finished(tally) -> None:
    tally["planted"][1] += 1
    record = make_record(label="ddp", ranks=[
        part.model_copy(update={"step_seconds": [0.02] * 4}) for part in make_ranks(2)
    ])  # fmt: skip
    world = record.world.model_copy(update={"device": "cuda"})
    found = timed_findings(record.model_copy(update={"world": world}))
    assert [f.id for f in found if f.id in ("inconsistent-timing", "faster-than-possible")] == [
        "inconsistent-timing"
    ]
    assert "timer stopped too early" in next(f.message for f in found if f.id == "inconsistent-timing")
    tally["planted"][0] += 1


def test_T20_a_logger_of_a_library_that_slows_one_backend(tally) -> None:
    tally["planted"][1] += 1
    record = make_record(label="zero1")
    config = {"comms_logger": {"enabled": True}}
    backend = record.backend.model_copy(update={"native_config": config})
    (found,) = timed_findings(record.model_copy(update={"backend": backend}))
    assert found.id == "instrumented-timing"
    assert found.backends == ("zero1",)
    assert "comms_logger" in found.message
    tally["planted"][0] += 1


def test_T23_several_jobs_in_one_table_are_named_by_setting(tally) -> None:
    tally["planted"][1] += 1
    other = make_record(label="ddp", job_id="b" * 12, training={"global_batch_size": 16})
    found = [f for f in find_all(make_rows([make_record(), other])) if f.id == "several-jobs"]
    assert [f.values for f in found] == [{"training.global_batch_size": [8, 16]}]
    tally["planted"][0] += 1


def test_T25_steps_that_a_loss_scaler_skipped_are_counted(tally) -> None:
    tally["planted"][1] += 1
    training = {"precision": "fp16-mixed"}
    steps = make_steps(norms=(None, None, 1.25, 1.0))
    other = make_record(label="ddp", training=training, steps=steps, skipped_steps=2)
    rows = make_rows([make_record(training=training), other])
    (found,) = [f for f in find_all(rows) if f.id == "skipped-steps"]
    assert found.values == {"skipped": 2, "steps": 4}
    tally["planted"][0] += 1


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("world_size", CLEAN_SIZES)
def test_a_clean_matrix_has_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
) -> None:
    settings = (f"training.precision={precision}", f"training.accumulation_steps={accumulation}")
    labels = clean_labels(world_size)
    found = matrix.findings(labels, world_size, (*settings, "training.global_batch_size=16"))
    tally["clean"][0] += len(found)
    tally["clean"][1] += len(labels)
    assert [(f.id, f.message) for f in found] == []
    rows = matrix.rows(labels, world_size, (*settings, "training.global_batch_size=16"))
    wanted = {"exact", "tight"} if precision == "fp32" else {"exact", "tight", "band"}
    assert {row.judgement.parity for row in rows} <= wanted
