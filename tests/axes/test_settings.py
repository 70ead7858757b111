"""Axes of the job under each strategy, and settings that decide cost alone."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from harness.record import Record
from tests import kept
from tests.representatives import EXHAUSTIVE, first
from tests.traps.clean import AFTER_TRACE, GROUPS, PRECISIONS, assert_clean
from tests.traps.clean import LABELS as TYPED
from tests.traps.matrix import Matrix, padded_documents

pytestmark = pytest.mark.long(seconds=60)
NATIVE = ("ddp", "zero1", "zero3", "fsdp", "fsdp1")
LARGE = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 4096, tie_word_embeddings: %s}"
)
"""Whose logits are most of its memory."""
CHUNK = 8
TOKENS, VOCABULARY = 8 * 16, 4096
CHECKPOINTING = "training.activation_checkpointing"
FP8 = "training.precision=fp8"
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra low-bit is not installed")


def packed() -> list[str]:
    """A job of packed documents that are kept apart."""
    kept.KEPT.mkdir(exist_ok=True)
    path = padded_documents(kept.KEPT / "documents.jsonl")
    return [
        "data.source=jsonl", f"data.path={path}", "data.packed=true", "data.document_attention=within",
        "data.limit=40",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def together() -> list[str]:
    """One job under several axes; the last setting: chunks of the loss."""
    return [LARGE % "false", f"{CHECKPOINTING}=every-2", AFTER_TRACE, *packed(), f"loss.chunk_tokens={CHUNK}"]


@pytest.fixture(scope="module")
def sharded(matrix: Matrix, together: list[str]) -> dict[str, Record]:
    return assert_clean(["zero3", "fsdp"], 2, together, matrix)


@pytest.mark.costly
def test_every_second_block_recomputes_where_weights_are_gathered_again(sharded) -> None:
    assert all(record.observed.activation_checkpointing for record in sharded.values())


def test_where_the_head_is_gathered_the_loss_stays_and_logits_are_gone(sharded, together, matrix) -> None:
    (whole,) = matrix.compare([], 2, together[:-1]).rows
    losses = [step.loss for step in sharded["single"].steps]
    assert losses == pytest.approx([step.loss for step in whole.record.steps], rel=1e-5)
    saved = forward_peak(whole.record) - forward_peak(sharded["single"])
    # At least the logits in fp32 and their gradient, of all tokens but those of a chunk.
    assert saved >= 2 * 4 * VOCABULARY * (TOKENS - CHUNK)


def forward_peak(record: Record) -> int:
    rows = (row for row in record.ranks[0].memory if row.moment == "after_backward")
    return max(row.peak_bytes - row.allocated_bytes for row in rows)


def test_sharded_strategies_keep_documents_apart(sharded) -> None:
    data = sharded["single"].data
    assert data.target_tokens < data.samples * 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("settings", "further"),
    [
        ([f"loss.chunk_tokens={CHUNK}", LARGE % "true"], ("accelerate-ddp",)),
        ([f"loss.chunk_tokens={CHUNK}", LARGE % "false"], ("accelerate-ddp",)),
        (["loss.chunk_tokens=16", "packed"], ()),
        ([f"{CHECKPOINTING}=every-2"], ()),
        ([f"{CHECKPOINTING}=selective"], ()),
    ],
    ids=["chunks, tied", "chunks, untied", "packed", "every second block", "selective"],
)
def test_every_strategy_trains_under_an_axis(settings, further, precision: str, matrix) -> None:
    given = [part for setting in settings for part in (packed() if setting == "packed" else [setting])]
    assert_clean([*NATIVE, *further], 2, [*given, AFTER_TRACE, f"training.precision={precision}"], matrix)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", ["block", "model"])
def test_every_strategy_trains_the_compiled_job(compiled: str, matrix) -> None:
    """Compiling takes most of the time."""
    records = assert_clean(NATIVE, 2, [f"model.compile={compiled}"], matrix, derived=False)
    for label, record in records.items():
        assert record.observed.compiled, label
        assert record.observed.compiled_graphs > 0, label


@needs_torchao
def test_sharded_strategies_train_in_fp8(matrix) -> None:
    """Products are emulated: within the band that they span, states as in fp32."""
    records = assert_clean(["zero3", "fsdp"], 2, [FP8], matrix)
    assert all(record.observed.wide_linears == 0 for record in records.values())


@needs_torchao
def test_layers_that_fell_back_are_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-WideProducts"], 2, [FP8])}
    assert "14 linear layers of the blocks do not multiply in fp8" in found["fp8-not-applied"].text
    assert set(found) <= {"fp8-not-applied", "diverged", "gradient-differs", "update-differs"}


@needs_torchao
def test_tensor_parallelism_is_unsupported_by_reason(matrix) -> None:
    record = matrix.record("tp:tensor=2", 2, [FP8])
    assert record.status == "unsupported"
    assert "parts of rows" in record.reasons[0]


SIZES = (
    "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
    "max_position_embeddings: 16, num_experts_per_tok: 2"
)
MIXTRAL = f"model.config={{model_type: mixtral, intermediate_size: 48, num_local_experts: 4, {SIZES}}}"
QWEN = (
    "model.config={model_type: qwen3_moe, intermediate_size: 48, moe_intermediate_size: 24, num_experts: 4, "
    f"{SIZES}}}"
)
LEAVES = "zero3:leaf_module=blocks"
FEW = ("zero3", "fsdp")
WIDE = (*FEW, "ddp", "zero2", LEAVES)


@pytest.mark.parametrize(
    ("model", "labels"), first([(MIXTRAL, FEW)], [(MIXTRAL, FEW), (MIXTRAL, WIDE), (QWEN, WIDE)])
)
@pytest.mark.costly
def test_every_strategy_trains_a_mixture_as_one_process_does(
    model: str, labels: tuple[str, ...], matrix
) -> None:
    """Data decide which experts compute."""
    for derived in (True, False):
        assert_clean(
            [one for one in labels if (one != LEAVES) is derived], 2, [model], matrix, derived=derived
        )


COST_ALONE = (
    "zero2", "zero2:overlap_comm=true", "zero2:contiguous_gradients=false",
    "zero2:contiguous_gradients=false,overlap_comm=true",
)  # fmt: skip


def assert_equal_losses(records: dict[str, Record]) -> None:
    """Bit by bit; the reference is another strategy."""
    traces = {
        label: [(step.loss, step.gradient_norm) for step in record.steps]
        for label, record in records.items()
        if label != "single"
    }
    assert len({str(trace) for trace in traces.values()}) == 1, traces


@pytest.mark.parametrize("labels", [COST_ALONE[::3], pytest.param(COST_ALONE, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_overlap_and_contiguous_gradients_leave_losses_alone(labels: tuple[str, ...], matrix) -> None:
    records = assert_clean(labels, 2, ["training.accumulation_steps=2"], matrix)
    assert_equal_losses(records)


TWO_RANKS = ("pp", "cp", "ulysses-zero3", TYPED["ulysses-zero1"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("setting", "labels", "world_size"),
    [
        (f"{CHECKPOINTING}=all", TWO_RANKS, 2),
        (f"{CHECKPOINTING}=every-2", TWO_RANKS, 2),
        (f"{CHECKPOINTING}=every-2", [*GROUPS, "fsdp-cp"], 4),
        # Of a part of a sample; of what the last stage gives.
        ("loss.chunk_tokens=5", TWO_RANKS, 2),
        ("loss.chunk_tokens=8", GROUPS, 4),
    ],
)
def test_an_axis_where_ranks_divide_samples_or_blocks_or_keep_weights_within_groups(
    setting: str, labels: Sequence[str], world_size: int, precision: str, matrix: Matrix
) -> None:
    """No finding, the reference's parity, states and bytes as derived."""
    assert_clean(labels, world_size, (setting, AFTER_TRACE, f"training.precision={precision}"), matrix)
