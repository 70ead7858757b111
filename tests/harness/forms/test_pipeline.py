"""A pipeline's bubble, the order of its passes, and what it needs without activations."""

from dataclasses import replace

import pytest

from harness.backends.mesh import Mesh
from harness.backends.strategy import StrategyKind
from harness.forms.layout import Layout, Tensor
from harness.forms.peak_memory.families import order, without_activations
from harness.forms.pipeline import bubble_share
from harness.forms.workload import Workload


def ticks_of_gpipe(ranks: int, micro_batches: int) -> float:
    """Idle share of one pass: rank r works from tick r to r + m, and all wait for the last."""
    length = ranks - 1 + micro_batches
    return 1 - micro_batches / length


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 3)])
def test_it_is_the_idle_share_of_the_clock(ranks: int, micro_batches: int) -> None:
    expected = ticks_of_gpipe(ranks, micro_batches)
    assert bubble_share(ranks=ranks, micro_batches=micro_batches) == pytest.approx(expected)


def test_interleaving_divides_the_ratio_to_the_ideal_time() -> None:
    """Narayanan et al., section 2.2: (p - 1) / (v m)."""
    share = bubble_share(ranks=4, micro_batches=8, stages_per_rank=2)
    assert share / (1 - share) == pytest.approx(3 / 16)


def test_one_rank_has_no_bubble() -> None:
    assert bubble_share(ranks=1, micro_batches=4) == 0


def pipeline(ranks: int, micro_batches: int, schedule: str, place: int) -> Workload:
    return Workload(
        layout=Layout(parameters=(), decaying=frozenset(), blocks=tuple(f"h.{n}" for n in range(16))),
        strategy=StrategyKind(family="pipeline", sharding="pipeline"),
        world_size=ranks,
        rank=place,
        mesh=Mesh.of(ranks, {"pipeline": ranks, "data": None}),
        options={"schedule": schedule, "micro_batches": micro_batches},
    )


def most_in_flight(given: Workload) -> int:
    now = most = 0
    for each in order(given):
        now += -1 if each.backward else 1
        most = max(most, now)
    assert now == 0
    return most


def test_gpipe_holds_all_micro_batches_and_1f1b_those_of_the_ranks_behind() -> None:
    assert [most_in_flight(pipeline(4, 8, "gpipe", place)) for place in range(4)] == [8, 8, 8, 8]
    assert [most_in_flight(pipeline(4, 8, "1f1b", place)) for place in range(4)] == [4, 3, 2, 1]
    assert most_in_flight(pipeline(4, 2, "1f1b", 0)) == 2


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 3)])
def test_interleaved_passes_run_in_the_order_of_torch(ranks: int, micro_batches: int) -> None:
    from torch.distributed.pipelining import schedules

    for place in range(ranks):
        torchs = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
        torchs.n_local_stages, torchs.pp_group_size = 2, ranks
        torchs._n_microbatches = micro_batches
        torchs.microbatches_per_round = micro_batches // max(1, micro_batches // ranks)
        expected = [
            (action.computation_type == schedules._ComputationType.FULL_BACKWARD, action.stage_index)
            for action in torchs._calculate_single_rank_operations(place)
            if action is not None
        ]
        given = replace(pipeline(ranks, micro_batches, "interleaved", place))
        assert [(p.backward, p.stage * ranks + place) for p in order(given)] == expected


def test_what_a_pipeline_needs_without_activations_has_no_logits() -> None:
    tensors = tuple(Tensor(f"h.{n}.weight", (8, 8), "float32") for n in range(4))
    table = Tensor("wte.weight", (1000, 8), "float32")
    end = Tensor("ln_f.weight", (8,), "float32"), Tensor("lm_head.weight", (1000, 8), "float32")
    parameters = (table, *tensors, *end)
    names = frozenset(tensor.name for tensor in parameters)
    model = Layout(parameters=parameters, decaying=names, blocks=tuple(f"h.{n}" for n in range(4)))
    for batch in (4, 8):
        given = pipeline(2, 4, "gpipe", 0)
        given = replace(given, layout=model, sequence_length=64, micro_batch_size=batch)
        # Weights, gradients and two moments of the last two blocks and what follows; what arrives there.
        assert without_activations(given) == 16 * (1000 * 8 + 8 + 2 * 64) + batch * 64 * 8 * 4
