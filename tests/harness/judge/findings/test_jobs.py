"""Findings on jobs of the user's own choice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.forms.layout import Layout, Tensor
from harness.judge.comparison import Comparison
from harness.judge.findings.jobs import OVERRIDDEN, added_loss
from harness.launch.launcher import launcher_settings
from harness.record import (
    CommunicationPart,
    DimensionPart,
    GivenMode,
    GivenPart,
    GivenSettingPart,
    ModelLossPart,
    ObservationPart,
    ObservedPart,
    Record,
    SplitPart,
)
from harness.record.run import LABELLED, PADDING
from tests.harness.cli.command_line import UNTRACED, records, succeeds
from tests.records import ENVIRONMENT, changed, make_communication, make_ranks, make_record, make_steps, told
from tests.representatives import first

BUFFERS = [
    Tensor(name=f"norm.{name}", shape=[4], dtype="float32") for name in ("running_mean", "running_var")
]
LAYOUT = Layout(parameters=[], decaying=[], buffers=BUFFERS, blocks=[])


def of_job(kind: str, **changes: object) -> list[str]:
    records = [make_record(label=label, **changes) for label in ("single", "ddp")]
    return [finding.message for finding in told(records, kind)]


def test_bytes_fed_to_pretrained_weights_are_named_once_and_for_random_weights_are_no_finding() -> None:
    (message,) = of_job("bytes-for-pretrained", model={"name": "gpt2", "config": None})
    assert "'gpt2' is fed raw bytes" in message
    random = {"name": "gpt2", "config": None, "weights": "random"}
    assert of_job("bytes-for-pretrained", model=random) == of_job("bytes-for-pretrained") == []


def test_events_that_were_lost_are_said_and_no_count_of_steps_is_held_against_the_run() -> None:
    for broken in (0, 2):
        lost = make_record(label="ddp", environment={**ENVIRONMENT, "broken_event_lines": broken},
                           steps=make_steps()[:3])  # fmt: skip
        records = [make_record(), lost]
        assert (told(records, "optimizer-steps-differ") == []) is bool(broken)
        said = [finding.text for finding in told(records, "events-unreadable")]
        assert (
            said
            == ["2 lines of `rank-*.jsonl` cannot be read: steps, or what was measured, may be missing"][
                :broken
            ]
        )


def test_batch_norm_over_another_micro_batch_is_another_computation_unless_measured_not_to_be() -> None:
    alone = told([make_record(label="observed-ddp", layout=LAYOUT)], "batch-norm")[0].text
    assert alone.endswith(": 1; running statistics, and so evaluation losses, differ by rank")
    (message,) = of_job("batch-norm", layout=LAYOUT)
    assert message.startswith(
        "ddp on 2 ranks: layers that normalise over the 4 samples of a rank's micro-batch: 1;"
    )
    assert "over 8 in the reference: another computation" in message
    assert of_job("batch-norm") == []
    split = SplitPart(difference=1e-9, repetition=0.0, rounding=1e-5)
    assert of_job("batch-norm", layout=LAYOUT, split=split) == []
    assert len(of_job("batch-norm", layout=LAYOUT, split=split.model_copy(update={"difference": 0.1}))) == 1


def test_code_of_the_models_folder_is_named_once() -> None:
    (message,) = of_job("custom-code", model={"name": "toy", "config": None, "trust_remote_code": True})
    assert "model.trust_remote_code is on: Python code of 'toy' ran" in message
    assert of_job("custom-code") == []


def given_row(label: str, mode: GivenMode, **changes: Any) -> Record:
    settings = [
        GivenSettingPart(key="gradient_clipping", given=0.5, handling="taken", used=0.5),
        GivenSettingPart(key="fp16.hysteresis", given=2, handling="pinned", used=1, reason="why"),
        GivenSettingPart(key="steps_per_print", given=9, handling="pinned", reason="prints only"),
    ]
    part = GivenPart(file="ds.json", kind="deepspeed", mode=mode, sha256="0" * 64, settings=settings)
    record = make_record(label=label, **changes)
    return changed(record, backend={"given": part})


def test_a_row_exactly_as_given_names_what_makes_it_unfair_unless_it_is_alone() -> None:
    clipped = {"training": {"gradient_clipping": 0.5}, "job_id": "a" * 12}
    row = given_row("zero2:preset=library-defaults,row=ds-as-given", "exactly-as-given", **clipped)
    records = [make_record(), make_record(label="ddp"), make_record(**clipped), row]
    (found,) = told(records, "exactly-as-given")
    assert found.values["settings"] == {
        "training.gradient_clipping": [0.5, 1.0],
        "preset": ["library-defaults", "like-for-like"],
    }
    assert "training.gradient_clipping 0.5 against 1.0" in found.message
    assert found.message.endswith("Not as given: fp16.hysteresis")
    records = [make_record(), make_record(label="ddp"), given_row("zero2:row=ds", "like-for-like")]
    assert told(records, "exactly-as-given") == []
    assert told([given_row("zero2:row=ds", "exactly-as-given")], "exactly-as-given") == []


QUIET = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}  # fmt: skip
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_OFFLOAD_PARAMS": "false"}


PRECISION, CLIPPING = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_CLIPPING"


@pytest.mark.parametrize(
    ("settings", "training", "named"),
    [
        (QUIET, {}, None),
        (QUIET | {PRECISION: "bf16"}, {}, f"{PRECISION}=bf16 (in force: no)"),
        ({PRECISION: "bf16"}, {"precision": "bf16-mixed"}, None),
        ({PRECISION: "fp16"}, {"precision": "fp16-mixed"}, None),
        ({PRECISION: "fp16"}, {}, f"{PRECISION}=fp16 (in force: no)"),
        (FSDP, {}, "FSDP_SHARDING_STRATEGY=FULL_SHARD"),
        *(({CLIPPING: given}, {"gradient_clipping": 1.0}, None) for given in ("1", "1.0")),
        *(({CLIPPING: given}, {"gradient_clipping": 1.0}, f"{CLIPPING}={given} (in force: 1.0)")
          for given in ("0.5", "none")),
    ],
)  # fmt: skip
def test_what_a_launcher_asks_for_and_does_not_run_is_named(
    settings: dict[str, str], training: dict[str, Any], named: str | None
) -> None:
    record = make_record(label="ddp", environment={"launcher_settings": settings}, training=training)
    found = [finding.text for finding in told([record], OVERRIDDEN)]
    assert found == ([f"the launcher's {named} had no effect: job and backend decide"] if named else [])


def test_variables_of_the_process_are_no_settings_of_a_job() -> None:
    given = {"ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_MIXED_PRECISION": "bf16", "HOME": "/"}
    assert launcher_settings(given) == {"ACCELERATE_MIXED_PRECISION": "bf16"}


GROUP = {"tensors": 3, "learning_rate": 1e-3}


def script(
    *, base: str | None = "ddp", rates: list[list[float | None]] | None = None, bytes_moved: bool = True,
    fed: tuple[list[str], list[str]] = (["a"], ["b"]), forward: str | None = None, **seen: Any,
) -> Record:  # fmt: skip
    """fed: digests of each rank's samples in a step; forward: a collective of the forward pass."""
    observed: dict[str, Any] = {"updated_tensors": 3, "optimizer_steps": 4, "optimizer_groups": [GROUP]}
    part = ObservationPart(
        command=["torchrun", "train.py"], frameworks=[], base=base, learning_rates=rates or [[1e-3] * 4]
    )
    moved = make_communication(2) if bytes_moved else []
    if forward:
        moved += [one.model_copy(update={"phase": "forward"}) for one in make_communication(2, forward)]
    return make_record(
        label="observed-ddp", ranks=make_ranks(2, batch_digests=[[given] * 3 for given in fed]),
        observation=part, observed=ObservedPart(**observed | seen), comm=moved,
    )  # fmt: skip


