"""DeepSpeed's own estimators, called as they are installed, beside the rows of an estimate."""

import contextlib
import io

import pytest

from harness.forms.layout import elements
from harness.forms.terms import Term
from harness.plan.prediction import Prediction
from tests.harness.plan.asking import states

pytestmark = pytest.mark.long(seconds=10)
MIXED = "training.precision=bf16-mixed"
MODELS = ("bloom-560m", "gpt2-xl", "Llama-3.1-8B", "Llama-2-70b")


def exact(found: Prediction, *kinds: str) -> int:
    """States without what DeepSpeed's estimators leave out: padding, copies, buffers."""
    terms: tuple[Term, ...] = found.states.terms
    return sum(term.bytes for term in terms if term.kind in kinds and not term.extra)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    """DeepSpeed writes to the terminal as it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed  # noqa: F401


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("per_node", "nodes"), [(8, 1), (4, 8), (8, 64)])
def test_stage_2_is_as_deepspeed_estimates_it(model: str, per_node: int, nodes: int) -> None:
    """It counts 2 P of weights, and 18 P / N: 12 of masters and moments, and gradients of 2 and of 4 bytes.

    The gradients of 2 bytes beside those of 4 are the ones that wait in DeepSpeed's bucket; the states here
    have one gradient.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    found = states(MIXED, model=model, backends="zero2", world_sizes=(per_node * nodes,), per_node=per_node)
    count, ranks = found.scenario.model.parameters, per_node * nodes
    _, on_gpu = estimate_zero2_model_states_mem_needs(count, per_node, nodes, cpu_offload=False)
    ours = exact(found, "weights", "masters", "optimizer") + 6 * count / ranks
    assert ours == pytest.approx(on_gpu, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("per_node", "nodes"), [(8, 1), (4, 8), (8, 64)])
def test_stage_3_is_as_deepspeed_estimates_it(model: str, per_node: int, nodes: int) -> None:
    """18 P / N, of which weights, masters and moments take 14 and gradients 4, and one layer of 4 bytes."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    found = states(MIXED, model=model, backends="zero3", world_sizes=(per_node * nodes,), per_node=per_node)
    layout, ranks = found.scenario.model.layout, per_node * nodes
    largest = max(elements([tensor]) for tensor in layout.parameters)
    _, on_gpu, layer = estimate_zero3_model_states_mem_needs(
        layout.parameter_count, largest, per_node, nodes, cpu_offload=False
    )
    ours = exact(found, "weights", "masters", "optimizer") + 4 * layout.parameter_count / ranks
    assert ours + layer == pytest.approx(on_gpu, rel=1e-4)


def test_offload_of_stage_2_leaves_what_deepspeed_leaves_on_the_gpu() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    found = states(MIXED, backends="zero2:offload=optimizer")
    _, on_gpu = estimate_zero2_model_states_mem_needs(found.scenario.model.parameters, 8, 1, cpu_offload=True)
    device = sum(
        term.bytes for term in found.states.terms if term.kind == "weights" and not (term.host or term.extra)
    )
    assert device == on_gpu
