"""The scripts of examples/observe, each under every strategy that this machine runs, by `harness compare`.

`python benchmarks/scripts_table.py FOLDER [SCRIPT...]` prints a table; on the CUDA stub (CONTRIBUTING.md)
that of its strategies. FOLDER receives the job and the runs; a row that has a record is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.judge.facts import SENT

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "observe"
BUILD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.harness.rank.observing.test_scripts import make_job
make_job(Path.cwd())
"""
ARGUMENTS = ("--model", "model", "--text", "text.txt", "--length", "32", "--steps", "8")
STRATEGIES = {"cpu": "ddp,zero1,zero2,zero3,fsdp", "cuda": "ddp,fsdp,fsdp1,zero1,zero2,zero3"}
GIVEN = ("hf_trainer.py", "accelerate_loop.py")
"""Those that take their strategy from Accelerate."""
THEIR_OWN = {
    "torch_ddp.py": {"ddp": "", "fsdp": "--fsdp", "fsdp1": "--fsdp1"},
    "lightning_module.py": {"ddp": ""},
    "deepspeed_zero.py": {f"zero{stage}": f"--stage {stage}" for stage in (1, 2, 3)},
}
"""Those that choose it, with their arguments by row."""
COLUMNS = (
    "script", "row", "sent, bytes per step and rank", "model states, bytes per rank", "parity",
    "largest difference of losses",
)  # fmt: skip


def compared(folder: Path, script: str, device: str) -> dict[str, Any]:
    """What `harness compare --json` says of a script's rows. Raises CalledProcessError."""
    path = str(EXAMPLES / script)
    if script in GIVEN:
        words = ["--backends", STRATEGIES[device], "--nproc", "2", "--", path, *ARGUMENTS]
    else:
        start = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {path}"
        words = []
        for row, more in THEIR_OWN[script].items():
            words += ["--script", f"{row}={start} {' '.join(ARGUMENTS)} {more}"]
    runs = ["--runs", f"{Path(script).stem}-{device}", "--set", "measure.cooldown_steps=1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compare", *runs, *words], cwd=folder, stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines(script: str, document: dict[str, Any]) -> list[list[Any]]:
    """A line of the table for each row; what did not run says why."""
    found = []
    for row in document["rows"]:
        amounts = [_amount(row[name], row[f"expected_{name}"]) for name in (SENT, "model_state_bytes")]
        if row["status"] != "ok":
            amounts = [f"{row['status']}: {row['reason']}", ""]
        found.append([script, row["backend"], *amounts, row["parity"], row["max_loss_difference"]])
    return found


def _amount(seen: float | None, expected: float | None) -> str:
    if seen is None or expected is None:
        return f"{seen or 'n/a'}, not judged"
    return f"{seen:,.0f}, equal" if seen == expected else f"{seen:,.0f}, expected {expected:,.0f}"


def main() -> None:
    folder, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True)
    device = "cuda" if "CUDA_STUB" in os.environ else "cpu"
    rows = [
        line
        for script in (*GIVEN, *THEIR_OWN)
        if not wanted or script in wanted
        for line in lines(script, compared(folder, script, device))
    ]
    sys.stdout.write(tabulate(rows, headers=COLUMNS, tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
