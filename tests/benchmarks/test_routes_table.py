from pathlib import Path

from benchmarks.routes_table import PRECISIONS, routes, with_table
from tests.contract.test_contract import LOSS_TOLERANCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-configuration.md"


def test_the_page_has_the_table_of_the_published_records_and_routes_are_within_the_contract() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page
    rows = [
        line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6
    ]
    figures = {cells[0].strip(" `"): [cell.strip() for cell in cells[2:]] for cells in rows}
    assert list(figures) == routes()
    assert {name for name, cells in figures.items() if "n/a" in cells} == {"trainer-fsdp", "trainer-fsdp1"}
    assert {len(cells) for cells in figures.values()} == {len(PRECISIONS)}
    assert max(float(cells[0]) for cells in figures.values()) <= LOSS_TOLERANCE  # of fp32
