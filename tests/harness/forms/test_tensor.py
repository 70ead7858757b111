"""What attention exchanges where ranks divide samples, written out by hand for one small model."""

from dataclasses import replace

import pytest

from harness.backends.mesh import Mesh
from harness.backends.registry import strategy_of
from harness.forms.layout import Attention, Layout, Tensor
from harness.forms.tensor import KEPT, UNKNOWN_HEADS, with_attention
from harness.forms.terms import Collective, Volume
from harness.forms.workload import Workload
from tests.built_in import strategy

LAYERS, HEADS, KEYS, SIZE = 3, 8, 2, 16
SAMPLES, LENGTH, RANKS = 2, 21, 4
PART = 6
"""Tokens of a part: 21 padded to 24, over 4 ranks."""


def workload(label: str, **changes: object) -> Workload:
    layout = Layout(
        parameters=(Tensor("w", (8, 8), "float32"),),
        decaying=frozenset(),
        attention=Attention(layers=LAYERS, heads=HEADS, key_value_heads=KEYS, head_size=SIZE),
    )
    mesh = Mesh.of(8, {"data": None, "sequence": RANKS})
    values = {"precision": "bf16-mixed", "micro_batch_size": SAMPLES, "sequence_length": LENGTH} | changes
    return Workload(layout=layout, strategy=strategy(label), world_size=8, mesh=mesh, **values)  # type: ignore[arg-type]


def added(work: Workload) -> dict[tuple[str, str, str], Collective]:
    volume = with_attention(work, Volume())
    assert volume.unknown is None
    return {(c.phase, c.op, c.dtype): c for c in volume.collectives}


def test_a_ring_gathers_keys_and_values_and_sends_their_gradients_home_in_fp32() -> None:
    found = added(workload("cp"))
    own = 2 * SAMPLES * PART * KEYS * SIZE
    gathered = {"payload_bytes": LAYERS * RANKS * own * 2, "calls": LAYERS, "role": "sequence"}
    for phase in ("forward", "backward"):
        collective = found[phase, "all_gather", "bfloat16"]
        assert {name: getattr(collective, name) for name in gathered} == gathered
    home = found["backward", "permute", "float32"]
    assert (home.payload_bytes, home.calls) == (LAYERS * RANKS * own * 4, LAYERS * RANKS)
    assert home.sent_bytes(workload("cp")) == home.payload_bytes
    assert len(found) == 3


def test_keys_and_values_passed_on_by_neighbours_are_sent_as_often_as_gathered_ones() -> None:
    passed = workload("cp", options={"rotation": "all-to-all"})
    gathered = workload("cp")
    sent = [
        sum(c.sent_bytes(work) for c in added(work).values() if c.phase == "forward")
        for work in (passed, gathered)
    ]
    assert sent[0] == sent[1] > 0


def test_ulysses_exchanges_queries_keys_values_and_results() -> None:
    found = added(workload("ulysses-zero3"))
    repeated_keys = RANKS
    size = LAYERS * 2 * (HEADS + repeated_keys) * SAMPLES * PART * SIZE * 2
    for phase in ("forward", "backward"):
        exchanged = found[phase, "all_to_all", "bfloat16"]
        assert (exchanged.payload_bytes, exchanged.calls) == (size, 4 * LAYERS)
    assert found["forward", "all_gather", "int64"].payload_bytes == LAYERS * RANKS * PART * 8


@pytest.mark.parametrize(("checkpointing", "blocks"), [(True, 3), ("every-2", 2), (False, 0)])
def test_recomputed_blocks_exchange_once_more(checkpointing: bool | str, blocks: int) -> None:
    volume = with_attention(workload("cp", activation_checkpointing=checkpointing), Volume())
    calls = sum(c.calls or 0 for c in volume.collectives if (c.phase, c.op) == ("backward", "all_gather"))
    assert calls == LAYERS + blocks


def test_what_is_not_known_is_said() -> None:
    work = workload("cp")
    silent = replace(work, layout=replace(work.layout, attention=None))
    assert with_attention(silent, Volume()).unknown == UNKNOWN_HEADS
    selective = workload("cp", activation_checkpointing="selective")
    assert with_attention(selective, Volume()).unknown == KEPT


def test_strategies_without_divided_samples_are_left_alone() -> None:
    volume = Volume()
    assert with_attention(replace(workload("cp"), strategy=strategy_of("ddp")), volume) is volume  # type: ignore[arg-type]