def of_script(record: Record) -> dict[str, str]:
    kinds = (
        "nothing-updated",
        "empty-group",
        "ranks-alone",
        "samples-repeated",
        "samples-missing",
        TAKEN,
        "labels-misplaced",
    )
    return {finding.id: finding.text for finding in Comparison([record]).findings if finding.id in kinds}


def test_a_sound_script_has_none_of_them() -> None:
    assert of_script(script()) == {}
    assert of_script(script(rates=[[0.0, 1e-3, 1e-3, 0.0]])) == {}
    assert of_script(script(updated_tensors=None, optimizer_steps=None)) == {}


def test_rates_of_zero_in_every_step_and_tensors_without_gradient_update_nothing() -> None:
    assert of_script(script(rates=[[0.0] * 4, [None] * 4])) == {
        "nothing-updated": "the optimizer updated nothing: its learning rate is 0 in all 4 steps"
    }


NOT_OWN = "no group is known to hold the wrapped model's parameters alone"
NOT_REDUCED = "no gradient was ever reduced, so that none of its 3 tensors had one"
NO_GRADIENT = "its 3 tensors are the model's, but had no gradient at the update"


@pytest.mark.parametrize(
    ("names", "base", "moved", "why"),
    [
        ([], "fsdp", make_communication(2), NOT_OWN),
        ([], "fsdp", [], NOT_REDUCED),  # a tensor of a loss's own next to the model's
        (["a.w"], "fsdp", [], NOT_REDUCED),
        (["a.w"], "fsdp", make_communication(2, payload_bytes=4), NOT_REDUCED),  # a loss for a log
        (["a.w"], "fsdp", make_communication(2, "all_gather"), NOT_REDUCED),  # weights of the backward pass
        (["a.w"], "fsdp", make_communication(2), NO_GRADIENT),
        ([], "ddp", [], NOT_OWN),  # which leaves gradients where nothing is reduced
        (["a.w"], "ddp", [], NO_GRADIENT),
    ],
)
def test_why_nothing_is_updated_is_said_by_what_the_optimizer_holds_and_what_is_reduced(
    names: list[str], base: str, moved: list[CommunicationPart], why: str
) -> None:
    groups = [GROUP | ({"parameters": names} if names else {})]
    record = script(updated_tensors=0, optimizer_steps=None, optimizer_groups=groups, base=base,
                    bytes_moved=False, forward="all_gather")  # fmt: skip
    text = of_script(record.model_copy(update={"comm": [*record.comm, *moved]}))["nothing-updated"]
    assert text.startswith("the optimizer updated nothing: ")
    assert why in text


