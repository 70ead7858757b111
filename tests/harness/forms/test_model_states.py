"""Model states by strategy, of published models and of models that were never built."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.backends.registry import BUILT_IN, mesh_of
from harness.forms.families import CLOSED_FORMS, collectives, model_states
from harness.forms.fsdp.fsdp1 import flat_unit
from harness.forms.layout import Attention, Layout, Tensor
from harness.forms.terms import STEP_PHASES, ModelStates
from harness.forms.textbook import textbook_states
from harness.forms.workload import Workload
from harness.forms.zero0 import FP32_SURPLUS
from tests.built_in import DATA_PARALLEL, strategy
from tests.harness.forms.layouts import BLOOM_560M, BLOOM_SMALL, LLAMA_SMALL, layout_of


def unbuilt_model() -> nn.Module:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        return nn.ModuleDict({"embedding": nn.Embedding(1000, 64), "blocks": blocks})


def meta_layout(model: nn.Module) -> Layout:
    parameters = tuple(
        Tensor(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in model.named_parameters()
    )
    return Layout(
        parameters=parameters,
        decaying=frozenset(tensor.name for tensor in parameters if len(tensor.shape) > 1),
        blocks=tuple(f"blocks.{index}" for index in range(3)),
        attention=Attention(layers=3, heads=8, key_value_heads=8, head_size=8),
    )


@pytest.mark.parametrize("backend", DATA_PARALLEL)
def test_closed_forms_need_no_record(backend: str) -> None:
    kind, layout = strategy(backend), meta_layout(unbuilt_model())
    world_size = 1 if kind.sharding == "single" else 8
    workload = Workload(
        layout=layout,
        strategy=kind,
        world_size=world_size,
        shard_size=4 if kind.sharding == "hybrid" else None,
        precision="bf16-mixed",
        mesh=mesh_of(backend, world_size),
        sequence_length=64,
    )
    assert model_states(workload).model_state_bytes >= 16 * layout.parameter_count / world_size
    volume = collectives(workload)
    assert volume.unknown is None
    sent = sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in STEP_PHASES)
    assert (sent > 0) == (world_size > 1)


def test_every_family_of_the_registry_has_closed_forms() -> None:
    assert {entry.strategy.family for entry in BUILT_IN.values() if entry.strategy} == set(CLOSED_FORMS)


GEOMETRIES = {"bloom": BLOOM_560M, "bloom-small": BLOOM_SMALL, "llama-small": LLAMA_SMALL}
FSDP = ("fsdp", "fsdp1", "fsdp-grad-op", "fsdp1-grad-op")


def workload(backend: str, ranks: int, config: dict, **changes) -> Workload:
    values = {"precision": "bf16-mixed"} | changes
    return Workload(layout=layout_of(config), strategy=strategy(backend), world_size=ranks, **values)


def kinds(backend: str, ranks: int, config: dict, **changes) -> dict[str, int]:
    states = model_states(workload(backend, ranks, config, **changes))
    return states.kinds()


def named(states: ModelStates) -> int:
    """What DeepSpeed holds beyond the paper and says so: straddling parameters, sums in fp32."""
    return sum(t.bytes for t in states.terms if "straddle" in t.name or t.name == FP32_SURPLUS)


def parameters(config: dict) -> int:
    return kinds("single", 1, config, precision="fp32")["weights"] // 4


def test_the_layout_is_the_published_model() -> None:
    assert parameters(BLOOM_560M) == 559_214_592


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("zero1", ["optimizer", "gradients"]), ("zero2", ["optimizer", "gradients"]),
     *((name, ["optimizer", "gradients", "weights"]) for name in ("zero3", *FSDP))],
)  # fmt: skip
def test_what_is_sharded_falls_as_one_over_the_ranks(backend: str, kinds: list[str], geometry: str) -> None:
    """ZeRO-1 too has only its partition left after a backward pass; the textbook gives it all of them."""
    for kind in kinds:
        assert_falls(backend, kind, GEOMETRIES[geometry])


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("backend", "whole"),
    [("ddp", ["optimizer", "gradients", "weights"]), ("zero1", ["weights"]), ("zero2", ["weights"])],
)
def test_what_a_strategy_does_not_shard_stays_whole(backend: str, whole: list[str], geometry: str) -> None:
    for kind in whole:
        sizes = [kinds(backend, ranks, GEOMETRIES[geometry])[kind] for ranks in (1, 2, 4)]
        # ZeRO pads each of two groups to 2 N elements of 2 bytes.
        assert max(sizes) - min(sizes) <= 2 * 2 * 8


def assert_falls(backend: str, kind: str, config: dict) -> None:
    """The shares of all ranks make the whole, byte for byte, and none is above its N-th part by much."""
    (whole,) = shares(backend, 1, kind, config)
    for ranks in (2, 4):
        parts = shares(backend, ranks, kind, config)
        assert sum(parts) == whole
        assert max(parts) <= whole / ranks * 1.05


def shares(backend: str, ranks: int, kind: str, config: dict) -> list[int]:
    """Each rank's own share, without the named terms beyond it."""
    held = [model_states(workload(backend, ranks, config, rank=rank)) for rank in range(ranks)]
    return [
        sum(term.bytes for term in states.terms if term.kind == kind and not term.extra) for states in held
    ]


