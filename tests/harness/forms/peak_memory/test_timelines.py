"""What strategies hold at the fullest moments, on a model that only has weights."""

from __future__ import annotations

import pytest

from harness.backends.registry import strategy_of
from harness.forms.activations import no_activations
from harness.forms.layout import Layout, Tensor
from harness.forms.peak_memory.families import Fsdp2Timeline, peak_moments, without_activations
from harness.forms.peak_memory.step import Ledger
from harness.forms.terms import Term
from harness.forms.workload import Workload
from tests.harness.forms.peak_memory.plain import held, layout, moments

BLOCK = 10**6
MODEL = layout(4, BLOCK)
"""Elements; at fp32 a block has 4e6 bytes."""


def test_ddp_holds_its_buckets_in_the_forward_pass_too() -> None:
    like = moments("ddp", MODEL, 2)
    assert held(like["forward"], "gradients") == 4 * 4 * BLOCK
    defaults = moments("ddp", MODEL, 2, preset="library-defaults")
    assert held(defaults["forward"], "gradients") == 0
    assert held(defaults["step"], "gradients") + held(defaults["step"], "communication") == 2 * 4 * 4 * BLOCK


def test_fsdp2_gathers_the_next_unit_of_the_backward_pass_ahead() -> None:
    found = moments("fsdp", MODEL, 2)
    assert held(found["backward"], "gathered") == 2 * 4 * BLOCK
    three = moments("fsdp", MODEL, 2, options={"prefetch": 3})
    assert held(three["forward"], "gathered") == (3 + 2) * 4 * BLOCK


def test_fsdp_without_resharding_holds_all_units_until_the_backward_pass() -> None:
    found = moments("fsdp-grad-op", MODEL, 2)
    assert held(found["forward"], "gathered") == (4 + 1) * 4 * BLOCK


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


def test_zero3_reduces_by_bucket() -> None:
    found = moments("zero3", MODEL, 4, options={"reduce_bucket_size": 2 * BLOCK})
    ordered = sum(c for h, c in found["reduction"].held.items() if h.name == "bucket ordered by rank")
    assert ordered == 2 * 4 * BLOCK


@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_zero_flattens_the_gradients_of_its_partition_for_the_update(backend: str) -> None:
    found = moments(backend, MODEL, 2)
    flat = sum(count for holding, count in found["step"].held.items() if "flat gradients" in holding.name)
    assert flat == 2 * 4 * BLOCK


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1", "zero3"])
def test_gloo_copies_what_it_gathers(backend: str) -> None:
    on_gpu = moments(backend, layout(4, BLOCK, root=8 * BLOCK), 2)
    on_cpu = moments(backend, layout(4, BLOCK, root=8 * BLOCK), 2, device="cpu", transport="gloo")

    def copies(found: object) -> bool:
        return any("gloo" in h.name for peak in found.values() for h in peak.held)  # type: ignore[attr-defined]

    assert copies(on_cpu)
    assert not copies(on_gpu)


def test_further_micro_steps_keep_whole_gradients_under_fsdp() -> None:
    found = moments("fsdp", MODEL, 2, accumulation_steps=3)
    assert held(found["forward"], "gradients") == 4 * 4 * BLOCK


@pytest.mark.parametrize("backend", ["fsdp", "fsdp-grad-op", "fsdp1", "fsdp1-grad-op"])
def test_fsdp_that_reduces_in_every_micro_step_holds_no_whole_gradients(backend: str) -> None:
    found = moments(backend, MODEL, 2, accumulation_steps=3, options={"sync_each_batch": True})
    one = moments(backend, MODEL, 2)
    shards = 4 * 4 * BLOCK // 2
    assert held(found["forward"], "gradients") == held(found["step"], "gradients") == shards
    assert held(one["forward"], "gradients") == 0
    assert found["step"].bytes - one["step"].bytes <= 16  # a batch more


def test_buckets_of_ddp_that_reduces_in_every_micro_step_are_all_its_gradients() -> None:
    found = moments("ddp", MODEL, 2, accumulation_steps=3, options={"sync_each_batch": True})
    assert held(found["backward"], "gradients") == 4 * 4 * BLOCK


@pytest.mark.parametrize(("options", "width"), [({}, 2), ({"reduce_dtype": "fp32"}, 4)])
def test_micro_steps_add_up_in_the_dtype_in_which_gradients_are_reduced(
    options: dict[str, str], width: int
) -> None:
    arguments = {"precision": "bf16", "preset": "library-defaults", "accumulation_steps": 2}
    found = moments("fsdp", MODEL, 4, options=options, **arguments)["forward"].held
    assert {h.name: c for h, c in found.items()}["unsharded gradients of micro-steps"] == 4 * BLOCK * width


