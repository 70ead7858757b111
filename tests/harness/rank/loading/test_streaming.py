import pytest
import torch
from torch import Tensor, nn

from harness.job.job import Job
from harness.rank.data import DataFacts
from harness.rank.initial_weights import CannotStream, parameter_numbers, stream_weights
from harness.rank.models.model import draw_model, model_config
from tests.harness.rank.loading.models import CONFIGS, MAMBA, VOCABULARY, job_of


def draw(job: Job) -> nn.Module:
    return draw_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))


def streamed(job: Job, *, by_block: bool = True) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    _, numbers = parameter_numbers(lambda: draw(job))
    stream_weights(
        lambda: draw(job),
        numbers,
        lambda name, tensor: kept.update({name: tensor.clone()}),
        by_block=by_block,
    )
    return kept


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_streamed_weights_equal_those_of_a_plain_build_to_the_bit(architecture: str, by_block: bool) -> None:
    job = job_of(CONFIGS[architecture], seed=3)
    plain = dict(draw(job).named_parameters())
    if architecture == "gpt2" and not by_block:
        with pytest.raises(CannotStream):
            streamed(job, by_block=False)
        return
    weights = streamed(job, by_block=by_block)
    assert set(weights) == set(plain)
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.items())


def test_a_model_that_initialises_across_modules_is_refused() -> None:
    with pytest.raises(CannotStream):
        streamed(job_of(MAMBA))


def test_plain_builds_are_as_before_after_a_stream() -> None:
    job = job_of(CONFIGS["llama"])
    before = draw(job).state_dict()
    streamed(job)
    after = draw(job).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_at_most_one_block_is_in_memory() -> None:
    job = job_of(CONFIGS["gpt2"])
    _, numbers = parameter_numbers(lambda: draw(job))
    held: list[int] = []
    living: list[nn.Module] = []
    plain = nn.Module.__init__

    def note(name: str, tensor: Tensor) -> None:
        modules = {id(module): module for module in living}.values()
        parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
        held.append(sum(p.nbytes for p in parameters.values() if not p.is_meta))

    def construct(module: nn.Module, *arguments: object, **keywords: object) -> None:
        plain(module, *arguments, **keywords)
        living.append(module)

    nn.Module.__init__ = construct  # type: ignore[method-assign]
    try:
        stream_weights(lambda: draw(job), numbers, note)
    finally:
        nn.Module.__init__ = plain  # type: ignore[method-assign]
    model = draw(job)
    block = sum(p.nbytes for p in model.transformer.h[0].parameters())  # type: ignore[union-attr,index,operator]
    norms = sum(p.nbytes for name, p in model.named_parameters() if "ln_" in name)
    largest = max(block, max(p.nbytes for p in model.parameters()))
    assert 0 < max(held) <= largest + norms
