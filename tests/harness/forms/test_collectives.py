"""Single terms, counted by hand on shapes that do not divide."""

from dataclasses import replace

import pytest

from harness.backends.registry import strategy_of
from harness.forms.terms import Collective
from harness.forms.workload import Workload
from tests.built_in import HYBRID
from tests.geometries import bloom_workload, small_workload, volume_of


def payload(backend: str, workload: Workload, phase: str, op: str, **wanted: str) -> int:
    return sum(c.payload_bytes for c in collectives(backend, workload, phase, op, **wanted))


def collectives(backend: str, workload: Workload, phase: str, op: str, **wanted: str) -> list[Collective]:
    volume = volume_of(backend, workload)
    return [
        c
        for c in volume.collectives
        if (c.phase, c.op) == (phase, op) and all(getattr(c, k) == v for k, v in wanted.items())
    ]


def test_fsdp2_pads_the_first_dimension_of_every_parameter() -> None:
    workload = small_workload((5, 3), (7, 2), world_size=4)
    # 5 rows become 8, 7 rows become 8.
    assert payload("fsdp", workload, "forward", "all_gather") == (8 * 3 + 8 * 2) * 4
    assert payload("fsdp", workload, "forward", "all_gather", term="padding") == (3 * 3 + 1 * 2) * 4


def test_fsdp1_aligns_parameters_to_16_bytes_and_the_end_to_the_ranks() -> None:
    workload = small_workload((5, 1), (3, 1), world_size=4)
    assert payload("fsdp1", workload, "forward", "all_gather") == (8 + 4) * 4
    # In bf16 16 bytes are 8 elements, which matters between two parameters of one unit.
    one_unit = small_workload((5, 1), (3, 1), world_size=2, blocks=(), precision="bf16-mixed")
    assert payload("fsdp1", one_unit, "forward", "all_gather") == padded_to(8 + 3, 2) * 2


