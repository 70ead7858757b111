"""What strategies hold at the fullest moments, on models that only have weights."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.backends.registry import BUILT_IN
from harness.backends.strategy import StrategyKind
from harness.forms.activations import ActivationProfile, Gradient, Point, Segment, Size, no_activations
from harness.forms.families import model_states
from harness.forms.layout import Layout, Tensor
from harness.forms.peak_memory.families import (
    Fsdp2Timeline,
    most_gathered_bytes,
    peak_moments,
    peak_rank,
    without_activations,
)
from harness.forms.peak_memory.step import BELOW, Ledger, PeakMoment, Phase
from harness.forms.pipeline import samples_at_once
from harness.forms.tensor import local_workload
from harness.forms.terms import Term
from harness.forms.workload import Workload
from harness.job.config import load_experiment
from harness.plan.models import load_model
from harness.plan.prediction import least_memory, predict_memory
from harness.plan.profiles import activation_profile
from harness.plan.scenario import Scenario
from tests.built_in import strategy
from tests.geometries import bloom_workload, small_workload, under
from tests.harness.plan.plans import scenario

WEIGHT = "mlp.weight"


def equal_blocks(blocks: int, elements: int, *, root: int = 0) -> Layout:
    """Blocks of one matrix each, and one outside of them if `root`."""
    names = tuple(f"layers.{index}" for index in range(blocks))
    parameters = [Tensor(f"{name}.{WEIGHT}", (elements, 1), "float32") for name in names]
    if root:
        parameters.append(Tensor("head.weight", (root, 1), "float32"))
    decaying = frozenset(parameter.name for parameter in parameters)
    return Layout(parameters=tuple(parameters), decaying=decaying, blocks=names)


def profile(*, root: bool = False) -> ActivationProfile:
    """Gradients that become ready, and nothing else."""

    def segment(*gradients: str) -> Segment:
        return Segment(
            saved=(), forward=(_moment(0),), backward=(_moment(0), _moment(len(gradients))),
            forward_growth=Size(), held=Size(),
            gradients=tuple(Gradient(parameter=name, live=Size()) for name in gradients),
        )  # fmt: skip

    head = segment("head.weight") if root else segment()
    return ActivationProfile(
        embedding=segment(), block=segment(WEIGHT), head=head, loss=segment(), kept=Size()
    )


def _moment(ready: int) -> Point:
    return Point(module="mlp", live=Size(), ready=ready)


def job(label: str, model: Layout, ranks: int, **settings: Any) -> Workload:
    """Of a CUDA rank under NCCL, unless the settings say otherwise."""
    arguments = {"device": "cuda", "transport": "nccl", "sequence_length": 0, "gradient_clipping": None}
    return Workload(layout=model, strategy=strategy(label), world_size=ranks, **(arguments | settings))


def moments(label: str, model: Layout, ranks: int, **settings: Any) -> dict[Phase, PeakMoment]:
    has_root = any(parameter.name == "head.weight" for parameter in model.parameters)
    return peak_moments(job(label, model, ranks, **settings), profile(root=has_root))


def held(peak: PeakMoment, kind: str, *, without: str = "") -> int:
    """Bytes of a kind, counters of steps left out."""
    return sum(
        count
        for holding, count in peak.held.items()
        if holding.kind == kind
        and "counter" not in holding.name
        and (not without or without not in holding.name)
    )


BLOCK = 10**6
MODEL = equal_blocks(4, BLOCK)
"""Elements; at fp32 a block has 4e6 bytes."""


def test_ddp_holds_its_buckets_in_the_forward_pass_too() -> None:
    like = moments("ddp", MODEL, 2)
    assert held(like["forward"], "gradients") == 4 * 4 * BLOCK
    defaults = moments("ddp", MODEL, 2, preset="library-defaults")
    assert held(defaults["forward"], "gradients") == 0
    assert held(defaults["step"], "gradients") + held(defaults["step"], "communication") == 2 * 4 * 4 * BLOCK


THREE, EACH = {"accumulation_steps": 3}, {"accumulation_steps": 3, "options": {"sync_each_batch": True}}
BF16 = {"precision": "bf16", "preset": "library-defaults", "accumulation_steps": 2}


@pytest.mark.parametrize(
    ("label", "ranks", "settings", "phase", "what", "blocks"),
    [
        # The next unit of the backward pass is gathered ahead; without resharding all are held until then.
        ("fsdp", 2, {}, "backward", "gathered", 2),
        ("fsdp", 2, {"options": {"prefetch": 3}}, "forward", "gathered", 3 + 2),
        ("fsdp-grad-op", 2, {}, "forward", "gathered", 4 + 1),
        # Further micro-steps keep whole gradients, in the dtype in which they are reduced.
        ("fsdp", 2, THREE, "forward", "gradients", 4), ("ddp", 2, EACH, "backward", "gradients", 4),
        ("fsdp", 4, BF16, "forward", "unsharded gradients of micro-steps", 4 * 2 // 4),
        ("fsdp", 4, BF16 | {"options": {"reduce_dtype": "fp32"}}, "forward",
         "unsharded gradients of micro-steps", 4),
        ("zero3", 4, {"options": {"reduce_bucket_size": 2 * BLOCK}}, "reduction",
         "bucket ordered by rank", 2),
        # Checkpointing saves weights apart from those that are released.
        ("zero3", 4, {"activation_checkpointing": True}, "backward", "run again", 1),
        *((f"zero{stage}", 2, {}, "step", "flat gradients", 2) for stage in (1, 2, 3)),
    ],
)  # fmt: skip
def test_a_phase_holds_so_many_blocks(
    label: str, ranks: int, settings: dict[str, Any], phase: Phase, what: str, blocks: int
) -> None:
    """Of fp32; what: a kind, or part of a name."""
    peak = moments(label, MODEL, ranks, **settings)[phase]
    named = sum(count for holding, count in peak.held.items() if what in holding.name)
    assert (held(peak, what) if what in ("gathered", "gradients") else named) == blocks * 4 * BLOCK


@pytest.mark.parametrize(("tied", "whole"), [(False, 2), (True, 1)])
def test_fsdp2_adds_up_the_embeddings_gradient_whole_where_its_rows_are_cut(tied: bool, whole: int) -> None:
    workload = scenario("fsdp-tp", 4, label="fsdp-tp:tensor=2", accumulation_steps=2).workload()
    layout = replace(workload.layout, tied={"again": "model.embed_tokens.weight"} if tied else {})
    part = local_workload(replace(workload, layout=layout)).layout
    peak = peak_moments(replace(workload, layout=layout), no_activations(part))["forward"]
    table = next(tensor.numel for tensor in part.parameters if "embed" in tensor.name)
    (added,) = (count for term, count in peak.held.items() if term.name.startswith("unsharded gradients"))
    assert added == 2 * (part.parameter_count + (whole - 1) * table)


def test_fsdp1_joins_the_gradients_of_a_unit() -> None:
    found = moments("fsdp1", MODEL, 2)
    assert held(found["backward"], "gradients", without="reduced") == 2 * 4 * BLOCK


def test_zero2_frees_gradients_of_other_partitions_where_zero1_keeps_them() -> None:
    bucket = {"options": {"reduce_bucket_size": BLOCK}}
    one, two = (moments(f"zero{stage}", MODEL, 4, **bucket) for stage in (1, 2))
    assert held(one["backward"], "gradients") == 4 * 4 * BLOCK
    assert held(two["backward"], "gradients") <= 2 * 4 * BLOCK


@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_zero_fills_a_second_bucket_while_the_first_is_reduced(backend: str) -> None:
    one, two = (
        moments(backend, MODEL, 2, options={"reduce_bucket_size": 8 * BLOCK} | option)["backward"]
        for option in ({}, {"overlap_comm": True})
    )
    assert held(two, "communication") - held(one, "communication") == 4 * 8 * BLOCK


def test_without_contiguous_gradients_overlap_allocates_the_only_buffer() -> None:
    plain = {"reduce_bucket_size": 8 * BLOCK, "contiguous_gradients": False}
    one, two, offloaded = (
        moments("zero2", MODEL, 2, options=plain | option)["backward"]
        for option in ({}, {"overlap_comm": True}, {"overlap_comm": True, "offload": "optimizer"})
    )
    assert held(two, "communication") == held(one, "communication")
    assert held(offloaded, "communication") - held(two, "communication") >= 4 * 8 * BLOCK


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1", "zero3"])
def test_gloo_copies_what_it_gathers(backend: str) -> None:
    on_gpu = moments(backend, equal_blocks(4, BLOCK, root=8 * BLOCK), 2)
    on_cpu = moments(backend, equal_blocks(4, BLOCK, root=8 * BLOCK), 2, device="cpu", transport="gloo")

    def copies(found: object) -> bool:
        return any("gloo" in h.name for peak in found.values() for h in peak.held)  # type: ignore[attr-defined]

    assert copies(on_cpu)
    assert not copies(on_gpu)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op"])
def test_fsdp_that_reduces_in_every_micro_step_holds_no_whole_gradients(backend: str) -> None:
    found = moments(backend, MODEL, 2, accumulation_steps=3, options={"sync_each_batch": True})
    one = moments(backend, MODEL, 2)
    shards = 4 * 4 * BLOCK // 2
    assert held(found["forward"], "gradients") == held(found["step"], "gradients") == shards
    assert held(one["forward"], "gradients") == 0
    assert found["step"].bytes - one["step"].bytes <= 16  # a batch more


@pytest.mark.parametrize(("options", "gathered"), [({}, 8), ({"reshards_root": True}, 0)])
def test_a_root_that_is_resharded_is_gathered_again_for_the_backward_pass(
    options: dict[str, bool], gathered: int
) -> None:
    """Between the passes, at the loss, it lies there or does not."""
    model, at_loss = equal_blocks(1, BLOCK, root=8 * BLOCK), Term(kind="activations", name="loss")
    timeline = Fsdp2Timeline(job("fsdp", model, 2, preset="library-defaults", options=options), Ledger())
    timeline.begin()
    timeline.before_model()
    timeline.after_model()
    timeline.ledger.briefly((at_loss, 1))
    assert held(timeline.ledger.moments()["forward"], "gathered") >= 8 * 4 * BLOCK
    assert sum(c for h, c in timeline.ledger.held.items() if h.kind == "gathered") == gathered * 4 * BLOCK


def test_offloaded_states_lie_on_the_host_on_cuda_alone() -> None:
    on_gpu = moments("fsdp", MODEL, 2, options={"offload": "cpu"})
    assert held(on_gpu["step"], "optimizer") == held(on_gpu["step"], "weights") == 0
    on_cpu = moments("fsdp", MODEL, 2, options={"offload": "cpu"}, device="cpu", transport="gloo")
    assert held(on_cpu["step"], "optimizer") == 2 * 2 * 4 * BLOCK


def test_shards_of_gradients_that_are_copied_to_the_host_leave_the_gpu_under_fsdp2_alone() -> None:
    """Of four blocks between two ranks: FSDP1 has all shards there until the backward pass is over."""
    options = {"offload": "cpu"}
    left, kept, of_fsdp1 = (
        moments("fsdp", MODEL, 2, options=options),
        moments("fsdp", MODEL, 2, options=options | {"keeps_reduced_shards": True}),
        moments("fsdp1", MODEL, 2, options=options),
    )
    assert held(left["backward"], "gradients", without="so far") == 0
    assert held(left["step"], "gradients") == 0
    assert held(kept["step"], "gradients") == held(of_fsdp1["step"], "gradients") == 4 * 2 * BLOCK
    shards_before = 2 * 2 * BLOCK  # when the fullest moment comes, of the third block
    assert kept["backward"].bytes - left["backward"].bytes == shards_before


def test_what_a_strategy_needs_without_activations_includes_what_lies_there_while_it_computes() -> None:
    """In weights of one of four blocks; states in fp32 are weights, gradients and twice as much."""
    model, ranks = equal_blocks(4, 1024), 4
    of_a_block, shards = 4 * 1024, 1 + 2
    expected = {
        # Gradients of further micro-steps lie beside the buckets.
        ("ddp", 1): 4 + 4 + 8,
        ("ddp", 8): 4 + 4 + 8 + 4,
        # All weights are whole from the forward to the backward pass; a gradient is whole until it is reduced
        # to a quarter, or, of all but the last micro-step, until the update.
        ("fsdp-grad-op", 1): shards + 4 + 1 + 0.25,
        ("fsdp-grad-op", 8): shards + 4 + 4 + 1,
    }
    for (label, steps), blocks in expected.items():
        workload = job(label, model, ranks, device="cpu", transport="gloo", accumulation_steps=steps)
        assert without_activations(workload) == blocks * of_a_block, (label, steps)


def test_modules_and_gradients_of_a_step_without_activations_are_those_of_the_model() -> None:
    names = (
        "embed.weight", "layers.0.norm.weight", "layers.0.mlp.weight", "layers.1.mlp.bias", "norm.weight",
    )  # fmt: skip
    model = Layout(
        parameters=tuple(Tensor(name, (4, 2), "float32") for name in names), decaying=frozenset(names),
        blocks=("layers.0", "layers.1"), tied={"head.weight": "embed.weight"},
        frozen=frozenset({"layers.0.norm.weight"}),
    )  # fmt: skip
    profile = no_activations(model)
    segments = (profile.embedding, profile.block_at(0), profile.block_at(1), profile.head)
    assert [[point.module for point in segment.forward] for segment in segments] == [
        ["embed"], ["norm", "mlp"], ["mlp"], ["norm", "head"],
    ]  # fmt: skip
    assert [[g.parameter for g in segment.gradients] for segment in segments] == [
        ["embed.weight"], ["mlp.weight"], ["mlp.bias"], ["norm.weight"],
    ]  # fmt: skip
    assert {
        size.bytes(8, 128) for size in (profile.kept, profile.head.held, profile.head.forward_growth)
    } == {0}


@pytest.mark.parametrize(
    "label", ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-no-shard"]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_frozen_parameters_leave_no_gradients(label: str, steps: int) -> None:
    """Of each of four blocks a matrix of 4,096 elements is frozen beside an adapter of 64; so is the root."""
    names = [f"layers.{index}.{of}.weight" for index in range(4) for of in ("mlp", "adapter")]
    shapes = {name: (4096, 1) if "mlp" in name else (64, 1) for name in names} | {"head.weight": (8192, 1)}
    model = Layout(
        parameters=tuple(Tensor(name, shape, "float32") for name, shape in shapes.items()),
        decaying=frozenset(shapes), blocks=tuple(f"layers.{index}" for index in range(4)),
        frozen=frozenset(name for name in shapes if "adapter" not in name),
    )  # fmt: skip
    workload = job(label, model, 4, accumulation_steps=steps, precision="bf16-mixed")
    found = peak_moments(workload, no_activations(model))
    assert all(min(moment.held.values()) >= 0 for moment in found.values())
    # Frozen weights of FSDP1's units are views of what has a gradient: blocks are reduced whole, in pieces of
    # a quarter, but nothing of the root.
    kept = sum(count for term, count in found["step"].held.items() if term.name == "reduced gradients")
    assert kept == {"fsdp": 4 * 64, "fsdp-grad-op": 4 * 64, "fsdp1": 4 * 4160}.get(label, kept)


def test_adapters_under_fsdp1_hold_the_gradients_of_a_whole_block_and_its_flat_one() -> None:
    """Unless a program wraps layers by themselves."""
    names = ("layers.0.mlp.weight", "layers.0.adapter.weight")
    model = Layout(
        parameters=(Tensor(names[0], (4096, 1), "float32"), Tensor(names[1], (64, 1), "float32")),
        decaying=frozenset(names), blocks=("layers.0",), frozen=frozenset(names[:1]),
    )  # fmt: skip
    for options, elements in (({}, 4160), ({"wraps_layers": True}, 64)):
        fullest = peak_moments(job("fsdp1", model, 2, options=options), no_activations(model))["backward"]
        of_gradients = held(fullest, "gradients") + held(fullest, "communication")
        assert of_gradients >= 2 * 4 * elements, options
        assert (of_gradients >= 2 * 4 * 4160) == (not options)


MIB, GIB = 2**20, 2**30
COUNT = 10
BERT_BASE_CASED = 108_310_000
"""Parameters, as published to five digits."""


def test_bert_needs_what_is_published_for_each_moment() -> None:
    """`accelerate estimate-memory`: weights 413.18 MiB, backward 826.36 MiB, Adam's step 1.61 GiB."""
    model = equal_blocks(COUNT, BERT_BASE_CASED // COUNT)
    found = moments("single", model, 1, optimizer_implementation="fused")
    weights = held(found["step"], "weights")
    gradients = held(found["step"], "gradients")
    assert weights / MIB == pytest.approx(413.18, rel=1e-4)
    assert (weights + gradients) / MIB == pytest.approx(826.36, rel=1e-4)
    states = found["step"].bytes - held(found["step"], "temporary")
    assert states / GIB == pytest.approx(1.61, abs=0.005)


@pytest.mark.parametrize(("ranks", "shard"), [(128, 2.1875), (1280, 0.21875)])
def test_seventy_billion_parameters_in_eighty_units(ranks: int, shard: float) -> None:
    """Shards of fp32 weights, momentum and variance; a 16-bit unit of weights and one of gradients beside."""
    model = equal_blocks(80, 875_000_000)
    found = moments("fsdp", model, ranks, precision="bf16-mixed")
    assert held(found["step"], "weights") / 1e9 == pytest.approx(shard, rel=0.01)
    assert held(found["step"], "optimizer") / 1e9 == pytest.approx(2 * shard, rel=0.01)
    # FSDP2 gathers into one buffer and copies out of it: a unit twice.
    assert held(found["forward"], "gathered") / 1e9 == pytest.approx(2 * 1.75, rel=0.01)
    assert held(found["reduction"], "gradients", without="reduced") / 1e9 == pytest.approx(1.75, rel=0.01)


@pytest.mark.parametrize(("backend", "ranks"), [("single", 1), ("fsdp", 2), ("fsdp", 4)])
@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("bf16", 10), ("fp32", 20)])
def test_foreach_takes_ten_or_twenty_bytes_per_parameter(
    backend: str, ranks: int, precision: str, bytes_per_parameter: int
) -> None:
    """25 full fine-tunings of fms-acceleration on A100 peak at these figures: states and square roots."""
    model = equal_blocks(4, 10**8)
    found = moments(backend, model, ranks, precision=precision)
    whole = 4 * 10**8 * bytes_per_parameter / ranks
    # The norm's fp64 copy of one gradient is less than the roots.
    assert found["step"].bytes == pytest.approx(whole, rel=1e-6)


