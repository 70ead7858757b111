"""Where nothing is wrong, no finding is raised. What is long is a class, so that they run side by side."""

from itertools import product

import pytest

from tests.representatives import COSTLY, EXHAUSTIVE

from .clean import ACCUMULATIONS, AFTER_TRACE, FEW, LABELS, PRECISIONS, assert_clean, assert_no_finding
from .matrix import Matrix

ALWAYS = (2, "bf16-mixed", 2)
"""The others are exhaustive, but for some backends on one rank."""


@pytest.mark.long(seconds=75)
class TestOneAndTwoRanks:
    def test_a_family_each_has_no_finding(self, matrix: Matrix, tally) -> None:
        assert_no_finding(*ALWAYS, matrix, tally, FEW)

    def test_sums_of_activations_in_each_micro_step_are_none_of_gradients(self, matrix: Matrix) -> None:
        settings = ("training.accumulation_steps=2", "training.global_batch_size=16")
        assert matrix.findings(("planted-SoundTensor",), 2, settings) == []

    @pytest.mark.parametrize(
        ("world_size", "precision", "accumulation"),
        [
            pytest.param(*ALWAYS, marks=COSTLY),
            *(pytest.param(*case, marks=EXHAUSTIVE) for case in product((1, 2), PRECISIONS, ACCUMULATIONS)),
        ],
    )
    def test_a_clean_matrix_has_no_finding(
        self, world_size: int, precision: str, accumulation: int, matrix: Matrix, tally
    ) -> None:
        assert_no_finding(world_size, precision, accumulation, matrix, tally)

    @COSTLY
    def test_groups_of_ranks_and_cut_layers_on_four_ranks_have_no_finding(
        self, matrix: Matrix, tally
    ) -> None:
        labels = ("fsdp-hybrid", "zero3:hpz=2", "autotp-zero2")
        settings = (
            "training.precision=fp32", "training.accumulation_steps=2", "training.global_batch_size=16",
            AFTER_TRACE,
        )  # fmt: skip
        assert_clean(labels, 4, settings, matrix, tally)
        within = {row.phase for row in matrix.record("zero3:hpz=2", 4, settings).comm if row.role == "shard"}
        assert within
        assert within <= {"forward", "backward"}

    @COSTLY
    def test_fp16_at_stage_0_has_no_finding(self, matrix: Matrix, tally) -> None:
        assert_clean(("zero0",), 2, ("training.precision=fp16-mixed",), matrix, tally)

    def test_some_backends_on_one_rank_have_no_finding(self, matrix: Matrix, tally) -> None:
        settings = ("training.precision=fp32", "training.global_batch_size=16", AFTER_TRACE)
        assert_clean(("zero3", "fsdp"), 1, settings, matrix, tally)


@EXHAUSTIVE
@pytest.mark.long(seconds=70)
class TestFourRanks:
    accumulation = 1

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_clean_matrix_has_no_finding(self, precision: str, matrix: Matrix, tally) -> None:
        assert_no_finding(4, precision, self.accumulation, matrix, tally)


@pytest.mark.long(seconds=120)
class TestFourRanksAccumulated(TestFourRanks):
    accumulation = 4


FOUR_BLOCKS = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: 16}"
)
"""Four ranks can divide four blocks and four heads."""
PIPELINES = {
    2: ("pp", "pp:schedule=gpipe", "pp:schedule=interleaved"),
    4: ("pp", "pp:schedule=gpipe", "pp:schedule=interleaved,stages=2", "pp:micro_batches=8"),
}
DIVIDED = {
    2: (),
    4: (
        "tp", "autotp-zero1", "autotp-zero3",
        "cp:sequence=4", "fsdp-cp:sequence=4", "ulysses-zero3:sequence=4",
        *(f"{LABELS[f'ulysses-zero{stage}']},sequence=4" for stage in (1, 2)),
    ),
}  # fmt: skip


@EXHAUSTIVE
@pytest.mark.long(seconds=90)
class TestRanksThatAllShareSamples:
    @pytest.mark.parametrize(("world_size", "precision"), list(product(PIPELINES, PRECISIONS)))
    def test_no_finding(self, world_size: int, precision: str, matrix: Matrix, tally) -> None:
        labels = (*PIPELINES[world_size], *DIVIDED[world_size])
        settings = (
            FOUR_BLOCKS, f"training.precision={precision}", "training.accumulation_steps=2",
            "training.global_batch_size=16",
        )  # fmt: skip
        assert_clean(labels, world_size, settings, matrix, tally)


@COSTLY
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=EXHAUSTIVE)])
def test_pipelines_whose_ends_share_a_weight_have_no_finding(world_size: int, matrix: Matrix, tally) -> None:
    """From the first step on; where no weight is shared, stages send each other nothing else in fp32."""
    tied, untied = (
        (FOUR_BLOCKS.replace("}", f", tie_word_embeddings: {tied}}}"), "training.precision=fp32",
         "training.accumulation_steps=2", "training.global_batch_size=16",
         "training.gradient_clipping=0.5", "measure.warmup_steps=0")
        for tied in ("true", "false")
    )  # fmt: skip
    assert_clean(PIPELINES[world_size], world_size, tied, matrix, tally)
    assert_clean(("pp",), world_size, untied, matrix, tally)
    sent = [row for row in matrix.record("pp", world_size, untied).comm if row.rank == 0]
    assert {(row.phase, row.op) for row in sent if row.dtype == "float32"} == {
        ("forward", "send"), ("backward", "recv"),
    }  # fmt: skip
