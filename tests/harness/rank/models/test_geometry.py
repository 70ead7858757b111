"""What the closed forms of FLOPs are told of a model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.forms.textbook import ModelGeometry, model_flops_per_token
from harness.rank.models.description import describe_geometry
from harness.record import GeometryPart
from tests.harness.rank.models.test_model import SMALL, SMALL_GPT2, built, job


def test_a_table_that_is_only_looked_up_does_not_multiply() -> None:
    model = built(job(SMALL))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert describe_geometry(model) == GeometryPart(
        multiplying_parameters=total - 257 * 32, layers=2, attention_width=32
    )


def test_a_tied_table_is_the_output_layer_and_multiplies() -> None:
    model = built(job(SMALL | {"tie_word_embeddings": True}))
    geometry = describe_geometry(model)
    assert geometry is not None
    assert geometry.multiplying_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_positions_of_gpt2_are_only_looked_up() -> None:
    model = built(job(SMALL_GPT2))
    total = sum(parameter.numel() for parameter in model.parameters())
    geometry = describe_geometry(model)
    assert geometry is not None
    assert geometry.multiplying_parameters == total - 64 * 32
    assert (geometry.layers, geometry.attention_width) == (2, 32)


def test_mixtures_of_experts_have_no_closed_form_here() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert describe_geometry(built(job(SMALL | experts))) is None


@pytest.mark.parametrize("config", [SMALL, SMALL_GPT2])
def test_the_closed_form_is_what_torch_counts(config: dict[str, object]) -> None:
    """torch counts matrix products: all of the formula but 6 per element of norms and biases."""
    model = built(job(config))
    length = 32
    tokens = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(input_ids=tokens).logits.sum().backward()
    geometry = describe_geometry(model)
    assert geometry is not None
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    expected = model_flops_per_token(
        ModelGeometry(
            multiplying_parameters=geometry.multiplying_parameters - vectors,
            block_parameters=0,
            layers=geometry.layers,
            attention_width=geometry.attention_width,
            sequence_length=length,
        )
    )
    assert counted.get_total_flops() == 2 * length * expected