def test_empty_groups_are_named_by_their_places() -> None:
    groups = [GROUP, GROUP | {"tensors": 0}, GROUP | {"tensors": 0}]
    assert of_script(script(optimizer_groups=groups)) == {
        "empty-group": "empty groups of the optimizer's 3: 1, 2; no parameter trains with their rate and "
        "decay"
    }


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (4.02, "gradients are 4 times those of the mean"), (0.25, "gradients are 1/4 of those of the mean"),
        (1.0, None), (3.1, None), (None, None),
    ],
)  # fmt: skip
def test_a_loss_that_is_divided_once_is_no_finding(ratio: float | None, text: str | None) -> None:
    record = changed(script(), observation={"backward_ratio": ratio}, world={"accumulation_steps": 4})
    found = told([record], "loss-not-divided")
    assert [one.text.partition(": ")[2] for one in found] == ([text] if text else [])


TAKEN = "loss-not-divided"


@pytest.mark.parametrize(
    ("factors", "sizes", "parts", "named"),
    [  # factors and samples of each rank in each step
        ([[0.5, 0.5], [0.25, 0.25]], [[4, 4], [4, 4]], 2, {TAKEN}),
        ([[0.5, 0.5], [0.25, 0.25]], [[4, 4], [4, 4]], 1, set()),  # each rank has data of its own
        ([[0.5, 0.5], [-0.5, -0.5]], [[4, 4], [4, 4]], 1, {TAKEN}),
        ([[0.5, 0.5], [0.25, 0.25]], [[4, 4], [2, 2]], 2, set()),  # means weighted by their samples
        ([[0.5, 0.5], [0.5, 0.25]], [[4, 4], [4, 4]], 2, set()),  # the last batch
        ([[0.6, 0.5], [0.4, 0.5]], [[4, 4], [4, 4]], 2, set()),  # means weighted by their tokens
        ([[0.5, 0.5], [0.5, 0.5]], [[4, 4], [4, 4]], 2, set()),
        ([[0.5, 0.5], [0.5, None]], [[4, 4], [4, 4]], 2, set()),
        ([[64.0, 32.0], [32.0, 16.0]], [[4, 4], [4, 4]], 2, {TAKEN}),  # a scaler halves
    ],
)
def test_a_rank_that_counts_otherwise_in_every_step_is_named(
    factors: list[list[float | None]], sizes: list[list[int]], parts: int, named: set[str]
) -> None:
    record = script()
    ranks = [
        changed(rank, samples=of, target_tokens=[], loss_factors=[None if f is None else [f, f] for f in own])
        for rank, own, of in zip(record.ranks, factors, sizes, strict=True)
    ]
    seen = changed(record.observation, parts=parts)
    assert of_script(changed(record, observation=seen, ranks=ranks)).keys() == named


