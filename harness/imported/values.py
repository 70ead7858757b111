"""Values of DeepSpeed's and Accelerate's files as the harness writes them; what cannot be is a ValueError."""

from __future__ import annotations

import math
import sys
from typing import Any

MOST_POWER = sys.float_info.max_exp
PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""`mixed_precision` and `training.precision`."""
PREFETCH = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none"}


def boolean(value: Any) -> bool:
    """true or false, also as YAML 1.1 and command lines write them. Raises ValueError."""
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ValueError("give true or false")


def integer(value: Any) -> int:
    """A whole number, also as 5e8 or '5e8'. Raises ValueError."""
    number_ = number(value)
    if number_ != int(number_):
        raise ValueError("give a whole number")
    return int(number_)


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("give a number")
    try:
        found = float(value)
        if abs(found) > 2**63:
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise ValueError("give a number") from error
    if found != found:
        raise ValueError("give a number")
    return found


def alike(left: Any, right: Any) -> bool:
    """Whether a file's value means the same as another: 5e8 is 500000000, 'no' is false."""
    if isinstance(right, bool) or isinstance(left, bool):
        try:
            return boolean(left) == boolean(right)
        except ValueError:
            return False
    if isinstance(right, (int, float)):
        try:
            return number(left) == right
        except ValueError:
            return False
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right)


def clipping(value: Any) -> float | None:
    """DeepSpeed writes 0 for no clipping."""
    return number(value) or None


def power_of_two(value: Any) -> float:
    power = integer(value)
    if power >= MOST_POWER:
        raise ValueError(f"2^{power} is not a number; at most 2^{MOST_POWER - 1}")
    return math.ldexp(1.0, power)


def some_leaves(value: Any) -> str | None:
    """Raises ValueError for what is no list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a list of names")
    return "blocks" if value else None


def first(value: Any) -> float:
    """The first of two numbers. Raises ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("give two numbers")
    found, _ = (number(one) for one in value)
    return found


def precision(value: Any) -> str:
    """Raises ValueError for fp8 and what is no precision."""
    name = "no" if value in (False, None) else str(value).lower()
    if name not in PRECISIONS:
        own = "; `training.precision: fp8` of the job is torchao's" if name == "fp8" else ""
        raise ValueError(f"Accelerate files of {', '.join(PRECISIONS)} are run{own}")
    return PRECISIONS[name]


def backward_prefetch(value: Any) -> str:
    name = "no_prefetch" if value in (None, False) else str(value).lower()
    if name not in PREFETCH:
        raise ValueError(f"give {', '.join(map(str.upper, PREFETCH))}")
    return PREFETCH[name]


def wrapping(value: Any) -> str | None:
    """'none': the whole model is one unit. Raises ValueError for a policy that no row has."""
    name = "NO_WRAP" if value is None else str(value).upper()
    if name not in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        raise ValueError("unsupported: a unit is a transformer block (TRANSFORMER_BASED_WRAP) or the whole "
                         "model (NO_WRAP)")  # fmt: skip
    return "none" if name == "NO_WRAP" else None
