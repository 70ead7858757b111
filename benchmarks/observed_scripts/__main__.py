"""Observes training scripts of public repositories, unchanged, and runs the same jobs by the harness.

`python -m benchmarks.observed_scripts CLONES FOLDER [NAME...]` prints a table. CLONES holds a clone
OWNER+NAME (or OWNER+NAME/repo) of each repository that `cases.yaml` names; FOLDER receives everything else;
NAME is one of a script, such as nlp_example.py. Scripts that need GPUs run on the CUDA stub
(CONTRIBUTING.md), the others elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from tabulate import tabulate

from benchmarks.observed_scripts import inputs
from benchmarks.observed_scripts.case import RANKS, Case, cases
from benchmarks.observed_scripts.figures import collectives, kept_sums, sample_sums, states
from harness.record import Record
from harness.record.store import read_record

HERE = Path(__file__).parent
SEED = "7"
COLUMNS = (
    "repository", "script", "framework", "backend", "steps", "bytes of collectives per rank",
    "bytes of states per rank", "samples", "largest relative difference of losses", "of gradient norms",
)  # fmt: skip


def started(words: list[str], work: Path, name: str, **variables: str) -> None:
    """Run a command in the folder of the case. Raises RuntimeError with its last lines."""
    paths = [str(HERE / "seeded"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "OBSERVED_SCRIPT_SEED": SEED, "WANDB_MODE": "disabled", "HF_HOME": str(work / "cache"), **variables,
    }  # fmt: skip
    log = work / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(words, cwd=work, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {log}\n{log.read_text()[-2000:]}")


def the_record(runs: Path) -> Record:
    (path,) = runs.glob("*/record.json")
    return read_record(path)


def both(case: Case, clones: Path, work: Path) -> tuple[Record, Record]:
    """The records of the script and of the harness; those of an earlier call are kept."""
    if list((work / "own").glob("*/record.json")):
        return the_record(work / "observed"), the_record(work / "own")
    shutil.rmtree(work, ignore_errors=True)
    case.fetch(clones, work)
    if case.inputs is not None:
        getattr(inputs, case.inputs)(work)
    kept = work / "kept"
    kept.mkdir()
    before = set(work.iterdir())
    started(case.words(work), work, "keep", OBSERVED_SCRIPT_KEEP=str(kept))
    for left in set(work.iterdir()) - before:  # checkpoints, from which a script would go on
        if left.is_dir() and left.name != "cache":
            shutil.rmtree(left)
        elif left.is_file() and left.suffix != ".log":
            left.unlink()
    harness = [sys.executable, "-m", "harness"]
    started([*harness, "observe", "--runs", str(work / "observed"), "--", *case.words(work)], work, "observe")
    seen = the_record(work / "observed")
    size = seen.world.micro_batch_size
    complete = [step for step in seen.steps if step.samples == size * RANKS * case.accumulation]
    path = work / "job.yaml"
    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(nested(case.job(work, size, len(complete))), file)
    started(
        [*harness, "run", "--config", str(path), "--backend", case.backend, "--nproc", str(RANKS),
         "--runs", str(work / "own")], work, "own",
    )  # fmt: skip
    return seen, the_record(work / "own")


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in flat.items():
        *parts, last = key.split(".")
        place = document
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return document


def line(case: Case, seen: Record, own: Record, work: Path) -> dict[str, Any]:
    """What the two have in common; a difference in bytes or samples is shown with both sides."""
    count = len(own.steps)
    sums = kept_sums(work / "kept", RANKS, case.accumulation, case.fields)[:count]
    limit = count if case.losses is None else case.losses
    wire = [total(collectives(record)) for record in (seen, own)]
    held = [largest(states(record, case.left_over)) for record in (seen, own)]
    same_wire = collectives(seen) == collectives(own)
    same_states = states(seen, case.left_over) == states(own, case.left_over)
    return {
        "repository": f"{case.repository}@{case.commit[:7]}",
        "script": case.script,
        "framework": case.framework,
        "backend": f"{seen.backend.name.removeprefix('observed-')} ({case.device})",
        "steps": count,
        "bytes of collectives per rank": shown(wire, same_wire),
        "bytes of states per rank": shown(held, same_states),
        "samples": "equal" if sample_sums(seen)[:count] == sums else "differ",
        "largest relative difference of losses": difference(
            [step.loss for step in seen.steps], [step.loss for step in own.steps], limit
        ),
        "of gradient norms": difference(
            [step.gradient_norm for step in seen.steps], [step.gradient_norm for step in own.steps], limit
        ),
    }


def total(rows: dict[Any, tuple[int, int]]) -> int:
    return sum(size for key, (_, size) in rows.items() if key[0] == 0)


def largest(held: dict[Any, dict[str, int]]) -> int:
    return max((sum(kinds.values()) for key, kinds in held.items() if key[0] == 0), default=0)


def shown(values: list[int], equal: bool) -> str:
    return f"{values[0]:,}" if equal else f"{values[0]:,} observed, {values[1]:,} own"


def difference(seen: list[float | None], own: list[float | None], limit: int) -> str:
    pairs = list(zip(seen, own, strict=False))[:limit]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known or len(known) < len(pairs):
        return "n/a"
    return f"{max(abs(a - b) / max(abs(b), 1e-30) for a, b in known):.1e}"


def main() -> None:
    clones, folder, wanted = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]
    device = "cuda" if "CUDA_STUB" in os.environ else "cpu"
    lines = []
    for case in cases():
        if case.device != device or (wanted and Path(case.script).name not in wanted):
            continue
        work = folder / f"{Path(case.script).stem}-{case.backend.partition(':')[0]}"
        seen, own = both(case, clones, work)
        lines.append(line(case, seen, own, work))
    rows = [[found[name] for name in COLUMNS] for found in lines]
    sys.stdout.write(tabulate(rows, headers=COLUMNS, tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
