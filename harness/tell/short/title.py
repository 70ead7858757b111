"""The title of a report: the job and the question."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forms.flops import STUB
from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.judge.rows import BASE, CellRuns
from harness.judge.wording import listed
from harness.record import Record

QUESTIONS: dict[ReportFocus, str] = {
    "speed": "which strategy is fastest?",
    "memory": "which strategy needs least memory?",
    "footprint": "what does a rank hold and send?",
    "parity": "do the losses agree?",
    "scaling": "how does it scale?",
    "all": "what does each strategy cost, and does it change the training?",
}
CHANGED: dict[ReportFocus, str] = {
    "speed": "speed",
    "memory": "memory",
    "footprint": "memory or traffic",
    "parity": "the loss",
    "scaling": "how it scales",
    "all": "memory, speed, communication or loss",
}
"""What an option may change, by question."""
STRONG = "how much faster do more ranks finish one job?"
WEAK = "what do more ranks cost when the job grows with them?"
PLANTED_PREFIX = "planted-"
LEAST_SHARE = 1 / 3
"""Of the cells next to DDP that have options, where the comparison is about these."""
MOST_VARIED = 2


def title(comparison: Comparison, question: ReportFocus, subject: str = "") -> str:
    """'LlamaForCausalLM with 0.87 M parameters on 2 CPU ranks: which strategy is fastest?'.

    `subject` follows the ranks: what the records do not say of them, such as the speed of links.
    """
    place = f"{rank_words(comparison)}, {subject}" if subject else rank_words(comparison)
    return f"{job_words(comparison)} on {place}: {question_words(comparison, question)}"


def question_words(comparison: Comparison, question: ReportFocus) -> str:
    """The question, by name of the one thing that is varied where there is one.

    That is an option, a deliberate fault, or the kind of scaling.
    """
    labels = list(dict.fromkeys(group.backend for group in _measured(comparison)))
    others = [label for label in labels if label != BASE]
    faults = [label for label in others if label.startswith(PLANTED_PREFIX)]
    if faults and faults == others:
        return f"{'is' if len(faults) == 1 else 'are'} {listed(faults, MOST_VARIED)} found?"
    # What cannot run here shows no change.
    refused = {group.backend for group in comparison.groups if group.record.status == "unsupported"}
    with_options = [label for label in others if ":" in label and label not in refused]
    if LEAST_SHARE * len(others) <= len(with_options) and with_options:
        pairs = [pair for label in with_options for pair in label.partition(":")[2].split(",")]
        options = list(dict.fromkeys(pair.partition("=")[0] for pair in pairs))
        if len(options) > MOST_VARIED:
            return f"which of {len(options)} options change {CHANGED[question]}?"
        verb = "does" if len(options) == 1 else "do"
        return f"{verb} {listed(options)} change {CHANGED[question]}?"
    if question == "scaling":
        return _scaling_words(comparison)
    return QUESTIONS[question]


def _scaling_words(comparison: Comparison) -> str:
    strong, weak = bool(strong_scaling(comparison)), bool(weak_scaling(comparison))
    if strong == weak:
        return QUESTIONS["scaling"]
    return STRONG if strong else WEAK


def _device_word(record: Record) -> str:
    if record.on_stub:
        return STUB
    return "GPU" if record.world.device == "cuda" else "CPU"


def _measured(comparison: Comparison) -> Sequence[CellRuns]:
    """All cells but the reference; the reference where nothing else ran."""
    return [group for group in comparison.groups if not group.is_reference] or comparison.groups


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
    """'2 CPU ranks', '4 and 8 GPU ranks of 1 and 2 nodes'; of the reference only where nothing else ran."""
    groups = _measured(comparison)
    sizes = sorted({group.world_size for group in groups})
    # A record without ranks, such as of an unsupported backend, does not name its device.
    ran = [group for group in groups if group.record.ranks] or groups
    devices = dict.fromkeys(_device_word(group.record) for group in ran)
    nodes = sorted({group.record.world.nodes for group in groups})
    on_nodes = "" if nodes == [1] else f" of {listed([str(n) for n in nodes])} nodes"
    noun = "rank" if sizes == [1] else "ranks"
    return f"{listed([str(size) for size in sizes])} {'/'.join(devices)} {noun}{on_nodes}"
