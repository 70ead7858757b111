"""One run, and every command that reads its record."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.record import Record
from tests.harness.cli.command_line import SHORT
from tests.journeys.journey import FORMATS, Journey

pytestmark = pytest.mark.long(seconds=10)


@pytest.fixture(scope="module")
def ran(shared_journey: Journey) -> Journey:
    """A folder with one run."""
    shared_journey.harness("run", "--backend", "ddp", "--nproc", "2", *SHORT)
    return shared_journey


@pytest.fixture(scope="module")
def record(ran: Journey) -> Record:
    return ran.record()


def test_list_and_show_name_the_run_and_its_figures(ran: Journey, record: Record) -> None:
    assert record.status == "ok"
    assert "ddp" in ran.harness("list").stdout
    shown = ran.harness("show", record.run_id).stdout
    assert record.run_id in shown
    assert ran.harness("show").stdout == shown


def test_every_report_holds(ran: Journey, record: Record) -> None:
    written = list(ran.reports("runs"))
    assert [path.suffix.removeprefix(".") for path in written] == list(FORMATS)
    for path in written[:2]:
        assert "holds; 1 records unchanged" in ran.harness("verify", path).stdout
    assert "ddp,2" in ran.read("report.csv")


def test_tensorboard_shows_the_losses_of_the_record(ran: Journey, record: Record) -> None:
    ran.harness("export", "tracking", "runs", "--to", "tensorboard", "-o", "board")
    board = EventAccumulator(str(ran.folder / "board" / record.run_id)).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(
        [step.loss for step in record.steps]
    )
    (rate,) = board.Scalars("run/tokens_per_second")
    assert f"{rate.value:,.0f}" in ran.harness("list").stdout