def test_mixed_precision_under_fsdp_takes_twenty_bytes_per_parameter() -> None:
    found = moments("fsdp1", equal_blocks(4, 10**8), 4, precision="bf16-mixed", preset="library-defaults")
    assert found["step"].bytes == pytest.approx(20 * 10**8, rel=1e-6)


A_WEIGHT = Term(kind="weights", name="weights")
BUFFER = Term(kind="communication", name="buffer")


def test_the_fullest_state_of_a_phase_names_its_causes() -> None:
    ledger = Ledger()
    ledger.add(A_WEIGHT, 10)
    ledger.compute(5)
    ledger.briefly((BUFFER, 7))
    ledger.look()
    assert ledger.moments()["forward"].bytes == 22
    assert ledger.moments()["forward"].held == {A_WEIGHT: 10, BUFFER: 7, BELOW: 5}
    assert ledger.held == {A_WEIGHT: 10, BUFFER: 0}


def test_phases_are_kept_apart() -> None:
    ledger = Ledger()
    ledger.add(A_WEIGHT, 10)
    ledger.look()
    with ledger.during("reduction"):
        ledger.briefly((BUFFER, 1))
    assert (ledger.moments()["forward"].bytes, ledger.moments()["reduction"].bytes) == (10, 11)
    assert ledger.phase == "forward"


