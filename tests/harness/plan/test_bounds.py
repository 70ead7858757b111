"""Peaks that are not predicted, between those of two jobs that are."""

from __future__ import annotations

import pytest

from harness.plan import answer as of_row
from harness.plan import prediction
from harness.plan.answer import answers
from harness.plan.coverage import neighbours
from harness.plan.document import document
from harness.plan.prediction import MemoryPrediction, Prediction, memory_bounds, predict_memory
from harness.plan.text import answer_lines
from tests.harness.plan.asking import ask, row

COMPILED = "model.compile=block"
LONG = ("training.precision=bf16-mixed", "data.sequence_length=2048")


def peak(found: Prediction) -> int:
    return found.memory.peak_bytes


def test_compiled_blocks_keep_between_what_eager_ones_recompute_to_and_keep() -> None:
    asked = {"backends": "fsdp", "gpu": "A100-80", "model": "llama-3.1-8b"}
    found = row(*LONG, COMPILED, **asked)
    least, most = (
        peak(row(*LONG, f"training.activation_checkpointing={checkpointing}", **asked))
        for checkpointing in ("true", "false")
    )
    assert found.memory is None
    assert found.peak_bytes_between == (least, most)
    assert least < most
    assert found.verdict.answer == "fits"  # the most does


def test_of_every_second_block_a_stage_keeps_between_all_and_none() -> None:
    asked = {"backends": "pp:stages=4", "gpu": "A100-80", "model": "llama-3.1-8b"}
    settings = (*LONG, "data.sequence_length=4096", "training.micro_batch_size=8")
    found = row(*settings, "training.activation_checkpointing=every-2", **asked)
    bounds = found.peak_bytes_between
    assert bounds[0] < 85e9 < bounds[1]
    assert found.verdict is None  # it may fit


@pytest.mark.parametrize(
    ("kind", "least_of_adamw", "most_of_adamw"),
    [("adam", 0.6, 1.3), ("sgd", 0.3, 0.8), ("adamw-8bit", 0.4, 1.1), ("adamw-8bit-bnb", 0.4, 0.8)],
)
def test_another_optimizer_has_its_states_and_at_most_so_many_copies(
    kind: str, least_of_adamw: float, most_of_adamw: float
) -> None:
    asked = {"backends": "ddp", "gpu": "H200", "model": "llama-3.2-3b"}
    checkpointed = (*LONG, "training.activation_checkpointing=true", "data.sequence_length=512")
    found, adamw = row(*checkpointed, f"optimizer.kind={kind}", **asked), row(*checkpointed, **asked)
    # Tensor by tensor, in 8 bits, nothing is larger than the passes: what the update copies does not decide.
    assert (found.memory is None) == (kind in ("adam", "sgd"))
    least, most = (bound / peak(adamw) for bound in found.peak_bytes_between or (peak(found),) * 2)
    assert least_of_adamw < least <= most < most_of_adamw
    assert (least < most) == (found.memory is None)
    ratio = found.speed.step_seconds / adamw.speed.step_seconds
    assert (ratio > 1) == (kind == "adam")


def test_a_pipeline_has_the_bounds_of_another_optimizers_update() -> None:
    pipeline = "pp:schedule=interleaved,stages=2,micro_batches=2"
    asked = {"backends": pipeline, "gpu": "H200", "model": "llama-3.2-3b"}
    found = row(*LONG, "optimizer.kind=adamw-8bit", "training.micro_batch_size=2", **asked)
    assert found.peak_bytes_between is not None or found.memory is not None


def test_text_and_document_have_the_bounds_and_how_wrong_their_like_were() -> None:
    question = ask(*LONG, COMPILED, backends="fsdp", gpu="A100-80", model="llama-3.1-8b")
    found = answers(question)
    (of_rows,) = document(found)["rows"]
    least, most = of_rows["peak_bytes_between"]
    assert of_rows["peak_bytes"] is None
    text = " ".join("\n".join(answer_lines(found)).split())
    between = f"{least / 1e9:.3g} and {most / 1e9:.3g} GB"
    assert f"fsdp: peak between {between}: compiled blocks keep as much as eager blocks at most" in text
    assert "fsdp fits, between " in text
    assert "typical error, full training under fsdp: speed ±" in text
    assert "memory is a range" in text
    assert "compiled code is as fast as eager code, which is the least" in text


def test_compiled_code_is_predicted_as_fast_as_eager_code() -> None:
    asked = {"backends": "fsdp", "gpu": "A100-80", "model": "llama-3.1-8b"}
    eager = row(*LONG, **asked).tokens_per_second_per_gpu
    for kind in ("block", "model"):
        assert row(*LONG, f"model.compile={kind}", **asked).tokens_per_second_per_gpu == eager > 0