def test_padding_is_small_but_a_straddling_embedding_is_not() -> None:
    """DeepSpeed keeps the whole gradient of a parameter that reaches into two partitions on both ranks."""
    for backend in ("zero1", "zero2", "zero3", "fsdp", "fsdp1"):
        states = model_states(workload(backend, 4, BLOOM_560M, rank=1))
        padding = sum(t.bytes for t in states.terms if "padding" in t.name or "alignment" in t.name)
        assert padding < 1e-3 * states.model_state_bytes
    (embedding, *_) = layout_of(BLOOM_560M).parameters
    states = model_states(workload("zero1", 4, BLOOM_560M, rank=0))
    (straddling,) = (term.bytes for term in states.terms if "straddle" in term.name)
    partition = next(term.bytes for term in states.terms if term.name == "partition")
    assert embedding.shape == (250880, 1024)
    assert straddling == pytest.approx(2 * 250880 * 1024 - partition, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", ["ddp", "zero2", "zero3", "fsdp", "fsdp1"])
def test_a_large_model_is_the_textbook_within_a_thousandth(backend: str, ranks: int) -> None:
    """Bytes in all; which kind holds them differs where fp32 weights are their own masters."""
    states = model_states(workload(backend, ranks, BLOOM_560M))
    book = textbook_states(BUILT_IN[backend].strategy.stage, parameters(BLOOM_560M), ranks, "bf16-mixed")
    assert states.model_state_bytes - named(states) == pytest.approx(sum(book.values()), rel=1e-3)


def test_fsdp1_aligns_each_parameter_and_pads_the_unit() -> None:
    """37 elements of bf16 compute begin at multiples of 8; 3 ranks pad the end to a multiple of 3."""
    unit = flat_unit([Tensor(name, (37,), "float32") for name in "ab"], "bfloat16", 3)
    assert (unit.offsets, unit.length) == ((0, 40), 78)


def test_fsdp1_holds_batch_norm_apart_in_fp32_as_the_cast_reference_does() -> None:
    """6 and 6 elements begin at multiples of 4, so rank 0 has one of the two, beside 19 of 37 others."""
    sizes = {"blocks.0.linear.weight": 37, "blocks.0.norm.weight": 6, "blocks.0.norm.bias": 6}
    layout = Layout(
        parameters=tuple(Tensor(name, (size,), "float32") for name, size in sizes.items()),
        decaying=frozenset(), blocks=("blocks.0",),
        buffers=(Tensor("blocks.0.norm.running_mean", (6,), "float32"),),
    )  # fmt: skip
    kind = Workload(layout=layout, strategy=strategy("fsdp1"), world_size=2, precision="bf16-mixed")
    held = [model_states(replace(kind, rank=rank)).kinds()["optimizer"] for rank in range(2)]
    assert held == [(19 + 6) * 8 + 2 * 4, (18 + 6) * 8 + 2 * 4]
    cast = replace(kind, strategy=strategy("single"), world_size=1, options={"precision": "cast"})
    assert model_states(cast).kinds()["gathered"] == 37 * 2 + (6 + 6) * 4


def test_fsdp2_pads_rows_and_the_last_rank_holds_none() -> None:
    layout = Layout(parameters=(Tensor("a", (5, 3), "float32"),), decaying=frozenset("a"))
    fsdp = Workload(layout=layout, strategy=strategy("fsdp"), world_size=4)
    held = [model_states(replace(fsdp, rank=rank)) for rank in range(4)]
    assert [states.kinds()["weights"] for states in held] == [2 * 3 * 4] * 4
    assert [states.kinds()["optimizer"] - 4 for states in held] == [48, 48, 24, 0]