def of_units(ranks: int, *tensors: tuple[str, list[int]]) -> Workload:
    parts = tuple(Tensor(name, tuple(shape), "float32") for name, shape in tensors)
    layout = Layout(parameters=parts, decaying=frozenset(), blocks=("h.0", "h.1", "h.2"))
    strategy = StrategyKind(family="fsdp2", sharding="full-shard")
    return Workload(layout=layout, strategy=strategy, world_size=ranks)


THREE_UNITS = (("h.0.w", [8, 4]), ("h.1.w", [16, 4]), ("h.2.w", [4, 4]))


@pytest.mark.parametrize(("blocks", "elements"), [(1, 40 + 64), (2, 40 + 64 + 32), (9, 40 + 64 + 32 + 16)])
def test_the_root_and_the_largest_blocks(blocks: int, elements: int) -> None:
    units = 1 + min(blocks, 3)
    on_two = most_gathered_bytes(of_units(2, ("embedding", [10, 4]), *THREE_UNITS), 4, blocks)
    assert on_two == (elements + 2 * units) * 4


def test_rows_are_padded_to_the_ranks_and_scalars_aligned() -> None:
    held = most_gathered_bytes(of_units(4, ("embedding", [5, 4]), ("scale", []), ("h.0.w", [])), 2, 1)
    assert held == (8 * 4 + 8 + 4 + 8 + 4) * 2


