from harness.compare.findings.catalogue import find_all
from harness.compare.findings.groups import role_of
from harness.compare.rows import Row, make_rows
from tests.records import ENVIRONMENT, make_record


def rows(load: float | None) -> list[Row]:
    """One thread of the reference and two of ddp, on 8 cores."""
    quiet = make_record(environment=ENVIRONMENT | {"load_average": 0.1})
    return make_rows([quiet, make_record(label="ddp", environment=ENVIRONMENT | {"load_average": load})])


def test_a_load_that_no_run_before_it_leaves_is_told() -> None:
    (finding,) = [f for f in find_all(rows(10.5)) if f.id == "busy-machine"]
    assert finding.backends == ("ddp",)
    assert finding.values == {"load_average": 10.5, "cores": 8, "threads_of_largest_run": 2}
    assert role_of("busy-machine") == "figures"


def test_cells_one_after_the_other_are_no_other_work() -> None:
    for load in (None, 0.0, 2.0, 8.5, 10.0):
        assert "busy-machine" not in {f.id for f in find_all(rows(load))}
