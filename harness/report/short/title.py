"""The title of a report: the job and the question."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.wording import listed
from harness.spec import Question

QUESTIONS: dict[Question, str] = {
    "speed": "which strategy is fastest?",
    "memory": "which strategy needs least memory?",
    "parity": "do the losses agree?",
    "scaling": "how does it scale?",
    "all": "memory, speed, communication and loss of each strategy",
}


def title(comparison: Comparison, question: Question) -> str:
    """'LlamaForCausalLM with 0.87 M parameters on 2 CPU ranks: which strategy is fastest?'."""
    return f"{job_words(comparison)} on {rank_words(comparison)}: {QUESTIONS[question]}"


def job_words(comparison: Comparison) -> str:
    """The models that ran, with their number of parameters in millions."""
    records = [row.record for row in comparison.rows]
    models = {
        (
            record.model.architecture if record.model else "model",
            record.initial_weights.parameter_count if record.initial_weights else None,
        ): None
        for record in records
        if record.model or record.initial_weights
    }
    names = [f"{name} with {count / 1e6:.3g} M parameters" if count else name for name, count in models]
    return listed(names, 2) or "One job"


def rank_words(comparison: Comparison) -> str:
    """'2 CPU ranks', '1, 2 and 4 CPU ranks'; of the reference only where nothing else ran."""
    groups = [group for group in comparison.groups if not group.is_reference] or comparison.groups
    sizes = sorted({group.world_size for group in groups})
    devices = dict.fromkeys("GPU" if group.record.world.device == "cuda" else "CPU" for group in groups)
    noun = "rank" if sizes == [1] else "ranks"
    return f"{listed([str(size) for size in sizes])} {'/'.join(devices)} {noun}"