def test_a_model_without_a_root() -> None:
    assert most_gathered_bytes(of_units(2, *THREE_UNITS), 4, 1) == (64 + 2) * 4


SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp-hybrid")
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def device_bytes(workload: Workload) -> int:
    """On a GPU, where counters of steps lie on the host."""
    return sum(model_states(workload).kinds(host=False).values())


def assert_fullest(workload: Workload, share: float = 0.0) -> None:
    most = max(device_bytes(replace(workload, rank=rank)) for rank in range(workload.world_size))
    assert most * (1 - share) <= device_bytes(replace(workload, rank=peak_rank(workload))) <= most


@settings(max_examples=60)
@given(shapes=SHAPES, backend=st.sampled_from(SHARDED), world_size=st.sampled_from([1, 2, 4, 6, 8]),
       precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]), offload=st.booleans())  # fmt: skip
def test_no_rank_holds_more(
    shapes: list[tuple[int, int]], backend: str, world_size: int, precision: str, offload: bool
) -> None:
    changes: dict[str, Any] = {"world_size": world_size, "precision": precision, "device": "cuda"}
    if BUILT_IN[backend].strategy.facts.has_replicas:  # type: ignore[union-attr]
        changes["shard_size"] = max(1, world_size // 2)
    if offload:
        changes["options"] = {"offload": "cpu"}
    assert_fullest(under(backend, small_workload(*shapes, **changes)))


@pytest.mark.parametrize(
    ("backend", "share"), [*((one, 0.0) for one in SHARDED[:4]), ("fsdp1", 1e-5), ("fsdp1-grad-op", 1e-5)]
)
@pytest.mark.parametrize("world_size", [3, 64])
def test_no_rank_of_bloom_holds_more(backend: str, share: float, world_size: int) -> None:
    given = bloom_workload(world_size=world_size, precision="bf16-mixed", device="cuda")
    assert_fullest(under(backend, given), share)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_rank_of_cut_layers_holds_more(stage: int) -> None:
    given = scenario(f"autotp-zero{stage}", 8)
    most = max(device_bytes(given.workload(rank)) for rank in range(8))
    assert device_bytes(given.workload()) == most


PIPELINE = "pp:stages=2,micro_batches=4"
LABELS = (
    "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3:hpz=2", "fsdp", "fsdp:prefetch=2",
    "fsdp-grad-op", "fsdp1", "fsdp1-grad-op", "fsdp-hybrid:shard_size=2", "fsdp:reshard=2", "tp:tensor=2",
    "autotp-zero3:tensor=2", "ulysses-zero3:sequence=2", PIPELINE,
)  # fmt: skip
LLAMA = load_model("llama-3.2-1b")
OFFLOADED = ("zero1:offload=optimizer", "zero3:offload=cpu", "fsdp:offload=cpu", "fsdp1:offload=cpu")


@pytest.mark.parametrize("label", [*LABELS, *OFFLOADED])
def test_no_peak_lies_below_what_is_known_without_the_step(label: str) -> None:
    for checkpointing in ("false", "true"):
        for preset, steps in BOTH:
            scenario = _scenario(label, checkpointing, preset, steps)
            least, predicted = least_memory(scenario), predict_memory(scenario)
            assert least <= predicted.device_bytes
            states = sum(scenario.held_states.values()) - scenario.held_states.get("gradients", 0)
            assert label == PIPELINE or least > states + saved_bytes(scenario)


def saved_bytes(scenario: Scenario) -> int:
    """What a forward pass leaves for the backward pass."""
    profile, workload = activation_profile(scenario), scenario.workload()
    blocks = map(profile.block_at, range(len(LLAMA.layout.blocks)))
    saved = [one for part in (profile.embedding, *blocks, profile.head, profile.loss) for one in part.saved]
    return sum(one.size.bytes(samples_at_once(workload), workload.part_length) for one in saved)


BOTH = (("library-defaults", 3), ("like-for-like", 3), ("like-for-like", 1))


def _scenario(label: str, checkpointing: str, preset: str, steps: int) -> Scenario:
    given = "training.precision=bf16-mixed", f"training.activation_checkpointing={checkpointing}"
    scenario = Scenario.of(
        label, LLAMA, load_experiment(None, given).job(), world_size=1 if label == "single" else 4,
        ranks_per_node=4, preset=preset, micro_batch_size=4, accumulation_steps=steps,  # type: ignore[arg-type]
    )  # fmt: skip
    assert scenario is not None
    return scenario
