"""What saving native checkpoints communicates that no closed form has."""

from __future__ import annotations

import pytest

from harness.backends.registry import parse, strategy_of
from harness.forms import families
from harness.forms.loading import PICKLED_PLANS
from harness.forms.model.layout import Layout, Tensor
from harness.forms.workload import Window, Workload

LAYOUT = Layout(
    parameters=(Tensor("layers.0.q_proj.weight", (8, 8), "float32"),),
    decaying=frozenset(),
    blocks=("layers.0",),
)


@pytest.mark.parametrize("label", ["ddp", "fsdp", "tp", "fsdp-tp"])
def test_plans_of_what_each_rank_writes_are_derived_by_nobody(label: str) -> None:
    strategy = strategy_of(label)
    assert strategy is not None
    for saves in (True, False):
        workload = Workload(
            layout=LAYOUT, strategy=strategy, world_size=4, mesh=parse(label)[1].mesh(4), precision="fp32",
            sequence_length=16, shard_size=4, window=Window(checkpoint=saves),
        )  # fmt: skip
        assert (PICKLED_PLANS in families.collectives(workload).underived) is saves