def test_emulated_fp8_needs_what_fp32_does_and_operands_beside_it() -> None:
    asked = {"backends": "fsdp", "gpu": "H100-80", "model": "llama-3.2-1b"}
    found = row(*LONG, "training.precision=fp8", **asked)
    wide = peak(row(*LONG, "training.precision=fp32", **asked))
    least, most = found.peak_bytes_between or (peak(found),) * 2  # alike where no block decides
    inner, hidden, tokens = 8192, 2048, 2048
    assert wide == least <= most <= least + 9 * (inner * hidden + tokens * (inner + hidden))
    assert found.speed is None
    assert "emulated" in str(found.speed_unknown)


EMBEDDING, HALF, MLPS, ALL_BLOCKS = (
    f"{{parameters: '{pattern}', frozen: true}}"
    for pattern in ("model.embed_tokens*", "model.layers.[0-9].*", "*.mlp.*", "model.layers.*")
)


def freezing(*groups: str) -> str:
    return f"optimizer.groups=[{', '.join(groups)}]"


def activations(bound: MemoryPrediction) -> int:
    (passes,) = (moment for moment in bound.moments if moment.name == "forward/backward")
    return passes.kinds["activations"]


@pytest.mark.parametrize(
    ("groups", "least", "most"),
    [
        ((EMBEDDING, HALF), 21 / 34, 24 / 34),  # ten of 32 blocks before all that is trained keep nothing
        ((EMBEDDING, ALL_BLOCKS), 0.0, 2 / 34),  # nothing but the head and its loss
        ((HALF,), 0.7, 1.0),  # the embedding is trained: gradients pass
        ((MLPS,), 0.4, 1.0),
    ],
)
def test_frozen_parameters_keep_what_gradients_need(
    groups: tuple[str, ...], least: float, most: float
) -> None:
    """As shares of what blocks keep where all is trained, beyond head and loss, which every job has: the
    block that computes holds about as much as two keep."""
    asked = {"backends": "ddp", "gpu": "H200", "model": "llama-3.1-8b"}
    whole, found, rest = (
        row(*LONG, *settings, **asked).scenario
        for settings in ((), (freezing(*groups),), (freezing(EMBEDDING, ALL_BLOCKS),))
    )
    assert whole is not None
    assert found is not None
    assert rest is not None
    plain = activations(predict_memory(whole))
    bounds, ends = memory_bounds(found), memory_bounds(rest)
    assert bounds is not None
    base = activations(ends[0])
    low, high = ((activations(bound) - base) / (plain - base) for bound in bounds)
    assert least <= low <= high <= most


def test_a_range_of_frozen_parameters_has_their_states_and_says_why() -> None:
    asked = {"backends": "fsdp", "gpu": "A100-80", "model": "llama-3.1-8b"}
    plain, found = row(*LONG, **asked), row(*LONG, freezing(EMBEDDING, HALF), **asked)
    assert found.peak_bytes_between is not None
    low, high = found.peak_bytes_between
    assert low < high < peak(plain)
    assert high < 1.05 * low
    assert "frozen layers keep at most what trained ones do" in (found.memory_unknown or "")
    assert found.speed is None
    assert "speed under frozen optimizer.groups is not predicted" in (found.speed_unknown or "")


def test_bounds_that_are_far_apart_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"backends": "fsdp", "gpu": "A100-80", "model": "llama-3.1-8b"}
    monkeypatch.setattr(prediction, "FARTHEST_BOUNDS", 1.01)
    assert row(*LONG, COMPILED, **asked).peak_bytes_between is None


def test_bounds_that_are_far_apart_refuse_what_not_even_the_least_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "FARTHEST_BOUNDS", 1.01)
    asked = ("data.sequence_length=16384", *LONG[:1], COMPILED)
    question = ask(*asked, backends="ddp", gpu="A100-80", model="llama-3.1-8b")
    (answer,) = answers(question)
    (found,) = answer.rows
    assert found.peak_bytes_between is None
    assert not found.verdict.fits
    assert document([answer])["rows"][0]["fits"] is False
    assert "nothing fits" in "\n".join(answer_lines([answer]))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("optimizer.kind=muon",),
        (COMPILED, "optimizer.kind=muon"),
        (COMPILED, "training.activation_checkpointing=true"),
    ],
)
def test_what_has_no_two_neighbours_has_no_bounds(settings: tuple[str, ...]) -> None:
    (found,) = of_row.candidates(ask(*LONG, *settings, backends="fsdp", gpu="A100-80"))
    assert found.scenario is not None
    assert neighbours(found.scenario) is None
