"""Energy and cost by hand: 2 ranks, 1024 tokens in each timed step of 0.5 s, so 2048 tokens/s."""

from typing import Any

import pytest

from harness.forms.textbook import BILLION, JOULES_PER_KILOWATT_HOUR, SECONDS_PER_HOUR
from harness.job.experiment import Price
from harness.judge.comparison import Comparison
from harness.judge.quantities import usage
from harness.record import EnergyPart, Record
from tests.records import make_ranks, make_record, on_stub

TOKENS_PER_SECOND = 2048.0


def measured(*parts: dict[str, Any] | None, device: str = "cuda", price: Price | None = None) -> Record:
    """A run of ddp whose ranks read this within one second."""
    ranks = [
        rank.model_copy(update={"energy": EnergyPart(seconds=1.0, **part) if part is not None else None})
        for rank, part in zip(make_ranks(len(parts)), parts, strict=True)
    ]
    record = make_record(label="ddp", world_size=len(parts), ranks=ranks, price_per_gpu_hour=price)
    return record.model_copy(update={"world": record.world.model_copy(update={"device": device})})


def test_energy_per_token_times_tokens_is_power_times_time() -> None:
    found = usage(measured({"device_joules": 300.0}, {"device_joules": 500.0}))
    assert found is not None
    assert (found.device_watts, found.host_watts) == (800.0, None)
    joules = (found.kilowatt_hours or 0) * JOULES_PER_KILOWATT_HOUR
    assert joules == pytest.approx(800.0 * BILLION / TOKENS_PER_SECOND)


def test_ranks_on_one_machine_count_its_processors_once() -> None:
    one = {"host_joules": 90.0, "boot": "a"}
    assert getattr(usage(measured(one, one, device="cpu")), "host_watts", None) == 90.0
    two = usage(measured(one, {"host_joules": 60.0, "boot": "b"}, device="cpu"))
    assert getattr(two, "host_watts", None) == 150.0


def test_cost_is_the_price_of_the_hours_of_all_gpus() -> None:
    found = usage(measured({}, {}, price=Price(amount=2.5, currency="USD")))
    assert found is not None
    hours = 2 * BILLION / TOKENS_PER_SECOND / SECONDS_PER_HOUR
    assert found.gpu_hours == pytest.approx(hours)
    assert found.cost == pytest.approx(2.5 * hours)
    assert found.kilowatt_hours is None


def test_a_rank_without_a_figure_leaves_the_run_without_one() -> None:
    found = usage(measured({"device_joules": 300.0}, {"device_unknown": "Not Supported"}))
    assert found is not None
    assert found.device_watts is None


def test_runs_on_processors_have_no_gpu_hours() -> None:
    found = usage(measured({}, {}, device="cpu", price=Price(amount=1, currency="EUR")))
    assert found is not None
    assert (found.gpu_hours, found.cost) == (None, None)


def test_a_run_on_a_stub_used_nothing() -> None:
    assert usage(on_stub(measured({"host_joules": 9.0}, {"host_joules": 9.0}))) is None


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"device_joules": 900.0, "device_limit_watts": 700.0}, "900 W on average, its power limit is 700 W"),
        ({"device_joules": 90.0, "device_sampled_watts": 450.0}, "90 W by its energy counter, 450 W by"),
    ],
    ids=["beyond the limit", "samples differ"],
)
def test_energy_that_cannot_be_right_is_named(part: dict[str, Any], says: str) -> None:
    sound = {"device_joules": 600.0, "device_limit_watts": 700.0, "device_sampled_watts": 590.0}
    found = Comparison([make_record(), measured(sound, part)]).findings
    (finding,) = [f for f in found if f.id == "implausible-energy"]
    assert says in finding.message
    assert finding.values["rank"] == 1


def test_plausible_energy_is_no_finding() -> None:
    sound = {"device_joules": 600.0, "device_limit_watts": 700.0, "device_sampled_watts": 590.0}
    found = Comparison([make_record(), measured(sound, sound)]).findings
    assert "implausible-energy" not in [f.id for f in found]
