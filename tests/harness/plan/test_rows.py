"""Rows against figures that arithmetic or a published table fixes."""

from dataclasses import replace

import pytest

from harness.forms.layout import Layout, Tensor
from harness.job.experiment import Experiment
from harness.plan.answer import candidates
from harness.plan.model import PlannedModel
from harness.plan.models import load_model
from harness.plan.prediction import Prediction
from harness.plan.question import ask as question
from harness.plan.step_time import hours_per_billion_tokens, kilowatt_hours_per_billion_tokens
from tests.harness.plan.asking import row, rows, states

MIXED = "training.precision=bf16-mixed"
GB = 1e9


def of_size(parameters: int, backend: str, world_size: int, precision: str) -> Prediction:
    """A model of that many parameters; only its size matters."""
    shape = (parameters // 1000, 1000)
    layout = Layout(parameters=(Tensor("weight", shape, "float32"),), decaying=frozenset({"weight"}))
    model: PlannedModel = replace(load_model("gpt2"), layout=layout)
    experiment = Experiment.model_validate({"training": {"precision": precision}})
    asked = question(
        model, experiment, backends=[backend], world_sizes=[world_size], ranks_per_node=world_size
    )
    (found,) = candidates(asked)
    return found


@pytest.mark.parametrize(
    ("backend", "gigabytes"),
    [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9), ("fsdp", 1.9)],
)
def test_states_of_the_zero_paper(backend: str, gigabytes: float) -> None:
    """arXiv 1910.02054, figure 1: 7.5e9 parameters on 64 GPUs."""
    textbook = of_size(7_500_000_000, backend, 64, "bf16-mixed").textbook_state_bytes
    assert round(textbook / GB, 1) == gigabytes


@pytest.mark.parametrize(
    ("backend", "world_size", "gigabytes"),
    [
        ("ddp", 1, 8.95),
        ("zero1", 2, 5.59), ("zero2", 2, 5.03), ("zero3", 2, 4.47),
        ("zero1", 4, 3.91), ("zero2", 4, 3.08), ("zero3", 4, 2.24),
        ("zero1", 8, 3.08), ("zero2", 8, 2.10), ("zero3", 8, 1.12),
    ],
)  # fmt: skip
def test_states_of_bloom_560m(backend: str, world_size: int, gigabytes: float) -> None:
    textbook = states(MIXED, backends=backend, world_sizes=(world_size,)).textbook_state_bytes
    assert round(textbook / GB, 2) == gigabytes


@pytest.mark.parametrize(
    ("backend", "per_parameter"),
    [("ddp", (16, 0)), ("zero1", (8, 8)), ("zero2", (4, 12)), ("zero3", (0, 16))],
)
def test_states_in_fp32(backend: str, per_parameter: tuple[int, int]) -> None:
    found = states(backends=backend, world_sizes=(8,))
    assert found.textbook_state_bytes == 559_214_592 * (per_parameter[0] + per_parameter[1] / 8)


def test_seven_billion_parameters_as_the_cineca_course_counts_them() -> None:
    full = of_size(7_000_000_000, "ddp", 1, "fp32")
    half = of_size(7_000_000_000, "ddp", 1, "bf16")
    assert [full.state_bytes(kind) for kind in ("weights", "gradients", "optimizer")] == [28e9, 28e9, 56e9]
    assert [half.state_bytes(kind) for kind in ("weights", "gradients", "optimizer")] == [14e9, 14e9, 28e9]


@pytest.mark.parametrize(("parameters", "terabytes"), [(7_000_000_000, 0.112), (70_000_000_000, 1.12)])
def test_sixteen_bytes_per_parameter(parameters: int, terabytes: float) -> None:
    found = of_size(parameters, "ddp", 1, "bf16-mixed")
    assert found.state_bytes("weights", "gradients", "masters", "optimizer") == terabytes * 1e12


@pytest.mark.parametrize(("world_size", "gigabytes"), [(128, 2.1875), (1280, 0.21875)])
def test_shards_of_seventy_billion(world_size: int, gigabytes: float) -> None:
    """FSDP lecture: fp32 shards of 70e9 parameters."""
    found = of_size(70_000_000_000, "fsdp", world_size, "bf16-mixed")
    weights, moments = found.state_bytes("weights"), found.state_bytes("optimizer")
    assert weights == pytest.approx(gigabytes * GB, rel=1e-4)
    assert moments == pytest.approx(2 * gigabytes * GB, rel=1e-4)


def test_bert_base_cased() -> None:
    """accelerate estimate-memory: 413.18 MiB of fp32 weights, as much of gradients."""
    found = states(model="bert-base-cased", world_sizes=(1,))
    assert found.state_bytes("weights") == 108_310_272 * 4
    assert round(108_310_272 * 4 / 2**20, 2) == 413.17  # the table counts 1,280 parameters more
    assert found.state_bytes("gradients") == found.state_bytes("weights")


@pytest.mark.parametrize(
    ("backend", "settings", "gigabytes"),
    [
        ("ddp", ("training.precision=fp32",), 3.915),
        ("ddp", ("training.precision=bf16",), 1.957),
        ("zero3", (MIXED, "runtime.preset=library-defaults"), 2.936),
        ("fsdp", (MIXED,), 3.915),
    ],
)
def test_bytes_that_bloom_560m_sends(backend: str, settings: tuple[str, ...], gigabytes: float) -> None:
    """Eight ranks: the textbook exactly, the implementation up to padding, buffers and norm."""
    found = states(*settings, backends=backend, world_sizes=(8,))
    assert round(found.textbook_sent_bytes / GB, 3) == gigabytes
    if backend != "zero3":  # FSDP and ZeRO-3 gather tied weights at each use, or not
        assert found.sent_bytes == pytest.approx(found.textbook_sent_bytes, rel=0.001)


def test_states_fall_with_the_number_of_ranks() -> None:
    found = rows(MIXED, backends="fsdp", world_sizes=(1, 8, 64, 512))
    sizes = [r.state_bytes("weights", "gradients", "optimizer") or 0 for r in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_without_a_gpu_nothing_is_judged_or_timed() -> None:
    found = row(MIXED)
    assert (found.verdict, found.speed) == (None, None)
    assert found.speed_unknown == "no GPU was named (--gpu)"


def test_a_gpu_is_judged_and_timed() -> None:
    small, large = rows(MIXED, backends="ddp fsdp", world_sizes=(8,), gpu="A100-40")
    assert small.verdict.device_bytes == int(39.5 * 2**30)
    assert hours_per_billion_tokens(large.speed, 8) == pytest.approx(
        1e9 / 3600 / 8 / large.speed.tokens_per_second_per_gpu
    )
    hours = hours_per_billion_tokens(large.speed, 8)
    assert kilowatt_hours_per_billion_tokens(large.speed, 8) == pytest.approx(hours * 8 * 0.4)


def test_several_nodes_without_a_network_have_the_time_of_the_one_that_is_assumed() -> None:
    asked = {"backends": "fsdp", "world_sizes": (16,), "gpu": "A100-40"}
    found, named = row(MIXED, **asked), row(MIXED, **asked, fabric="HDR200")
    assert found.memory == named.memory
    assert found.tokens_per_second_per_gpu == named.tokens_per_second_per_gpu > 0
