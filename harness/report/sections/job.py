"""The job or jobs that the records ran."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.report.document import Block, Folded, Paragraph, Section, yaml_code

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
        job = of_job[0].job
        weights = next((r.initial_weights for r in of_job if r.initial_weights), None)
        built = next((r.model for r in of_job if r.model), None)
        facts = [f"{built.architecture}, attention {built.attention}"] if built else []
        if weights:
            facts.append(f"{weights.parameter_count:,} parameters")
        training = job.training
        data = next((r.data for r in of_job if r.data), None)
        samples = f", {data.training_samples:,} samples" if data else ""
        source = SOURCES.get(job.data.source, job.data.source)
        blocks.append(
            Paragraph(
                f"Job {', '.join([job_id, *facts])}: global batch {training.global_batch_size} samples of "
                f"{job.data.sequence_length} tokens, precision {training.precision}, "
                f"gradient clipping {training.gradient_clipping or 'none'}; data: {source}{samples}."
            )
        )
        blocks.append(Folded(f"Job {job_id}, every setting", [yaml_code(job.model_dump(mode="json"))]))
    return Section("job", "The job", blocks)
