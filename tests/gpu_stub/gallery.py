"""Publishes the clean matrix on the CUDA stub: records, what the stub of NCCL counted, a report and a page.

Usage: python -m tests.gpu_stub.gallery OUTPUT_FOLDER          (run every cell: minutes on two free cores)
       python -m tests.gpu_stub.gallery OUTPUT_FOLDER --page   (write the page again from what was recorded)

The first needs the stub's environment (`make gallery-gpu-stub`), the second none.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from harness.judge.comparison import Comparison
from harness.judge.facts import BY_KEY
from harness.judge.rows import JudgedRun
from harness.judge.wording import listed
from harness.record.store import ARCHIVE_NAME, RECORD_NAME, read_runs, write_archive
from harness.tell.report import write_report
from tests.gpu_stub.log import Bytes, counted_collectives, told_collectives
from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import PRECISIONS, RANKS, clean_comparison, findings

COUNTS = "counts.json"
REPORTED = "fp32"
"""Of the precisions the one that has a complete report; the others have their records."""
PAGE = """\
# Every backend on a CUDA stub: states, bytes and parity without a GPU

{answer}

No GPU took part: torch's CUDA wheel ran over a stub of the driver and of NCCL, and operators of CUDA
tensors ran on the CPU ([what that shows and what not](../../CONTRIBUTING.md#cuda-stub)). The job is a Llama
of two blocks, 6 steps. Speeds mean nothing there and are left out; peaks are those of the caching
allocator, without what kernels allocate.

'closed form' is what the strategy should hold and send; 'stub' is what the stub of NCCL counted itself in
the same windows, all ranks together (`{counts}`). [The report of fp32]({reported}/report.md) has pictures and
details; `harness report` reads the records of any precision (`{archive}`). `make gallery-gpu-stub` runs
everything again, and a test compares this page with the records.

"""
HEADERS = (
    "backend", "parity", "loss diff", "states MB", "closed form", "sent MB/step", "closed form", "counted MB",
    "stub", "peak MB/rank",
)  # fmt: skip
FIGURES = (
    "model_state_bytes", "expected_model_state_bytes", "sent_bytes_per_step", "expected_sent_bytes_per_step",
)  # fmt: skip


def run_all(output: Path) -> None:
    """Run every cell; replace the folder by their records, counts, report and page."""
    with tempfile.TemporaryDirectory() as name:
        # Elsewhere, since records say if the checkout was clean.
        os.chdir(name)
        made = Path(name, "made")
        for precision in PRECISIONS:
            _run(made / precision, Path(name, "machine", precision), precision)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(made, output)


def _run(output: Path, folder: Path, precision: str) -> None:
    machine = Machine(folder)
    for nproc in RANKS:
        clean_comparison(machine, nproc, precision)
    runs = {record.run_id: record for _, record in read_runs([machine.store.root])[0]}
    output.mkdir(parents=True)
    files = {f"{run_id}/{RECORD_NAME}": _text(machine, run_id) for run_id in sorted(runs)}
    write_archive(output / ARCHIVE_NAME, files, folder="runs")
    counted = {
        run_id: [
            _as_json(counted_collectives(machine.run_directory(record), rank.rank)) for rank in record.ranks
        ]
        for run_id, record in sorted(runs.items())
    }
    lines = [f"{json.dumps(run_id)}: {json.dumps(of_ranks)}" for run_id, of_ranks in counted.items()]
    (output / COUNTS).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if precision == REPORTED:
        archive = output / ARCHIVE_NAME
        write_report(read_runs([archive])[0], output / "report.md", question="memory", folders=[archive])


def _text(machine: Machine, run_id: str) -> bytes:
    return (machine.store.root / run_id / RECORD_NAME).read_bytes()


def _as_json(counted: Bytes) -> dict[str, int]:
    return {f"{op} over {size}": counted[op, size] for op, size in sorted(counted)}


def page(folder: Path) -> str:
    """The page of a folder. Raises ValueError where the stub's counts are not those of a record."""
    parts, cells, wrong = [], 0, []
    backends: set[str] = set()
    published = [precision for precision in PRECISIONS if (folder / precision).is_dir()]
    for precision in published:
        place = folder / precision
        comparison = Comparison(record for _, record in read_runs([place / ARCHIVE_NAME])[0])
        stub: dict[str, list[dict[str, int]]] = json.loads((place / COUNTS).read_text())
        wrong += [f"{found.message}" for found in findings(comparison)]
        for nproc in RANKS:
            rows = [row for row in comparison.rows if row.record.world.world_size == nproc]
            backends |= {row.label for row in rows}
            ran = [row for row in rows if row.record.status == "ok"]
            cells += len(ran)
            wrong += [f"{row.label} is not as its closed forms say" for row in ran if not _as_derived(row)]
            table = tabulate(
                [_line(row, stub[row.record.run_id]) for row in rows], HEADERS, "pipe", disable_numparse=True
            )
            parts += [f"## {precision}, {nproc} ranks", table]
    head = PAGE.format(
        answer=_answer(cells, len(backends), published, wrong),
        counts=COUNTS,
        archive=ARCHIVE_NAME,
        reported=REPORTED,
    )
    return head + "\n\n".join(parts) + "\n"


def _answer(cells: int, backends: int, precisions: Sequence[str], wrong: Sequence[str]) -> str:
    told = f"{cells} cells of {backends} backends in {listed(list(precisions))} on 2 and 4 ranks"
    if not wrong:
        return f"{told} train as one process does, and hold and send what closed forms say, to the byte."
    return f"{told} ran; findings: {'; '.join(dict.fromkeys(wrong))}."


def _line(row: JudgedRun, stub: Sequence[dict[str, int]]) -> list[str]:
    record = row.record
    if record.status != "ok":
        return [row.label, record.status, *[""] * (len(HEADERS) - 2)]
    told = [_as_json(told_collectives(record, rank.rank)) for rank in record.ranks]
    if told != list(stub):
        raise ValueError(f"{record.run_id}: the record counts {told}, the stub of NCCL {list(stub)}")
    difference = row.judgement.loss_difference
    return [
        row.label, row.judgement.parity, "n/a" if difference is None else f"{difference:.2g}",
        *map(_megabytes, _figures(row)), _megabytes(_total(told)), _megabytes(_total(stub)),
        _megabytes(max(row.run.rank_peaks)),
    ]  # fmt: skip


def _as_derived(row: JudgedRun) -> bool:
    """Whether states and bytes have closed forms and equal them."""
    states, derived_states, sent, derived_sent = _figures(row)
    return None not in (states, sent) and (states, sent) == (derived_states, derived_sent)


def _figures(row: JudgedRun) -> list[float | None]:
    return [BY_KEY[key].read(row.run, row.judgement) for key in FIGURES]


def _total(counted: Iterable[dict[str, int]]) -> int:
    return sum(size for of_rank in counted for size in of_rank.values())


def _megabytes(size: float | None) -> str:
    return "n/a" if size is None else f"{size / 1e6:.6f}"


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    if "--page" not in sys.argv:
        run_all(where)
    (where / "README.md").write_text(page(where), encoding="utf-8")