@pytest.mark.parametrize(
    ("labelled", "named"),
    [  # of 4 tokens of padding of each rank in each step
        ([[0.0, 0.0], [4.0, 4.0]], {"labels-misplaced"}),
        ([[4.0, 4.0], [4.0, 4.0]], set()),  # on purpose
        ([[0.0, 0.0], [0.0, 0.0]], set()),
        ([[0.0, 0.0], [1.0, 1.0]], set()),  # an end of text
        ([[0.0, 0.0], [0.0, 4.0]], set()),
        ([[None, None], [4.0, 4.0]], set()),  # a rank without padding
    ],
)
def test_padding_that_some_ranks_train_on_is_named(
    labelled: list[list[float | None]], named: set[str]
) -> None:
    record = script()
    ranks = [
        rank.model_copy(update={"step_figures": {PADDING: [4.0, 4.0], LABELLED: of}})
        for rank, of in zip(record.ranks, labelled, strict=True)
    ]
    assert of_script(changed(record, ranks=ranks)).keys() == named


def test_a_loader_that_divides_samples_twice_is_named() -> None:
    record = script()
    for parts, named in ((1, set()), (2, set()), (4, {"samples-missing"})):
        seen = changed(record.observation, parts=parts)
        assert of_script(changed(record, observation=seen)).keys() == named


@pytest.mark.parametrize(("apart", "named"), [({}, False), ({0: ["a"]}, False), ({1: ["a"]}, True)])
def test_further_backward_passes_beside_several_models_are_named_where_weights_drift(
    apart: dict[int, list[str]], named: bool
) -> None:
    seen = ObservationPart(command=["t.py"], frameworks=[], base="ddp", further_passes=3, weights_apart=apart)
    record = script().model_copy(update={"observation": seen})
    assert bool(told([record], "passes-not-reduced")) == named


def test_a_script_whose_ranks_have_other_rates_differs_from_rank_0() -> None:
    steps = [replace(step, applied_learning_rate=0.5) for step in make_steps()]
    (one,) = told([changed(script(), steps=steps)], "learning-rate-differs")
    assert "learning rate of step 0 differs from that of rank 0: 0.5 against 0.001" in one.message


@pytest.mark.parametrize(
    ("hashes", "repeated", "count"),
    [
        (["a", "b", "a", "b"], 1, 1),
        (["a", "b", "a", "b"], 0, 0),  # what does not shuffle repeats on purpose
        (["a", "b", "b", "a"], 1, 0),  # an evaluation's sampler
        (["a", "b", "a", None], 1, 0),
    ],
)
def test_batches_that_come_again_are_a_finding_if_their_sampler_shuffles(
    hashes: list[str | None], repeated: int, count: int
) -> None:
    record = script()
    seen = record.observation.model_copy(update={"repeated_epochs": repeated})
    steps = [replace(step, sample_hashes=one) for step, one in zip(make_steps(), hashes, strict=True)]
    record = record.model_copy(update={"observation": seen, "steps": steps})
    assert len(told([record], "epochs-alike")) == count


def test_a_group_without_decay_is_rightly_empty_where_only_matrices_train() -> None:
    def kinds(bias: list[str], decay: float) -> list[str]:
        parts = [Tensor(name=name, shape=[4, 4][: 1 + (name == "a")], dtype="float32") for name in "ab"]
        layout = Layout(parameters=parts, decaying=["a"], frozen=bias, buffers=[], blocks=[])
        groups = [GROUP | {"weight_decay": 0.1}, GROUP | {"tensors": 0, "weight_decay": decay}]
        return [*of_script(script(optimizer_groups=groups).model_copy(update={"layout": layout}))]

    assert kinds(["b"], 0.0) == []
    assert kinds([], 0.0) == kinds(["b"], 0.1) == ["empty-group"]


def test_ranks_that_move_no_gradients_are_alone_whatever_an_evaluation_gathers() -> None:
    for base, why in (("ddp", " (DDP reduces none, as within `no_sync`)"), (None, "")):
        text = of_script(script(base=base, bytes_moved=False))["ranks-alone"]
        assert text == f"2 ranks train without exchanging gradients{why}: each has a model of its own"
        assert of_script(script(base=base)) == {}
        for op, named in (
            ("all_gather", {"ranks-alone"}),
            ("broadcast", {"ranks-alone"}),
            ("all_reduce", set()),
        ):
            assert of_script(script(base=base, bytes_moved=False, forward=op)).keys() == named, op
            assert of_script(script(base=base, forward=op)) == {}


def test_ranks_that_are_fed_alike_are_named_and_those_that_share_samples_or_show_none_are_not() -> None:
    text = (
        "all 2 ranks train on the same samples in the first steps (compared: 3): the data is not split over "
        "ranks"
    )
    alike = (["a", "b"], ["a", "b"])
    for forward in (None, "all_gather"):
        assert of_script(script(fed=alike, forward=forward)) == {"samples-repeated": text}
    alone = of_script(script(fed=alike, bytes_moved=False))
    assert alone.keys() == {"ranks-alone"}
    assert alone["ranks-alone"].endswith(", all on the same samples")
    assert of_script(script(fed=alike, forward="all_reduce")) == {}  # they cut layers or samples
    assert of_script(script(fed=([], []))) == {}
    assert not of_script(script(fed=([], []), bytes_moved=False))["ranks-alone"].endswith("same samples")


