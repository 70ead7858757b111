"""Which attention a ring takes."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from harness.backends.refusals import Unsupported
from harness.backends.sequence.context_parallel import require_ring_attention


def model(**config: Any) -> nn.Module:
    found = nn.Linear(2, 2)
    found.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return found


def test_attention_that_nothing_can_divide_is_refused_with_what_to_set() -> None:
    require_ring_attention(model(_attn_implementation="sdpa", attention_dropout=0.0))
    with pytest.raises(Unsupported, match=r"use model\.attention=sdpa"):
        require_ring_attention(model(_attn_implementation="eager"))
    for name in ("attention_dropout", "attn_pdrop"):
        with pytest.raises(Unsupported, match=r"probability 0\.1.*use model\.dropout=0"):
            require_ring_attention(model(_attn_implementation="sdpa", **{name: 0.1}))
