"""The published reports: what each answers and which command makes it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from harness.job.experiment import ReportFocus

QUESTIONS = get_args(ReportFocus)
MOST_MEGABYTES = 8
"""Of all files below reports/ together."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A folder below reports/ with records and a report."""

    name: str
    question: ReportFocus
    command: str
    """Makes the folder again from nothing."""
    page: str = "report.md"
    """What a reader opens: a report, or a page about several."""


def _make(name: str, repeats: int) -> str:
    return f"make publish NAME={name} CONFIG=configs/{name}.yaml REPEATS={repeats}"


CLUSTER = "python -m benchmarks.{} .cluster/slurm reports/{}"
PUBLISHED = (
    Published(name="default", question="all", command=_make("default", 7)),
    Published(name="full-matrix", question="memory", command=_make("full-matrix", 3)),
    Published(
        name="bloom-560m", question="memory",
        command="harness compare --config configs/bloom-560m.yaml --set training.precision=bf16 "
        "--set data.source=squad --set data.path=FILE",
    ),
    Published(name="twelve-ways", question="footprint", command=_make("twelve-ways", 1)),
    Published(name="twelve-ways-bf16", question="footprint", command=_make("twelve-ways-bf16", 1)),
    Published(name="explain-clipping", question="parity", command=_make("explain-clipping", 1)),
    Published(name="explain-master-weights", question="parity", command=_make("explain-master-weights", 1)),
    Published(name="explain-zero3-speed", question="speed", command=_make("explain-zero3-speed", 7)),
    Published(name="strong-scaling", question="scaling", command=_make("strong-scaling", 7)),
    Published(name="weak-scaling", question="scaling", command=_make("weak-scaling", 7)),
    Published(
        name="over-deepspeed", question="all",
        command="harness report ds-0.17.6 ds-0.18.9 ds-0.19.8 --over deepspeed -o FILE --archive",
    ),
    Published(
        name="same-job-on-nodes", question="parity", page="README.md",
        command=CLUSTER.format("node_scaling", "same-job-on-nodes"),
    ),
    Published(
        name="shaped-links", question="speed", page="README.md",
        command=CLUSTER.format("shaped_links", "shaped-links"),
    ),
    Published(name="gpu-stub", question="memory", page="README.md", command="make gallery-gpu-stub"),
    Published(name="traps", question="parity", page="README.md", command="make gallery"),
)  # fmt: skip


SUBJECTS = {
    "twelve-ways-bf16": "bf16 mixed precision",
    "shaped-links/unshaped": "links not shaped",
    "shaped-links/1000mbit": "links of 1,000 Mbit/s",
    "shaped-links/200mbit": "links of 200 Mbit/s",
}
"""What titles add to the job, where its records do not hold it."""


def question_of(folder: str) -> ReportFocus | None:
    """What the report in a folder, relative to reports/, answers; None: it is none of them."""
    top = folder.split("/")[0]
    return next((published.question for published in PUBLISHED if published.name == top), None)
