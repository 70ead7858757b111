"""Pipelines train as one process does, hold and send what their closed forms say, under every schedule."""

from pathlib import Path

import pytest

from harness.forms import pipeline
from harness.forms.terms import Volume
from tests.contract.cases import PROBED_STEP
from tests.contract.deeds import PIPELINED, Piped
from tests.contract.ranks import on_ranks
from tests.contract.test_contract import LOSS_TOLERANCE, NORM_TOLERANCE, WEIGHT_TOLERANCE
from tests.contract.test_states import workload
from tests.representatives import COSTLY, EXHAUSTIVE

pytestmark = pytest.mark.long(seconds=10)

BF16_LOSS = 2e-3
"""Nats per token: bf16 rounds to 8 bits, and a pipeline sums its micro-batches in another order."""
KINDS = ("weights", "gradients", "optimizer", "communication", "buffers")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Piped]:
    return on_ranks("train_pipelines", "single", 1, tmp_path_factory.mktemp("single"))[0]


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=COSTLY), pytest.param(4, marks=EXHAUSTIVE)],
)
def pipelines(request, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Piped]]:
    """By rank."""
    folder: Path = tmp_path_factory.mktemp("pipelines")
    return on_ranks("train_pipelines", "pp", request.param, folder)


def test_pipelines_train_as_one_process_does(pipelines, reference) -> None:
    for (label, number), first in pipelines[0].items():
        expected, parts = reference["single", number], [of_rank[label, number] for of_rank in pipelines]
        low = PIPELINED[number].precision != "fp32"
        losses = [sum(of_step) for of_step in zip(*(part.losses for part in parts), strict=True)]
        worst = max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True))
        assert worst <= (BF16_LOSS if low else LOSS_TOLERANCE), (label, PIPELINED[number])
        if low:
            continue
        for part in parts:
            assert part.norms == first.norms
            assert part.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
            assert part.weights.keys() == expected.weights.keys()
            for name, weight in part.weights.items():
                assert float((weight - expected.weights[name]).abs().max()) <= WEIGHT_TOLERANCE, (label, name)


def test_states_of_each_rank_are_the_closed_form_to_the_byte(pipelines) -> None:
    for rank, of_rank in enumerate(pipelines):
        for (label, number), trained in of_rank.items():
            given = workload(label, PIPELINED[number], trained.layout, len(pipelines), rank)
            states = pipeline.model_states(given)
            expected = {kind: states.kinds().get(kind, 0) for kind in KINDS}
            assert {kind: trained.kinds.get(kind, 0) for kind in KINDS} == expected, (label, rank)


def test_messages_of_each_rank_are_the_closed_form_to_the_byte(pipelines) -> None:
    for rank, of_rank in enumerate(pipelines):
        for (label, number), trained in of_rank.items():
            steps = (0, PROBED_STEP)
            given = workload(label, PIPELINED[number], trained.layout, len(pipelines), rank, steps=steps)
            assert counted(trained) == expected_rows(pipeline.collectives(given)), (label, rank)


def test_ends_without_a_shared_weight_send_only_activations_and_their_gradients(pipelines) -> None:
    trained = pipelines[0]["pp", 1]
    assert {(row["phase"], row["op"]) for row in trained.rows if row["dtype"] == "float32"} == {
        ("forward", "send"),
        ("backward", "recv"),
    }


def counted(trained: Piped) -> dict[tuple[str, ...], tuple[int, int]]:
    """Calls and payload by kind."""
    return {
        (row["phase"], row["op"], row["dtype"], row["role"]): (row["calls"], row["payload_bytes"])
        for row in trained.rows
    }


def expected_rows(volume: Volume) -> dict[tuple[str, ...], tuple[int, int]]:
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    for c in volume.collectives:
        key = (c.phase, c.op, c.dtype, c.role)
        calls, payload = sums.get(key, (0, 0))
        sums[key] = calls + (c.calls or 0), payload + c.payload_bytes
    return sums
