"""Plants faults in real ranks, checks each record, and publishes the table.

A call with the same folder goes on where the last one ended. Exits 1 if a record is not truthful, a command
hung, something was left behind or another cell is missing.

Usage: python -m tests.faults FOLDER [--page docs/faults.md] [--kinds raise,sleep] [--seed 20]
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import progress
from benchmarks.packed_page import between
from harness.record.provenance import package_versions
from tests.faults.injection import KINDS, Injection, Kind, plan, together
from tests.faults.namespaces import command_inside, furnish, is_inside, why_not
from tests.faults.results import append, failures, judged, read, section, table_of_all
from tests.faults.scene import Scene
from tests.faults.two_nodes import TwoNodes

RESULTS = "results.jsonl"
SEED = 20
NAMED = ("torch", "deepspeed", "transformers", "accelerate")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where runs and results are kept")
    parser.add_argument(
        "--page", type=Path, help="the page whose section to write; the list goes into a folder of its name"
    )
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--together", action="store_true", help="one kind in each backend, in one comparison")
    options = parser.parse_args()
    if not is_inside():
        if (reason := why_not()) is not None:
            progress(f"faults need namespaces of their own: {reason}")
            return 1
        os.execvp("unshare", command_inside(["-m", "tests.faults", *sys.argv[1:]]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    furnish()
    wanted = options.kinds.split(",")
    named = {kind.name: kind for kind in KINDS}
    kinds = [named[name] for name in wanted]
    results, folder = options.folder / RESULTS, options.folder.resolve()
    if options.together:
        inject(folder, results, kinds[0], together(kinds, options.seed))
    else:
        for kind in kinds:
            inject(folder, results, kind, plan([kind], options.repeats, options.seed))
    found = [result for result in read(results) if result.kind in wanted]
    if options.page is not None:
        versions = package_versions()
        listed = ", ".join(f"{name} {versions[name]}" for name in NAMED if name in versions)
        held = options.page.read_text(encoding="utf-8")
        summary = between(
            held, "<!-- injected -->", "<!-- end of injected -->", section(found, options.seed, listed)
        )
        options.page.write_text(summary, encoding="utf-8")
        options.page.with_suffix("").joinpath("injected.csv").write_text(
            table_of_all(found), encoding="utf-8"
        )
    lines = failures(found)
    progress("\n".join([*lines, f"{len(found)} injections, {len(lines)} did not end as they should"]))
    return 1 if lines else 0


def inject(folder: Path, results: Path, kind: Kind, injections: Sequence[Injection]) -> None:
    """Plant the faults of one kind, unless their results are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    done = {result.name for result in read(results)}
    missing = [injection for injection in injections if injection.name not in done]
    groups = [[injection] for injection in missing] if kind.scope == "network" else [missing]
    for group in filter(None, groups):
        began = time.monotonic()
        place = folder / (group[0].name if kind.scope == "network" else kind.name)
        shutil.rmtree(place, ignore_errors=True)
        scene = TwoNodes(place, group[0]) if kind.scope == "network" else Scene(place, group)
        append(results, [judged(seen) for seen in scene.play()])
        seconds = time.monotonic() - began
        progress(f"{place.name}: {len(group)} injections, {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
