"""Labels that stand at the positions of other tokens."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, Kind
from harness.judge.repeats import Runs
from harness.judge.rows import Row

KINDS = (
    Kind(
        id="labels-misplaced",
        title="Labels stand at the positions of other tokens",
        cause="Prompt and answer were tokenised apart, and the answer became the labels of a sequence that "
        "does not contain it: the model is trained to name, after tokens of the prompt, tokens that it never "
        "reads. The loss falls all the same.",
        confirm="The values hold the labels that are not the token at their position, of all samples, and "
        "`data.targets` of the job.",
        fix="Tokenise prompt and answer as one sequence, and set the labels of the prompt to -100. Of "
        "Transformers: `DataCollatorForLanguageModeling`, or `prompt` and `completion` of TRL; a causal "
        "model shifts the labels by itself.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per job, about the backends that trained on it."""
    found = []
    for job_id in dict.fromkeys(row.record.job_id for row in runs.rows):
        rows = [row for row in runs.rows if row.record.job_id == job_id and _misplaced(row)]
        if rows:
            data, count = rows[0].record.data, _misplaced(rows[0])
            assert data is not None
            found.append(
                Finding(
                    id="labels-misplaced",
                    about=tuple(sorted({row.label for row in rows})),
                    text=f"{count:,} of {data.target_tokens:,} labels are not the token at their position: "
                    "what is trained is no continuation of the text",
                    values={"misplaced_labels": count, "target_tokens": data.target_tokens}
                    | {"targets": rows[0].record.job.data.targets},
                )
            )
    return found


def _misplaced(row: Row) -> int:
    return row.record.data.misplaced_labels if row.record.data else 0
