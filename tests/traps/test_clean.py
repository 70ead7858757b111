"""Where nothing is wrong, no finding is raised. What is long is a class, so that they run side by side."""

from itertools import product

import pytest

from harness.forms.terms import GRADIENTS
from harness.judge.quantities import textbook_differences, volume_differences, why_unknown
from tests import kept
from tests.built_in import EACH_MICRO_STEP, HYBRID, NATIVE, THROUGH_ACCELERATE
from tests.representatives import COSTLY, EXHAUSTIVE, cheap, first

from .clean import (
    ACCUMULATIONS,
    AFTER_TRACE,
    FEW,
    GROUPS,
    LABELS,
    PRECISIONS,
    assert_clean,
    assert_no_finding,
    clean_labels,
    differing_bytes,
)
from .matrix import Matrix, padded_documents, skip_without_fp16
from .planted import TIED

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
        settings = ("training.precision=fp16-mixed",)
        skip_without_fp16(matrix.record("zero0", 2, settings))
        assert_clean(("zero0",), 2, settings, matrix, tally)

    def test_some_backends_on_one_rank_have_no_finding(self, matrix: Matrix, tally) -> None:
        settings = ("training.precision=fp32", "training.global_batch_size=16", AFTER_TRACE)
        assert_clean(("zero3", "fsdp"), 1, settings, matrix, tally)


ODD = "model.config={model_type: gpt2, n_embd: 33, n_layer: 2, n_head: 3, n_positions: 16}"
"""Its width divides by no number of ranks, so that every kind of padding appears."""
TWO_MICRO_STEPS = ("training.accumulation_steps=2", AFTER_TRACE)
LOW = ("training.precision=bf16-mixed", *TWO_MICRO_STEPS)
CLIPPED = "training.gradient_clipping=0.5"
"""Below every norm of these jobs, so that clipping acts in each step."""
RECOMPUTED = "training.activation_checkpointing=true"
OFFLOADS = (
    "zero1:offload=optimizer", "zero2:offload=optimizer", "zero3:offload=optimizer", "zero3:offload=cpu",
)  # fmt: skip
OPTIONS = (
    *OFFLOADS, "fsdp:offload=cpu", "zero3:reduce_bucket_size=1000", "fsdp:prefetch=2",
    "fsdp1:backward_prefetch=post,forward_prefetch=true,limit_all_gathers=false",
    "zero3:stage3_param_persistence_threshold=1000", "zero3:stage3_max_live_parameters=1000000000",
    "zero3:stage3_max_reuse_distance=1000000000", "zero3:memory_efficient_linear=false",
    *(label for label in EACH_MICRO_STEP if label.partition(":")[0] not in HYBRID),
)  # fmt: skip
"""When and in what parts weights are gathered and gradients reduced changes nothing."""
LEAF = "zero3:leaf_module=blocks"
"""Of a Llama; with modules without parameters nothing is known."""
CPU_ADAM = tuple(f"{label},adam=deepspeed" for label in OFFLOADS if label != "zero3:offload=optimizer")
"""DeepSpeed's, whose extension is compiled once, for a minute or more."""
DATA_ALONE = (*NATIVE, *THROUGH_ACCELERATE, "trainer-ddp", *OPTIONS)
JOBS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "padded, tied, clipped": (
        (TIED, CLIPPED, *TWO_MICRO_STEPS),
        (LEAF, "fsdp", "fsdp1", "accelerate-zero2", "fsdp:sync_each_batch=true",
         "tp", "cp", LABELS["ulysses-zero2"]), (),
    ),
    "odd": ((ODD, *LOW), ("ddp", "zero3", "fsdp1", "fsdp:offload=cpu"), ()),
    "library defaults": (
        (ODD, CLIPPED, "runtime.preset=library-defaults", *LOW), ("zero3", "fsdp"),
        ("reduce-dtype-differs",),
    ),
    "bf16": ((ODD, "training.precision=bf16", *TWO_MICRO_STEPS), ("zero3", "fsdp"), ("lost-updates",)),
    "recomputed": ((RECOMPUTED, *LOW), ("zero3", "fsdp"), ()),
    "odd, recomputed": ((ODD, RECOMPUTED, "training.precision=fp32", AFTER_TRACE), ("zero3", "fsdp"), ()),
}  # fmt: skip
"""Each with its settings, backends of every run of the tests, and findings that are true of it."""
WIDE = [
    ("padded, tied, clipped", 2, (*clean_labels(2), *OPTIONS, LEAF)),
    ("padded, tied, clipped", 4, clean_labels(4)),
    ("odd", 1, ("ddp", "zero1", "zero3", "fsdp")), ("odd", 2, DATA_ALONE),
    ("odd", 4, (*NATIVE, *HYBRID, *GROUPS)), ("library defaults", 2, DATA_ALONE),
    ("bf16", 2, DATA_ALONE), ("recomputed", 2, clean_labels(2)),
    ("odd, recomputed", 2, NATIVE),
    *((name, 2, CPU_ADAM) for name in ("padded, tied, clipped", "odd", "bf16")),
]  # fmt: skip
NO_SHARD = {label for label in DATA_ALONE if label.startswith("fsdp1-no-shard")}
UNSUPPORTED = {
    "odd": NO_SHARD, "library defaults": NO_SHARD, "bf16": {"zero0", *OFFLOADS},
}  # fmt: skip
"""FSDP1 would not add up tied gradients of several micro-steps; DeepSpeed keeps fp32 masters at stage 0, and
offloads bf16 masters to an Adam of its own only."""