ALL_ALIKE = "all ranks begin in the same random state"
PEERS = "ranks that share samples begin in different random states"


def dropped(*states: str | None, evaluating: list[str] | None = None, shared: bool = False) -> str:
    parts = make_ranks(len(states), random_state=list(states))
    record = make_record(
        label="tp" if shared else "ddp", world_size=len(states), ranks=parts,
        observed=ObservedPart(dropout=0.1, evaluating_in_training=evaluating),
        world={"dimensions": [DimensionPart(name="tensor", size=len(states))] if shared else []},
    )  # fmt: skip
    return told([record], "not-deterministic")[0].message


@pytest.mark.parametrize(
    ("states", "shared", "said"),
    [
        (("a", "a"), False, [ALL_ALIKE]), (("a", "b"), False, []), (("a", None), False, []),
        (("a", "a"), True, []), (("a", "b"), True, [PEERS]),
    ],
)  # fmt: skip
def test_ranks_that_draw_alike_are_told(states: tuple[str, ...], shared: bool, said: list[str]) -> None:
    text = dropped(*states, shared=shared)
    assert [words for words in (ALL_ALIKE, PEERS) if words in text] == said


def test_layers_that_are_kept_in_evaluation_mode_are_named() -> None:
    assert "in evaluation mode in training passes: drop" in dropped("a", "b", evaluating=["drop"])
    assert "evaluation mode" not in dropped("a", "b", evaluating=[])


MIXTRAL = (
    "model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2, "
    "max_position_embeddings: 128, output_router_logits: %s, router_aux_loss_coef: 0.01}"
)


def with_losses(model: float, job: float, targets: int = 256) -> Record:
    part = ModelLossPart(model=model, job=job, targets=targets)
    return make_record(observed=ObservedPart(model_loss=part))


@pytest.mark.parametrize("router", first(["true"], ["true", "false"]))
def test_the_loss_of_a_router_is_named_and_rounding_is_not(tmp_path: Path, router: str) -> None:
    succeeds(
        "run", "--backend", "single", *UNTRACED, "--set", MIXTRAL % router, "--set",
        "data.sequence_length=32", "--set", "training.steps=3", "--runs", "runs", cwd=tmp_path,
    )  # fmt: skip
    named = told(records(tmp_path / "runs"), "model-adds-loss")
    assert len(named) == (router == "true")
    for finding in named:
        # Four experts, two of each token: the balancing loss is about 2, times 0.01.
        assert 0.01 < finding.values["model_loss"] - finding.values["job_loss"] < 0.04
        assert "is not trained" in finding.message


def test_rounding_is_no_difference() -> None:
    assert added_loss(with_losses(5.355305194854736, 5.355305333291331)) is None
    assert added_loss(with_losses(5.3562, 5.3553)) is not None
    assert added_loss(make_record()) is None
    rounded = {"observed": with_losses(5.25, 5.2605).observed, "training": {"precision": "bf16-mixed"}}
    assert added_loss(make_record(label="accelerate-fsdp", **rounded)) is None, "a wrapper's bfloat16"
    assert added_loss(make_record(**rounded)) is not None, "the reference has no wrapper"
    assert len(told([with_losses(6.0, 5.0)], "model-adds-loss")) == 1


@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 4), ("float8_e4m3fn", 1), ("uint16", 2), ("odd", 4)]
)
def test_what_is_trained_outside_is_counted_in_elements_of_any_dtype(dtype: str, width: int) -> None:
    """Gradients of the wrapped module are reduced, 1000 elements in the one probed step, or others, too."""
    layout = Layout(
        parameters=[Tensor(name="a.w", shape=[1000], dtype="float32")], decaying=[], buffers=[], blocks=[]
    )
    for more, ids in ((0, ["trained-outside"]), (600, [])):
        record = changed(script(), layout=layout, observation={"unwrapped": {"other": 600}})
        moved = [
            part.model_copy(update={"dtype": dtype, "payload_bytes": (1000 + more) * width})
            for part in record.comm[:1]
        ]
        found = told([record.model_copy(update={"comm": moved})], "trained-outside")
        assert [finding.id for finding in found] == ids
