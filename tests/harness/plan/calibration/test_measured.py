from pathlib import Path
from statistics import median

import pytest

from harness.errors import HarnessError
from harness.plan.time.calibration import MeasuredCell, calibrate, measured_cells
from harness.record.store import write_record
from tests.records import make_record

PUBLISHED = Path(__file__).parents[4] / "reports" / "shaped-links"


@pytest.fixture(scope="module")
def cells() -> list[MeasuredCell]:
    return measured_cells([PUBLISHED / "200mbit" / "runs.tar.xz"])


def test_runs_of_a_backend_are_one_cell(cells: list[MeasuredCell]) -> None:
    names = {cell.name: len(cell.runs) for cell in cells}
    assert names["200mbit: zero2 on 4"] == 8
    assert len(cells) == 6


def test_self_tests_next_to_the_runs_say_what_the_network_gives(cells: list[MeasuredCell]) -> None:
    zero2 = next(cell for cell in cells if "zero2" in cell.name)
    assert zero2.scenario.fabric is not None
    # 200 Mbit/s, less what TCP adds, over the two ranks of a node.
    assert zero2.scenario.fabric.bandwidth_per_gpu * 2 * 8 == pytest.approx(192e6, rel=0.01)
    assert zero2.latency_seconds == pytest.approx(8e-3, rel=0.3)


def test_traces_say_how_much_of_the_communication_is_exposed(cells: list[MeasuredCell]) -> None:
    ddp = next(cell for cell in cells if "ddp" in cell.name)
    assert ddp.exposed_share is not None
    assert 0.9 < ddp.exposed_share < 1


def test_steps_over_a_slow_link_are_predicted_from_the_other_backends(cells: list[MeasuredCell]) -> None:
    """The link decides here, and bytes of each strategy are exact."""
    calibration = calibrate(cells)
    assert median(calibration.errors) < 0.1
    right, pairs = calibration.order()
    assert right == pairs >= 8


def test_runs_without_timed_steps_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    write_record(directory, make_record(steps=[]))
    with pytest.raises(HarnessError, match=r"--calibrate .*: no run there has timed steps"):
        measured_cells([tmp_path])