def job(name: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    settings, labels, true = JOBS[name]
    if name.startswith("padded"):
        path = padded_documents(kept.KEPT / "documents.jsonl")
        settings = (*settings, "data.source=jsonl", f"data.path={path}")
    return settings, labels, true


def test_few_backends_have_no_finding(matrix: Matrix, tally) -> None:
    settings, labels, _ = job("padded, tied, clipped")
    assert_clean(labels, 2, settings, matrix, tally)


@pytest.mark.parametrize("name", cheap(("odd", "library defaults", "bf16"), list(JOBS)[1:]))
def test_few_backends_hold_and_send_what_is_derived(name: str, matrix: Matrix) -> None:
    settings, labels, _ = job(name)
    found = {label: differing_bytes(matrix.record(label, 2, settings)) for label in labels}
    assert not any(found.values()), found


@EXHAUSTIVE
@pytest.mark.long(seconds=120)
class TestEveryBackend:
    @pytest.mark.parametrize(("name", "world_size", "labels"), WIDE)
    def test_none_has_a_finding_or_is_refused_for_nothing(
        self, name: str, world_size: int, labels: tuple[str, ...], matrix: Matrix, tally
    ) -> None:
        settings, _, true = job(name)
        refused = {
            label for label in labels if matrix.record(label, world_size, settings).status == "unsupported"
        }
        assert refused == UNSUPPORTED.get(name, set()) & {*labels}
        trained = [label for label in labels if label not in refused]
        also = ("optimizer-differs",) if labels == CPU_ADAM else ()
        assert_clean(trained, world_size, settings, matrix, tally, true=(*true, *also))


MASTERS = ("fsdp:master_dtype=compute", "fsdp-grad-op:master_dtype=compute")


@pytest.mark.parametrize("label", first(MASTERS[:1], MASTERS))
def test_without_fp32_masters_states_are_as_derived(label: str, matrix: Matrix) -> None:
    assert differing_bytes(matrix.record(label, 2, (ODD, *LOW))) == []


@pytest.mark.parametrize("step", [0, 1])
def test_what_zero_3_sends_while_it_records_its_trace_is_as_derived(step: int, matrix: Matrix) -> None:
    settings = (f"measure.warmup_steps={step}", "measure.probed_steps=1", LOW[0])
    record = matrix.record("zero3", 2, settings)
    assert (why_unknown(record), volume_differences(record)) == (None, [])


@EXHAUSTIVE
def test_what_a_leaf_keeps_gathered_is_unknown_and_what_it_sends_is_not(matrix: Matrix) -> None:
    record = matrix.record(f"{LEAF},stage3_max_reuse_distance=1000000000", 2, TWO_MICRO_STEPS)
    assert "what ZeRO-3 keeps gathered" in str(why_unknown(record))
    assert volume_differences(record) == []


@pytest.mark.parametrize("name", first(["zero2"], ["zero1", "zero2"]))
def test_stages_1_and_2_send_what_the_textbook_says_where_gradients_are_reduced_to_their_owners(
    name: str, matrix: Matrix
) -> None:
    record = matrix.record(f"{name}:use_multi_rank_bucket_allreduce=false", 2, LOW)
    terms = textbook_differences(record)
    assert differing_bytes(record) == []
    assert terms is not None
    assert GRADIENTS not in {difference.term for difference in terms}


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
