import pytest

from harness.cli.options import given_price
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import Price


def test_a_price_is_an_amount_and_a_currency() -> None:
    experiment = load_experiment(None, ["compare.price_per_gpu_hour=2.5 USD"])
    assert experiment.compare.price_per_gpu_hour == Price(amount=2.5, currency="USD")
    assert str(experiment.compare.price_per_gpu_hour) == "2.5 USD"


@pytest.mark.parametrize("text", ["2.5", "USD", "-1 USD", "0 USD", "1e9 USD", "2.5 $", "nan USD", "2.5 usd"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(HarnessError, match="price_per_gpu_hour"):
        load_experiment(None, [f"compare.price_per_gpu_hour={text}"])


def test_the_option_of_report_is_such_a_price() -> None:
    assert given_price("2.5 USD") == Price(amount=2.5, currency="USD")
    with pytest.raises(HarnessError, match=r"^--price-per-gpu-hour 'cheap' is not a price"):
        given_price("cheap")
