"""What was seen of each injection, judged: kept as JSON lines, shown as a page."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate

from harness.tell.formats import shortened
from tests.faults.injection import BACKENDS, KINDS, kind_of
from tests.faults.judge import untruths
from tests.faults.scene import PHASE_SECONDS, STUCK_SECONDS, Seen

LONGEST_MESSAGE = 150
PAGE = """\
{count} faults were injected into real ranks: {kinds} kinds in ddp, zero3 and fsdp, {repeats} times each, at a
rank, phase and step drawn with the seed {seed}. {truthful} records are truthful, {hangs} commands hung,
{left} injections left something behind, and for {complete} of {compared} within comparisons all other cells
are complete.

`make faults` runs all of them again and writes this section and [the list of all](faults/injected.csv); it
needs Linux and root. Ranks are two processes on the CPU over gloo, the model is a Llama of two blocks, and a
run takes six steps with two evaluations and a checkpoint. Versions: {versions}.

- A record is truthful if status, kind, rank, step, phase, exit code and message are those of the fault. For
  ranks that stand still it must have the stacks of all that can answer; for ranks that disagree on
  collectives it must show both, since who is wrong cannot be known.
- `runtime.stuck_after_seconds` is {stuck:g} and `runtime.phase_timeout_seconds` is {phase:g}, so that a hang
  takes less time than with the defaults.
- Left behind counts processes, listening ports, shared memory, temporary files, and unfinished files in the
  runs folder. A command that is killed by SIGKILL cannot remove its temporary folder: the next one does.
- Where the comparison itself ends (full disk, read-only folder, signals), it is called again, and then all of
  its cells must be complete. Records that could not be written are written by the next call.
- `network` breaks runs under torchrun on two network namespaces, which have no other cells.
- `device-memory` raises the exception of CUDA's allocator in a rank on the CPU; `make test-gpu-stub`
  exercises the allocator itself.

{by_kind}

Seconds pass from the fault to the record of its run; n/a: the next call of the command wrote it."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One injection, judged."""

    name: str
    kind: str
    backend: str
    rank: int
    phase: str
    step: int | None
    status: str
    error: str
    message: str
    seconds: float | None
    wrong: list[str]
    """Why the record is not truthful; empty: it is."""
    hung: bool
    left: list[str]
    others_complete: bool | None
    """None: there are no others."""


def judged(seen: Seen) -> Result:
    """What counts of an injection."""
    injection, record, happened = seen.injection, seen.record, seen.happened or {}
    error = record.error if record is not None else None
    written_at_once = kind_of(injection).scope in ("ranks", "network") or injection.kind != "launcher-killed"
    return Result(
        name=injection.name,
        kind=injection.kind,
        backend=injection.backend,
        rank=injection.rank,
        phase=str(happened.get("phase", injection.phase)),
        step=happened.get("step"),  # type: ignore[arg-type]
        status=record.status if record is not None else "no record",
        error=error.kind if error is not None else "",
        message=error.message if error is not None else "",
        seconds=seen.record_seconds if written_at_once and kind_of(injection).scope != "files" else None,
        wrong=untruths(seen),
        hung=any(call.code is None for call in seen.calls),
        left=[*seen.left, *(line for call in seen.calls for line in call.left)],
        others_complete=seen.others_complete,
    )


def append(path: Path, results: Iterable[Result]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


def read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def failures(results: Iterable[Result]) -> list[str]:
    """One line for each injection that did not end as it should."""
    found = []
    for result in results:
        lines = [*result.wrong, *(["hung"] if result.hung else []), *(f"left {line}" for line in result.left)]
        lines += ["other cells are not complete"] if result.others_complete is False else []
        if lines:
            found.append(f"{result.name}: {'; '.join(lines)}")
    return found


def section(results: Sequence[Result], seed: int, versions: str) -> str:
    """What stands between the marks of docs/faults.md."""
    kinds = [kind for kind in KINDS if any(result.kind == kind.name for result in results)]
    return PAGE.format(
        count=len(results),
        kinds=len(kinds),
        repeats=max(int(result.name.rpartition("-")[2]) for result in results) + 1,
        seed=seed,
        versions=versions,
        stuck=STUCK_SECONDS,
        phase=PHASE_SECONDS,
        truthful=sum(not result.wrong for result in results),
        hangs=sum(result.hung for result in results),
        left=sum(bool(result.left) for result in results),
        complete=sum(result.others_complete is True for result in results),
        compared=sum(result.others_complete is not None for result in results),
        by_kind=_by_kind(results),
    )


def _by_kind(results: Sequence[Result]) -> str:
    rows = []
    for kind in KINDS:
        own = [result for result in results if result.kind == kind.name]
        if own:
            ended = sorted({f"{result.status} {result.error}".strip() for result in own})
            truthful = f"{sum(not result.wrong for result in own)} of {len(own)}"
            seconds = sorted(result.seconds for result in own if result.seconds is not None)
            spread = f"{seconds[0]:.1f} to {seconds[-1]:.1f}" if seconds else "n/a"
            rows.append([f"`{kind.name}`", kind.what, truthful, ", ".join(ended), spread])
    headers = ["fault", "what happens", "truthful", "ends as", "seconds"]
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)


def table_of_all(results: Sequence[Result]) -> str:
    """Every injection as a line of CSV."""
    order = [kind.name for kind in KINDS]
    rows = [
        [
            result.kind,
            result.backend,
            result.rank,
            result.phase if result.step is None else f"{result.phase}, step {result.step}",
            f"{result.status} {result.error}".strip(),
            shortened(result.message, LONGEST_MESSAGE),
            "yes" if not result.wrong else f"no: {'; '.join(result.wrong)}",
            "; ".join(result.left) or "none",
            {True: "yes", False: "no", None: "n/a"}[result.others_complete],
        ]
        for result in sorted(results, key=lambda r: (order.index(r.kind), BACKENDS.index(r.backend), r.name))
    ]
    headers = [
        "fault", "backend", "rank", "where", "ends as", "message", "truthful", "left behind",
        "others complete",
    ]  # fmt: skip
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([headers, *rows])
    return written.getvalue()
