"""What ZeRO-3 sends while it is set up."""

import pytest

from harness.backends.registry import strategy_of
from harness.forms.families import collectives
from harness.forms.model.layout import Layout, Tensor
from harness.forms.workload import Workload

PARAMETERS = (Tensor("a.weight", (10, 3), "float32"), Tensor("b.weight", (5,), "float32"))


@pytest.mark.parametrize(("gathers", "payload"), [(True, 4 * (32 + 8)), (False, 0)])
def test_parameters_are_gathered_for_their_hooks_unless_deepspeed_is_kept_from_it(
    gathers: bool, payload: int
) -> None:
    """30 and 5 elements, each padded to the 4 ranks."""
    strategy = strategy_of("zero3")
    assert strategy is not None
    layout = Layout(parameters=PARAMETERS, decaying=frozenset())
    workload = Workload(
        layout=layout, strategy=strategy, world_size=4, loading="slices", gathers_for_hooks=gathers
    )
    setup = [c for c in collectives(workload).collectives if c.phase == "setup" and c.op == "all_gather"]
    assert sum(found.payload_bytes for found in setup) == payload