@pytest.mark.parametrize(("options", "gathered"), [({}, 8), ({"reshards_root": True}, 0)])
def test_a_root_that_is_resharded_is_gathered_again_for_the_backward_pass(
    options: dict[str, bool], gathered: int
) -> None:
    """Between the passes, at the loss, it lies there or does not."""
    model, at_loss = layout(1, BLOCK, root=8 * BLOCK), Term(kind="activations", name="loss")
    strategy = strategy_of("fsdp")
    assert strategy is not None
    workload = Workload(
        layout=model, strategy=strategy, world_size=2, device="cuda", transport="nccl",
        preset="library-defaults", options=options,
    )  # fmt: skip
    timeline = Fsdp2Timeline(workload, Ledger())
    timeline.begin()
    timeline.before_model()
    timeline.after_model()
    timeline.ledger.briefly((at_loss, 1))
    assert held(timeline.ledger.moments()["forward"], "gathered") >= 8 * 4 * BLOCK
    assert sum(c for h, c in timeline.ledger.held.items() if h.kind == "gathered") == gathered * 4 * BLOCK


def test_streams_have_memory_of_their_own() -> None:
    """Reduced gradients come from another stream's blocks: what activations leave is no room for them."""
    found = moments("fsdp", MODEL, 2)
    shards, gathered, gradient, sent = 3 * 8, 4, 4, 4
    ahead, reduced = 2 * 4, 8
    reserved = (shards + gathered + gradient + sent + ahead + reduced) * 10**6
    assert {peak.reserved for peak in found.values()} == {reserved}
    assert max(peak.bytes for peak in found.values()) < reserved


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
    model, ranks = layout(4, 1024), 4
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
        strategy = strategy_of(label)
        assert strategy
        workload = Workload(
            layout=model, strategy=strategy, world_size=ranks, device="cpu", transport="gloo",
            sequence_length=0, gradient_clipping=None, accumulation_steps=steps,
        )  # fmt: skip
        assert without_activations(workload) == blocks * of_a_block, (label, steps)


def test_modules_and_gradients_of_a_step_without_activations_are_those_of_the_model() -> None:
    names = (
        "embed.weight",
        "layers.0.norm.weight",
        "layers.0.mlp.weight",
        "layers.1.mlp.bias",
        "norm.weight",
    )
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
    strategy = strategy_of(label)
    assert strategy
    workload = Workload(
        layout=model, strategy=strategy, world_size=4, device="cuda", transport="nccl", sequence_length=0,
        gradient_clipping=None, accumulation_steps=steps, precision="bf16-mixed",
    )  # fmt: skip
    for moment in peak_moments(workload, no_activations(model)).values():
        assert min(moment.held.values()) >= 0
    # Frozen weights of FSDP1's units are views of what has a gradient: blocks are reduced whole, in pieces of
    # a quarter, but nothing of the root.
    update = peak_moments(workload, no_activations(model))["step"]
    kept = sum(count for term, count in update.held.items() if term.name == "reduced gradients")
    assert kept == {"fsdp": 4 * 64, "fsdp-grad-op": 4 * 64, "fsdp1": 4 * 4160}.get(label, kept)


def test_adapters_under_fsdp1_hold_the_gradients_of_a_whole_block_and_its_flat_one() -> None:
    """Unless a program wraps layers by themselves."""
    names = ("layers.0.mlp.weight", "layers.0.adapter.weight")
    model = Layout(
        parameters=(Tensor(names[0], (4096, 1), "float32"), Tensor(names[1], (64, 1), "float32")),
        decaying=frozenset(names), blocks=("layers.0",), frozen=frozenset(names[:1]),
    )  # fmt: skip
    strategy = strategy_of("fsdp1")
    assert strategy
    for options, elements in (({}, 4160), ({"wraps_layers": True}, 64)):
        workload = Workload(
            layout=model, strategy=strategy, world_size=2, device="cuda", transport="nccl", sequence_length=0,
            gradient_clipping=None, options=options,
        )  # fmt: skip
        fullest = peak_moments(workload, no_activations(model))["backward"]
        assert held(fullest, "gradients") + held(fullest, "communication") >= 2 * 4 * elements, options
        assert (held(fullest, "gradients") + held(fullest, "communication") >= 2 * 4 * 4160) == (not options)
