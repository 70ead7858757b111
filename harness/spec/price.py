"""What an hour of a GPU costs, as the user says."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, WithJsonSchema

_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([A-Z]{3})")


class Price(BaseModel):
    """An amount of money."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    amount: FiniteFloat = Field(gt=0)
    """Of one hour of one GPU."""
    currency: str = Field(pattern="^[A-Z]{3}$")
    """ISO 4217."""

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}"


def read_price(value: Any) -> Any:
    """The price that a text such as '2.5 USD' means. Raises ValueError."""
    if not isinstance(value, str):
        return value
    found = _TEXT.fullmatch(value.strip())
    if found is None:
        raise ValueError("give an amount and a currency of three letters, such as '2.5 USD'")
    return {"amount": float(found[1]), "currency": found[2]}


GivenPrice = Annotated[
    Price,
    BeforeValidator(read_price),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""A setting in money per hour of one GPU."""
