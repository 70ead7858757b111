"""Every pair of backends and world sizes as a table: `python -m tests.resume.table FILE.md`."""

import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

from tests.resume.engines import BACKENDS, SAVED_AT, STEPS, WORLD_SIZES, resume_job
from tests.resume.pairs import Resumption, Side, is_exact, loss_difference, resume_all, save_all, trained

SIDES = [Side(name, size) for size in WORLD_SIZES for name in BACKENDS]
REFERENCE = Side("ddp", 1)


def table(root: Path) -> str:
    """Largest difference of a loss from the uninterrupted run of one process, over all numbers of ranks."""
    job = resume_job()
    whole = trained(save_all(SIDES, job, root))
    resumed = trained(resume_all([Resumption(*pair) for pair in product(SIDES, SIDES)], job, root))
    differences = {
        (source, target): max(
            loss_difference(whole[REFERENCE], given)
            for pair, given in resumed.items()
            if (pair.source.backend, pair.target.backend) == (source, target)
        )
        for source, target in product(BACKENDS, BACKENDS)
    }
    exact = sum(is_exact(whole[side], resumed[Resumption(side, side)]) for side in SIDES)
    rows = [[source, *(f"{differences[source, target]:.1e}" for target in BACKENDS)] for source in BACKENDS]
    text = (
        f"Neutral checkpoints after step {SAVED_AT} of {STEPS}, every source and target on "
        f"{', '.join(map(str, WORLD_SIZES))} ranks: {len(resumed)} resumed runs. Each cell: largest "
        "difference of a step's loss from the uninterrupted run of one process, nats per token, over nine "
        f"pairs of numbers of ranks. Largest: {max(differences.values()):.1e}. {exact} of "
        f"{len(SIDES)} runs resumed on the same backend and ranks are equal to the bit."
    )
    head = ["saved by / resumed by", *BACKENDS]
    return f"{text}\n\n{tabulate(rows, head, tablefmt='github', disable_numparse=True)}\n"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        Path(sys.argv[1]).write_text(table(Path(folder)), encoding="utf-8")
