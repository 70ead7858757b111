"""The job or jobs that the records ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.backends.registry import REFERENCE
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.record.workload import layout_of
from harness.report.document import Block, Folded, Paragraph, Section, yaml_code

PRECISIONS = {
    "fp8": "fp8 (emulated: these runs show numerics only; speed and memory say nothing of fp8 hardware)"
}
SOURCES = {"prose": "prose, the English help texts of the Python that ran"}


def job_section(comparison: Comparison) -> Section:
    """Each job in a sentence, every setting folded."""
    ids = list(dict.fromkeys(row.record.job_id for row in comparison.rows))
    blocks: list[Block] = []
    if len(ids) > 1:
        blocks.append(
            Paragraph(
                f"These records hold {len(ids)} jobs. A run is compared only with the reference of its "
                "own job."
            )
        )
    for job_id in ids:
        of_job = [row.record for row in comparison.rows if row.record.job_id == job_id]
        weights = next((r.initial_weights for r in of_job if r.initial_weights), None)
        built = next((r.model for r in of_job if r.model), None)
        facts = [f"{built.architecture}, attention {built.attention}"] if built else []
        if weights:
            facts.append(f"{weights.parameter_count:,} parameters")
        if of_job[0].job.model.trust_remote_code:
            facts.append(f"code of '{of_job[0].job.model.name}' ran (trust_remote_code)")
        facts += _adapters(of_job)
        blocks.append(Paragraph(f"Job {', '.join([job_id, *facts])}: {_trained(of_job)}."))
        blocks.append(Folded(f"Job {job_id}, every setting", [yaml_code(_settings(of_job))]))
    return Section("job", "The job", blocks)


def _trained(records: Sequence[Record]) -> str:
    """'global batch 8 samples of 64 tokens, precision fp32, ...; data: text'."""
    job = records[0].job
    training = job.training
    batch = f"global batch {_known(training.global_batch_size)} samples"
    facts = [batch if job.data.sequence_length is None else f"{batch} of {job.data.sequence_length} tokens"]
    facts.append(f"precision {_known(PRECISIONS.get(training.precision, training.precision))}")
    facts.append(f"gradient clipping {training.gradient_clipping or 'none'}")
    data = next((r.data for r in records if r.data), None)
    samples = f", {data.training_samples:,} samples" if data else ""
    source = SOURCES.get(job.data.source, job.data.source)
    return f"{', '.join(facts)}; data: {_known(source)}{samples}"


def _known(value: Any) -> str:
    """As text; what was not seen of an observed script is 'n/a'."""
    return "n/a" if value is None else str(value)


def _adapters(records: Sequence[Record]) -> list[str]:
    """What is trained of a model whose weights are frozen."""
    adapter = records[0].job.adapter
    if not adapter.is_present:
        return []
    part = next((r.layout for r in records if r.layout), None)
    trained = f", {layout_of(part).trained_count:,} of them trained" if part else ""
    return [f"adapters of rank {adapter.rank} (alpha {adapter.alpha:g}){trained}"]


def _settings(records: Sequence[Record]) -> dict[str, Any]:
    """The job of these records with the cut of its batch as it ran.

    The cut is no part of a job's identity. Where cells differ in it, it stands in the table of layouts only.
    """
    settings = records[0].job.model_dump(mode="json")
    worlds = [record.world for record in records if record.backend.name != REFERENCE]
    for key in ("micro_batch_size", "accumulation_steps"):
        del settings["training"][key]
        ran = {getattr(world, key) for world in worlds or [record.world for record in records]}
        if len(ran) == 1:
            settings["training"][key] = ran.pop()
    return settings
