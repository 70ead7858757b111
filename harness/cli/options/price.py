"""The option that states what an hour of a GPU costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from harness.errors import HarnessError
from harness.job.experiment import Price, read_price

OPTION = "--price-per-gpu-hour"
price_option = click.option(
    OPTION,
    metavar="PRICE",
    help="What an hour of one GPU costs, such as '2.5 USD'; default: compare.price_per_gpu_hour.",
)


def priced(command: Callable[..., int]) -> Callable[..., int]:
    """Add the option to a command with --set, as the setting that it stands for."""

    @wraps(command)
    def with_setting(*, price_per_gpu_hour: str | None, assignments: tuple[str, ...], **others: Any) -> int:
        return command(assignments=with_price(assignments, price_per_gpu_hour), **others)

    return price_option(with_setting)


def given_price(text: str | None) -> Price | None:
    """The price of the option. Raises HarnessError."""
    if text is None:
        return None
    try:
        return Price.model_validate(read_price(text))
    except ValueError:
        raise HarnessError(
            f"{OPTION} '{text}' is not a price; give an amount and a currency: '2.5 USD'"
        ) from None


def with_price(assignments: tuple[str, ...], text: str | None) -> tuple[str, ...]:
    """Add the setting that the option stands for to those given with --set. Raises HarnessError."""
    price = given_price(text)
    return assignments if price is None else (*assignments, f"compare.price_per_gpu_hour={price}")
