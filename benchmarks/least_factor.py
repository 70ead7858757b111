"""The smallest factor on one rank's gradient that a comparison names, for each engine and precision.

The floor is what rounding leaves open: 3 x (|mean| + standard error) of the clean twin's shift of gradient
norms from the repetition that rounds as it does, over the slope of that shift per e of the factor 1 + e.
Factors are tried at multiples of it.

Usage: python -m benchmarks.least_factor FOLDER [--only bf16-mixed-zero3] [--multiples 3 10] [--set KEY=VALUE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.measuring import progress
from harness.backends.base import BackendOptions, SetupContext
from harness.backends.ddp import DdpBackend
from harness.backends.fsdp.fsdp2 import Fsdp2Backend
from harness.backends.injected_faults import Spoiled, scale_loss
from harness.judge.distance import norm_changes, norms_by_step, standard_error
from harness.judge.rows import JudgedRun
from tests.made_once import MadeOnce
from tests.plugins import register
from tests.traps.families import Stage3
from tests.traps.matrix import UNTRACED, Matrix, planted_matrix

JOB = ("training.steps=16", UNTRACED)
CASES = (("fp32", "ddp"), ("bf16-mixed", "ddp"), ("bf16-mixed", "zero3"), ("bf16-mixed", "fsdp"))
MULTIPLES = (3.0, 5.0, 7.0, 10.0, 15.0, 30.0, 60.0)
UNIT = 1e-9
PROBE = 0.02
"""The e whose shift gives the slope: far above rounding in every case."""


class Factor(Spoiled):
    """Of the last rank's gradient: 1 + N x 10^-9 by the option row=eN, which every backend has."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._factor = 1 + int((options.row or "e0")[1:]) * UNIT

    def spoil(self, engine: Any, context: SetupContext) -> None:
        if context.world.rank == context.world.world_size - 1:
            scale_loss(engine, self._factor)


class Ddp(Factor, DdpBackend): ...


class Fsdp(Factor, Fsdp2Backend): ...


class Zero3(Factor, Stage3): ...


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where records are kept")
    parser.add_argument("--only", help="one of " + ", ".join(map("-".join, CASES)))
    parser.add_argument("--multiples", nargs="+", type=float, default=MULTIPLES, help="of the floor")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of each job")
    options = parser.parse_args()
    register(
        options.folder / "site",
        {
            f"factor-{one.__name__.lower()}": f"benchmarks.least_factor:{one.__name__}"
            for one in (Ddp, Zero3, Fsdp)
        },
        "factors",
    )
    rows = []
    with planted_matrix(options.folder, made_once=MadeOnce(options.folder / "kept")) as matrix:
        for precision, backend in CASES:
            if options.only in (None, f"{precision}-{backend}"):
                settings = (*JOB, f"training.precision={precision}", *options.set)
                rows.append(
                    (f"{precision} {backend}", *measured(matrix, backend, settings, options.multiples))
                )
    print(
        tabulate(rows, ["run", "floor of e", "least e that is named", "times the floor", "clean"], "github")
    )
    return 0


def measured(
    matrix: Matrix, backend: str, settings: Sequence[str], multiples: Iterable[float]
) -> tuple[str, str, str, str]:
    """Floor, smallest e that is named, the ratio of both, and the clean twin's parity."""

    def row(e: float) -> JudgedRun:
        label = f"factor-{backend}:row=e{round(e / UNIT)}"
        progress(f"{label} {' '.join(settings)}")
        return next(r for r in matrix.compare([label], 2, settings).rows if r.record.backend.name != "single")

    clean = row(0.0)
    assert clean.record.status == "ok", clean.record.error
    assert clean.reference is not None
    assert clean.noise is not None
    own = norms_by_step(clean.record)
    yardsticks = dict(clean.noise.norms) or {"single": norms_by_step(clean.reference.record)}
    shift = min((norm_changes(norms, own) for norms in yardsticks.values()), key=standard_error)
    slope = abs(float(norm_changes(own, norms_by_step(row(PROBE).record)).mean())) / PROBE
    floor = 3 * (abs(float(shift.mean())) + standard_error(shift)) / slope
    named = next((m for m in sorted(multiples) if row(m * floor).judgement.parity == "diverged"), None)
    told = ("none", "n/a") if named is None else (f"{named * floor:.1e}", f"{named:g}")
    return f"{floor:.1e}", *told, str(clean.judgement.parity)


if __name__ == "__main__":
    raise SystemExit(main())
