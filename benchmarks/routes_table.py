"""The table of docs/your-configuration.md: losses of each route against the native backend's, from records.

Usage: python -m benchmarks.routes_table docs/your-configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from tabulate import tabulate

from harness.backends import registry
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, read_runs

RECORDS = Path(__file__).resolve().parents[1] / "reports" / "gpu-stub"
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")
BEGIN, END = "<!-- routes: python -m benchmarks.routes_table -->", "<!-- end of routes -->"


def routes() -> list[str]:
    """Every built-in backend that reaches a native one through another library."""
    return [
        name
        for name, entry in registry.entries().items()
        if entry.strategy is not None and entry.strategy.route != "native"
    ]


def table(folder: Path = RECORDS) -> str:
    """A row for each route, a column for each precision: largest relative difference of a step's loss."""
    by_precision = {p: _by_cell(folder / p / ARCHIVE_NAME) for p in PRECISIONS}
    body = [
        [f"`{route}`", f"`{_native(route)}`", *(_difference(by_precision[p], route) for p in PRECISIONS)]
        for route in routes()
    ]
    return tabulate(body, headers=["backend", "native", *PRECISIONS], tablefmt="pipe", disable_numparse=True)


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _by_cell(archive: Path) -> dict[tuple[str, int], Record]:
    records = (record for _, record in read_runs([archive])[0])
    return {(r.backend.label, r.world.world_size): r for r in records if r.status == "ok"}


def _native(route: str) -> str:
    strategy = registry.entries()[route].strategy
    assert strategy is not None
    return route.removeprefix(strategy.of_route.prefix)


def _difference(cells: dict[tuple[str, int], Record], route: str) -> str:
    sizes = [size for label, size in cells if label == route]
    found = []
    for size in sizes:
        pairs = zip(cells[route, size].steps, cells[_native(route), size].steps, strict=True)
        found += [abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs]
    if not found:
        return "n/a"
    return f"{max(found):.1e}" if max(found) else "0"


def main() -> None:
    """Write the table into the page that the command names."""
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
