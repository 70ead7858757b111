"""How often ZeRO-3 gathers weights that several modules share."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends.registry import BUILT_IN
from harness.forms.families import collectives
from harness.forms.layout import Layout, Tensor, Use
from harness.forms.workload import Workload
from harness.forms.zero3 import SHARED_TERM, shared_gathers, uses_unknown

SEEN: Use = "inputs with gradient"
IDS: Use = "inputs without gradient"
FROZEN: Use = "forward only"
TABLE = Tensor("shared.weight", (10, 3), "float32")
LAYER = (Tensor("layer.weight", (3, 3), "float32"), Tensor("layer.bias", (3,), "float32"))
LAYOUT = Layout(
    parameters=(TABLE, *LAYER), decaying=frozenset(),
    tied={"encoder.weight": TABLE.name, "decoder.weight": TABLE.name, "head.weight": TABLE.name},
)  # fmt: skip


def workload(**values: Any) -> Workload:
    strategy = BUILT_IN["zero3"].strategy
    assert strategy is not None
    layout = replace(LAYOUT, **values.pop("layout"))
    return Workload(layout=layout, strategy=strategy, world_size=4, **values)


@pytest.mark.parametrize(
    ("uses", "forward", "backward"),
    [
        ((IDS, IDS, SEEN), 3, 2),  # T5: the output's gather goes, the decoder's stays for the encoder
        ((IDS, IDS), 2, 1),
        ((SEEN, SEEN), 2, 2),
        ((SEEN, IDS), 2, 1),
        ((FROZEN, FROZEN, SEEN), 3, 1),
        ((), 0, 0),
    ],
)
def test_a_weight_is_gathered_for_each_use_that_finds_it_released(uses, forward: int, backward: int) -> None:
    asked = workload(layout={"uses": {TABLE.name: uses}})
    for phase, times in (("forward", forward), ("backward", backward)):
        found = shared_gathers(asked, phase, LAYOUT.parameters, 2)
        # 30 elements are padded to 32 for four ranks.
        assert sum(one.payload_bytes for one in found) == 2 * times * 4 * 32
        assert sum(one.calls or 0 for one in found) == 2 * times


def test_a_module_that_runs_twice_gathers_all_that_it_has_in_one_call() -> None:
    asked = workload(layout={"uses": {t.name: (SEEN, SEEN) for t in LAYER}})
    found = shared_gathers(asked, "forward", LAYOUT.parameters, 1)
    assert sum(one.calls or 0 for one in found) == 2
    assert sum(one.payload_bytes for one in found) == 2 * 4 * (12 + 4)


KEPT: Use = "returned by its module"


@pytest.mark.parametrize("preset", ["like-for-like", "library-defaults"])
def test_a_weight_that_its_module_returns_is_gathered_once_until_the_update(preset: str) -> None:
    large = replace(TABLE, shape=(200_000, 3))  # above the threshold of the defaults
    layout = {"parameters": (large, *LAYER), "uses": {TABLE.name: (KEPT,)}, "tied": {}}
    asked = workload(layout=layout, preset=preset, accumulation_steps=3)
    kept = volume_of(asked) - volume_of(replace(asked, layout=replace(asked.layout, parameters=LAYER)))
    assert kept == 4 * 600_000


def volume_of(asked: Workload) -> int:
    volume = collectives(asked)
    assert volume.unknown is None
    return sum(
        one.payload_bytes
        for one in volume.collectives
        if one.op == "all_gather" and one.phase in ("forward", "backward")
    )


def test_what_the_first_pass_gathers_before_a_weight_is_returned_is_not_known() -> None:
    layout = {"uses": {TABLE.name: (IDS, KEPT)}, "tied": {}}
    assert uses_unknown(workload(layout=layout)) is None
    assert "first forward pass" in str(uses_unknown(workload(layout=layout, steps=(0, 2))))


def test_uses_replace_what_names_say() -> None:
    uses = {TABLE.name: (IDS, IDS, SEEN)}
    volume = collectives(workload(layout={"uses": uses}))
    assert volume.unknown is None
    terms = {c.term for c in volume.collectives if c.phase == "forward"}
    assert SHARED_TERM in terms
    assert not any("tied" in term for term in terms)


def test_what_is_not_known_is_said() -> None:
    assert "more than two modules" in str(collectives(workload(layout={})).unknown)
    assert "could not be determined" in str(collectives(workload(layout={"uses": None})).unknown)
    inside = {"uses": {"layer.weight": (SEEN, SEEN)}, "blocks": ("layer",), "tied": {}}
    assert uses_unknown(workload(layout=inside)) is None
    assert "recompute" in str(uses_unknown(workload(layout=inside, activation_checkpointing=True)))
