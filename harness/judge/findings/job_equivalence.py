"""Runs that trained another job than their reference, and tables with several jobs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends.registry import REFERENCE
from harness.judge.findings.finding import Finding, Kind
from harness.judge.parity import has_dropout
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.run import Run
from harness.judge.wording import both
from harness.nested import differences, value_at

CUT = {("training", name) for name in ("global_batch_size", "micro_batch_size", "accumulation_steps")}
"""Settings that weak scaling changes with the number of ranks."""
KINDS = (
    Kind(
        id="several-jobs",
        title="The table holds runs of different jobs",
        cause="Batch, sequence length, model, data, optimizer or precision were changed between runs, so "
        "the rows are not comparable with each other. Batches that grow with the ranks (weak scaling) are "
        "not reported if nothing else differs.",
        confirm="The values list every setting that differs.",
        fix="Compare rows of one job only. For strong scaling fix `training.global_batch_size`.",
    ),
    Kind(
        id="not-same-job",
        title="A run trained something other than its reference, so it is not compared",
        cause="A setting that changes the mathematics differs.",
        confirm="The message names the first field that differs; the values hold both sides.",
        fix="Use the same setting for both.",
    ),
    Kind(
        id="initial-weights-differ",
        title="Initial weights differ",
        cause="The model was initialised from another seed, often one per rank without synchronisation; or "
        "it was cast, resized or loaded differently before training.",
        confirm="Compare the digests of the initial weights in the records; `ranks[].initial_digest` "
        "has them per rank.",
        fix="Use the same seed on every rank before building the model. FSDP1: `sync_module_states=True`; "
        "FSDP2: load or broadcast a full state dict; DDP and DeepSpeed broadcast from rank 0 themselves.",
    ),
    Kind(
        id="parameters-differ",
        title="Parameter count or tied weights differ",
        cause="A tied embedding was untied by sharding or by loading, or the vocabulary was resized. Or "
        "weights were read from partitioned parameters without gathering them: those of ZeRO-3 have shape "
        "(0,), as in `peft.get_peft_model_state_dict(engine.module)`.",
        confirm="Compare `initial_weights.parameter_count` and `observed.tied_parameters` of the records.",
        fix="Tie the weights after sharding (`model.tie_weights()`), and wrap tied modules in one unit. "
        "Read weights of ZeRO-3 within `deepspeed.zero.GatheredParameters`.",
    ),
    Kind(
        id="samples-repeated",
        title="Samples are repeated across ranks",
        cause="Some or all ranks trained on the same batch: the data is not split over ranks.",
        confirm="`ranks[].batch_digests` of the record lists the samples that reached the model in the first "
        "steps.",
        fix="Use a `DistributedSampler` or let Accelerate or DeepSpeed shard the loader, but one of them "
        "only. Accelerate with DeepSpeed and `cpu=True` assumes a single process: take rank and world size "
        "from torch.distributed.",
    ),
    Kind(
        id="peers-fed-differently",
        title="Ranks that should share samples were fed different ones",
        cause="Tensor, sequence and pipeline parallel ranks compute one model together and need the same "
        "samples. Each was given a share of its own, as data-parallel ranks are: the run goes on, and trains "
        "on mixtures of unrelated activations.",
        confirm="`ranks[].batch_hash_sums` of the record differ between ranks with the same data rank; "
        "`world.dimensions` says which these are.",
        fix="Split the data along the data dimension of the device mesh: number of replicas and rank of a "
        "`DistributedSampler` are those of that dimension, not the world's.",
    ),
    Kind(
        id="samples-missing",
        title="Samples are missing",
        cause="The data was sharded twice, by the sampler and again by the library, so part of each batch is "
        "lost.",
        confirm="`ranks[].batch_digests` of the record lists the samples that reached the model in the first "
        "steps.",
        fix="Shard once: hand `accelerator.prepare` an unsharded loader, or do not prepare the loader; do "
        "not give `deepspeed.initialize` training data that is already split.",
    ),
    Kind(
        id="samples-differ",
        title="Samples differ",
        cause="Another order, other tokens or labels, or both repeated and missing samples.",
        confirm="Compare the sample hashes of the steps, `ranks[].batch_digests` (the first steps) and "
        "`ranks[].batch_hash_sums` (every step) of the records.",
        fix="Fix the seed of the shuffle, call `sampler.set_epoch`, and tokenise once for all.",
    ),
    Kind(
        id="learning-rate-differs",
        title="Learning-rate trace differs",
        cause="The schedule is stepped once per process or per micro-step, or the library runs its own.",
        confirm="Compare `learning_rate` and `applied_learning_rate` of the steps in the record.",
        fix="Step the scheduler once per optimizer step. Accelerate: a prepared scheduler steps once per "
        "process unless `split_batches=True` or `step_scheduler_with_optimizer=False`; DeepSpeed: leave "
        "`scheduler` out of its configuration if you step your own.",
    ),
    Kind(
        id="optimizer-steps-differ",
        title="Optimizer steps per sample differ",
        cause="Accumulation is not honoured: the optimizer steps at every micro-batch, or too rarely.",
        confirm="`observed.optimizer_steps` against the number of steps in the record.",
        fix="DeepSpeed: `gradient_accumulation_steps` must equal the loop's; Accelerate: use "
        "`accelerator.accumulate`; torch: step only after the last micro-batch.",
    ),
    Kind(
        id="not-deterministic",
        title="The job is not deterministic, so parity cannot be judged",
        cause="Dropout is active: two runs differ by chance, whatever the backend.",
        confirm="`model.dropout` of the job, or `observed.dropout` of the record, is not 0.",
        fix="Judge parity with dropout 0, and train with dropout afterwards.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """Jobs side by side, then for each run everything in which it is another job."""
    found = _several_jobs(runs.rows)
    for row in runs.rows:
        # `_several_jobs` reports once that a table holds several jobs.
        for difference in () if row.is_of_another_job else row.judgement.not_same_job:
            given, other = both(difference.given, difference.reference)
            whose = "the reference" if row.reference is row.same_job_as else _name(row.same_job_as)
            found.append(
                Finding(
                    id=difference.kind,
                    about=row.cell,
                    text=f"{difference.differs} from {whose}: {given} against {other}",
                    values={"reference": difference.reference, "given": difference.given},
                )
            )
        live = row.record.observed.dropout if row.record.observed else None
        if row.record.status == "ok" and has_dropout(row.record):
            found.append(
                Finding(
                    id="not-deterministic",
                    about=row.cell,
                    text="dropout is active, so runs differ by chance and parity cannot be judged",
                    values={"job": row.record.job.model.dropout, "live": live},
                )
            )
    return found


def _several_jobs(rows: Sequence[Row]) -> list[Finding]:
    jobs = {row.record.job_id: row.record.job.model_dump() for row in rows}
    if len(jobs) < 2:
        return []
    first, *others = jobs.values()
    differing = dict.fromkeys(keys for other in others for keys, _, _ in differences(first, other))
    if differing.keys() <= CUT and _grows_with_ranks(rows):
        return []
    values = {".".join(keys): [value_at(job, keys) for job in jobs.values()] for keys in differing}
    named = "; ".join(f"{path}: {' / '.join(map(str, given))}" for path, given in values.items())
    return [
        Finding(
            id="several-jobs",
            about=tuple(sorted({row.label for row in rows})),
            text=f"not the same job: these rows belong to {len(jobs)} jobs, each compared with its own "
            f"reference only ({named or 'the contents of their files differ'})",
            values=values,
        )
    ]


def _grows_with_ranks(rows: Sequence[Row]) -> bool:
    """Whether every rank of every run has equally many samples: weak scaling, which is no mistake."""
    records = [row.record for row in rows if row.record.backend.name != REFERENCE]
    if len({record.world.world_size for record in records}) < 2:
        return False
    return len({(r.job.training.global_batch_size or 0) / r.world.world_size for r in records}) == 1


def _name(run: Run | None) -> str:
    """The run that replaces a reference without a result."""
    return "the others" if run is None else f"{run.label}, as the reference has no result"