def padded_to(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def test_zero_1_pads_each_group_of_the_optimizer_to_two_elements_per_rank() -> None:
    workload = small_workload((5, 1), (3,), world_size=4)  # one group decays, the other does not
    assert payload("zero1", workload, "step", "all_gather") == (8 + 8) * 4
    assert payload("zero1", workload, "step", "all_reduce", term="gradient norm") == 2 * 4


def test_zero_3_cuts_every_parameter_into_equal_partitions() -> None:
    workload = small_workload((5, 1), (3, 1), world_size=4)
    for phase in ("forward", "backward"):
        assert payload("zero3", workload, phase, "all_gather") == (8 + 4) * 4
    assert payload("zero3", workload, "backward", "reduce_scatter") == (8 + 4) * 4


def test_zero_3_gathers_blocks_at_once_where_they_are_its_leaf_modules() -> None:
    """BLOOM: embedding, its norm and the last norm; six modules in each of 24 blocks."""
    for options, units in (({}, 3 + 24 * 6), ({"leaf_module": "blocks"}, 3 + 24)):
        (gathered,) = collectives("zero3", bloom_workload(options=options), "forward", "all_gather")
        assert gathered.calls == units
        assert gathered.payload_bytes == 559_214_592 * 4


def test_zero_3_gathers_what_persists_after_the_update_alone() -> None:
    workload = small_workload((6, 1), (20, 1), options={"stage3_param_persistence_threshold": 10})
    for phase in ("forward", "backward"):
        assert payload("zero3", workload, phase, "all_gather") == 20 * 4
    assert payload("zero3", workload, "step", "all_gather") == 6 * 4


@pytest.mark.parametrize("name", ["stage3_max_reuse_distance", "stage3_max_live_parameters"])
def test_zero_3_gathers_once_where_weights_are_kept_or_the_prefetcher_holds_them(name: str) -> None:
    workload = small_workload((6, 1), (20, 1), options={name: 52})
    assert payload("zero3", workload, "forward", "all_gather") == 26 * 4
    assert payload("zero3", workload, "backward", "all_gather") == 0


def test_zero_3_has_no_closed_form_where_some_weights_are_kept() -> None:
    volume = volume_of("zero3", small_workload((6, 1), (20, 1), options={"stage3_max_reuse_distance": 51}))
    assert volume.unknown is not None
    assert "stage3_max_reuse_distance" in volume.unknown


def test_an_option_overrides_what_the_preset_gathers() -> None:
    options = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    workload = small_workload((6, 1), (20, 1), preset="library-defaults", options=options)
    assert payload("zero3", workload, "backward", "all_gather") == 0  # both persist
    larger = small_workload((600_000, 1), (20, 1), preset="library-defaults", options=options)
    assert payload("zero3", larger, "backward", "all_gather") == 600_000 * 4


def test_zero_3_gathers_a_tied_weight_at_each_use() -> None:
    tied = {"head.weight": "embedding.weight"}
    workload = small_workload((6, 2), (4, 2), tied=tied)
    assert payload("zero3", workload, "forward", "all_gather") == (2 * 12 + 8) * 4
    assert payload("zero3", workload, "backward", "reduce_scatter") == (12 + 8) * 4


def test_zero_3_by_default_gathers_small_parameters_after_the_update_only() -> None:
    workload = small_workload((1000, 200), (10, 10), preset="library-defaults")
    assert payload("zero3", workload, "forward", "all_gather") == 200_000 * 4
    assert payload("zero3", workload, "backward", "all_gather") == 0
    assert payload("zero3", workload, "step", "all_gather") == 100 * 4


def test_zero_3_is_unknown_while_it_records_its_trace() -> None:
    workload = small_workload((4, 2), (4, 2), steps=(1, 2), preset="library-defaults")
    volume = volume_of("zero3", workload)
    assert volume.unknown is not None
    assert "warmup_steps" in volume.unknown


@pytest.mark.parametrize(("steps", "accumulation", "checked"), [((1, 2), 1, True), ((1,), 2, False)])
def test_zero_3_like_for_like_has_a_closed_form_but_for_the_check_of_its_trace(
    steps: tuple[int, ...], accumulation: int, checked: bool
) -> None:
    workload = small_workload((6, 2), (4, 2), steps=steps, accumulation_steps=accumulation)
    volume = volume_of("zero3", workload)
    assert volume.unknown is None
    assert bool(volume.underived) is checked
    assert payload("zero3", workload, "forward", "all_gather") == len(steps) * accumulation * 20 * 4


def test_zero_3_above_the_reuse_distance_is_not_guessed() -> None:
    workload = small_workload((30_000, 20_000), (4, 2), preset="library-defaults")
    volume = volume_of("zero3", workload)
    assert volume.unknown is not None


def test_the_root_stays_gathered_by_default() -> None:
    workload = small_workload((6, 2), (4, 2), preset="library-defaults")
    assert payload("fsdp", workload, "backward", "all_gather") == 8 * 4
    assert payload("fsdp1", workload, "backward", "all_gather") == 8 * 4
    assert payload("fsdp", small_workload((6, 2), (4, 2)), "backward", "all_gather") == 20 * 4


def test_fsdp1_grad_op_gathers_once_per_step_and_fsdp2_in_every_micro_step() -> None:
    workload = small_workload((6, 2), (4, 2), accumulation_steps=3)
    assert payload("fsdp1-grad-op", workload, "forward", "all_gather") == 20 * 4
    assert payload("fsdp-grad-op", workload, "forward", "all_gather") == 3 * 20 * 4


def test_the_last_block_is_gathered_once_more_by_each_further_micro_step_that_no_root_follows() -> None:
    with_root = small_workload((2, 1), (6, 2), (4, 2), accumulation_steps=3)
    layout = replace(with_root.layout, parameters=with_root.layout.parameters[1:])
    without = replace(with_root, layout=layout)
    assert payload("fsdp", with_root, "backward", "all_gather") == 3 * (2 + 12 + 8) * 4
    assert payload("fsdp", without, "backward", "all_gather") == (3 * (12 + 8) + 2 * 8) * 4
    # The third micro-step finds it gathered.
    assert payload("fsdp", without, "forward", "all_gather") == (3 * 12 + 2 * 8) * 4
    assert payload("fsdp-grad-op", without, "backward", "all_gather") == 0


def test_hybrid_reduces_its_shard_across_replicas() -> None:
    workload = small_workload((6, 2), (4, 2), world_size=4, shard_size=2)
    for backend in HYBRID:
        assert payload(backend, workload, "backward", "reduce_scatter", role="shard") == 20 * 4
        assert payload(backend, workload, "backward", "all_reduce", role="replica") == 10 * 4


def test_ddp_broadcasts_the_bucket_order_once() -> None:
    at = {step: small_workload((6, 2), (4, 2), steps=(step,)) for step in (0, 1, 2)}
    # Two parameters, the number of buckets, and one bucket's size, as int32.
    sizes = [payload("ddp", at[step], "forward", "broadcast", dtype="int32") for step in (0, 1, 2)]
    assert sizes == [0, 4 * 4, 0]


def test_an_evaluation_spares_what_it_left_gathered() -> None:
    workload = small_workload((6, 2), (4, 2), steps=(4,), evaluation_every=4)
    assert payload("fsdp-grad-op", workload, "forward", "all_gather") == 0
    assert payload("fsdp", workload, "forward", "all_gather") == 20 * 4


def test_alone_fully_shard_gathers_nothing() -> None:
    workload = small_workload((6, 2), (4, 2), world_size=1)
    assert payload("fsdp", workload, "forward", "all_gather") == 0
    assert payload("fsdp", workload, "backward", "reduce_scatter") == 0


def test_a_backend_of_somebody_else_has_no_expectation() -> None:
    assert strategy_of("mine") is None


def test_zero_3_does_not_guess_which_module_recomputation_leaves_gathered() -> None:
    volume = volume_of("zero3", small_workload((4, 2), (4, 2), activation_checkpointing=True))
    assert "recomputation" in (volume.unknown or "")
