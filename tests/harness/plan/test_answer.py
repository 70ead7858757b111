"""What a search answers, in words and as a document; predictions are invented."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from docs.hooks import strategies, sweeps
from harness.backends import registry
from harness.backends.options import parts_of
from harness.cli.options import split_backends
from harness.errors import HarnessError
from harness.forms.workload import second_copy_ranks
from harness.job.batch import cell_layout, job_layout
from harness.job.config import load_experiment
from harness.plan.alternatives import MORE_GPUS
from harness.plan.answer import Answer, Typed, answers, candidates, commands
from harness.plan.document import recommendation
from harness.plan.hardware import PRESET, load_hardware, with_training_defaults
from harness.plan.models import load_model
from harness.plan.prediction import MemoryPrediction, Predictors
from harness.plan.question import Question, ask
from harness.plan.scenario import Scenario
from harness.plan.search import (
    distinct_backends,
    micro_batch_sizes,
    samples_of,
    scenario_of,
    search,
    variants,
)
from harness.plan.step_time import SpeedPrediction, predict_speed
from harness.plan.text import answer_lines
from tests.harness.plan.plans import (
    DEVICE,
    FABRIC,
    JOB,
    MODEL,
    memory,
    needing,
    predictors,
    question,
    scenario,
    speed,
)

pytestmark = pytest.mark.long(seconds=15)


def recommend(asked: Question, by: Predictors) -> Answer:
    (answer,) = answers(asked, by=by)
    return answer


def text_of(answer: Answer) -> list[str]:
    return answer_lines([answer], wraps=False)


def cells(lines: list[str]) -> str:
    """All of it, with cells of tables on one line."""
    return " ".join(" ".join(lines).split())


def test_the_answer_comes_first_and_the_runner_up_second() -> None:
    lines = text_of(recommend(question(), predictors()))
    # 1 s x 1.025 + 0.2 s / 2 for 400 tokens; 5.5 MB of states and 0.4 MB of activations.
    assert lines[0] == "Use zero1, micro-batch 4, accumulation 1: 0.0059 of 0.01 GB, about 360 tokens/s a GPU"
    assert lines[1].startswith("Runner-up: zero2, micro-batch 4")
    assert not lines[2].startswith("Close to the limit")
    assert any(line.startswith("typical error, full training under zero1/zero2: ") for line in lines)
    assert any(line.split()[:4] == ["zero1", "4", "1", "no"] for line in lines)


def test_after_the_tables_come_the_others_what_was_not_tried_and_what_to_do_next() -> None:
    text = cells(text_of(recommend(question(), predictors())))
    parts = (
        "Why not the others reason", "ddp does not fit: 0.016 GB", "Not considered reason",
        "backends shard as others do (--json names them)", "single one process",
        "speed rests on constants: invented", "Measure the best ones on one node",
        "harness compare", "Measure the best ones under Slurm",
        "invented: 1,000,000 parameters (a test)", "100, bf16-mixed, clipping 1, 3,200 tokens per step",
    )  # fmt: skip
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_nothing_that_fits_is_said_with_what_would_help() -> None:
    lines = text_of(recommend(question(tokens=800), predictors(per_token=8_000_000)))
    assert lines[0] == "nothing fits"
    assert not any(line.startswith("Measure") for line in lines)
    few = text_of(recommend(question(gpus=64, tokens=300), predictors()))
    assert few[0] == "no configuration can be ranked: 3 samples a step are fewer than GPUs"
    told = "300 tokens per step are 3 samples of 100 tokens, fewer than 64 GPUs: use 3 GPUs at most, or at "
    assert f"{told}least 6,400 tokens per step" in cells(few)


def test_the_document_has_all_that_is_said() -> None:
    answer = recommend(question(), predictors())
    document = json.loads(json.dumps(recommendation(answer)))
    assert document["data_parallel_is_right"] is True
    assert [row["backend"] for row in document["best"]] == [c.label for c in answer.best]
    best = document["best"][0]
    assert best["device_bytes"] + best["margin_bytes"] == 10_000_000
    # 400 tokens of each GPU in a step; 1e9 tokens at that rate; 100 W.
    hours = 1e9 / (400 / best["step_seconds"]) / 3600
    assert best["gpu_hours_per_billion_tokens"] == pytest.approx(hours)
    assert best["kilowatt_hours_per_billion_tokens"] == pytest.approx(hours * 0.1)
    assert {row["backend"] for row in document["not_chosen"]} >= {"ddp", "fsdp"}


def test_all_steps_of_the_job_have_tokens_hours_and_a_price() -> None:
    answer = recommend(question("training.steps=1000", "compare.price_per_gpu_hour=2 USD"), predictors())
    hours = 1000 * answer.best[0].speed.step_seconds / 3600
    assert answer.whole == pytest.approx(
        {"tokens": 1000 * 3200, "hours": hours, "gpu_hours": 8 * hours, "price": 16 * hours}
    )
    assert any(line.startswith("All 1,000 steps: 3,200,000 tokens in ") for line in text_of(answer))
    assert recommend(question(), predictors()).whole is None
    assert "training.steps" not in " ".join(answer.commands["compare"])  # which measure, not train
    priced = recommend(question("compare.price_per_gpu_hour=2 USD"), predictors())
    assert priced.whole["price"] == pytest.approx(priced.whole["gpu_hours"] * 2)
    assert any(line.startswith("1,000,000,000 tokens in ") for line in text_of(priced))


def test_hours_and_price_are_ranges_where_the_speed_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = recommend(question("training.steps=1000", "compare.price_per_gpu_hour=2 USD"), predictors())
    best = replace(answer.best[0], speed=predict_speed(scenario("fsdp", 64)))
    monkeypatch.setattr(type(answer), "best", property(lambda _: (best,)))
    least, most = best.speed.tokens_per_second_between
    few, many = answer.whole["hours_between"]
    assert many / few == pytest.approx(most / least)
    assert few <= answer.whole["hours"] <= many
    ranges = re.compile(r" in \S+ to \S+ hours, \S+ to \S+ GPU hours, \S+ to \S+ USD$")
    assert any(map(ranges.search, text_of(answer)))


def test_what_is_close_or_tight_is_uncertain_and_names_the_fastest_that_is_not() -> None:
    # 2 MB of states on 8 ranks and 7.6 MB of activations: 4 % of the device is free.
    answer = recommend(question(), predictors(per_token=19_000, communication=0.0, small=1.0))
    safe = answer.found.with_room
    assert answer.best[0].is_tight
    assert not safe.is_tight
    lines = text_of(answer)
    assert lines[2].startswith(f"Close to the limit: less than 10 % is free. Safe: {safe.label}, ")
    assert any(line.split()[:1] == [answer.best[0].label] and "close" in line.split() for line in lines)
    said = [f"{what}: {why}" for what, why in answer.uncertain]
    assert any("less than 10 % of the device free" in line for line in said)
    alike = recommend(question(), predictors(communication=0.01))
    assert any("too little to trust" in why for _, why in alike.uncertain)
    # Or 7.92 MB of activations without checkpointing: 0.8 % is free.
    barely = recommend(question(), predictors(per_token=19_800, communication=0.0))
    assert barely.best
    assert not any(c.barely_fits for c in barely.best)


def test_a_faster_one_that_is_not_taken_is_named() -> None:
    roomy = recommend(question(), predictors(per_token=19_000, communication=0.0))
    best, fastest = roomy.best[0], roomy.found.fastest
    first, _, faster, *_ = text_of(roomy)
    assert first.startswith(f"Use {best.label}, micro-batch 2, ")
    assert faster.startswith("Faster by ")
    assert f": {fastest.label}, micro-batch 4, " in faster
    simple = recommend(question(), predictors(states=1, communication=0.01))
    lines = text_of(simple)
    assert lines[0].startswith("Use ddp, ")
    assert (simple.found.fastest is None) == (not lines[2].startswith("Faster by "))


def test_a_runner_up_that_is_faster_is_shown_once_and_one_gpu_has_no_parallelism() -> None:
    def fast_offload(scenario: Scenario) -> SpeedPrediction:
        found: SpeedPrediction = speed()(scenario)
        rate = 1020.0 if scenario.label.startswith("zero1:") else 1000.0
        return replace(found, tokens_per_second_per_gpu=rate)

    given = Predictors(memory=memory(), speed=fast_offload)
    lines = text_of(
        recommend(question(gpus=1, tokens=400, device=replace(DEVICE, memory_bytes=10**9)), given)
    )
    assert lines[0].startswith("Use single, ")
    assert lines[1].startswith(
        "Runner-up, faster by 2.0 %, too little to trust, with more moving parts: zero1:"
    )
    assert not any(line.startswith("Faster by") for line in lines)
    assert "cannot be made of 1 rank" in cells(lines)


def test_one_gpu_on_which_only_offload_has_a_prediction_is_answered() -> None:
    def refuses_single(scenario: Scenario) -> MemoryPrediction:
        if scenario.label == "single":
            raise HarnessError("no form")
        found: MemoryPrediction = memory()(scenario)
        return found

    given = Predictors(memory=refuses_single, speed=speed())
    answer = recommend(question(gpus=1, tokens=400), given)
    assert answer.best
    assert all(c.offload != "none" for c in answer.best)


def test_the_other_presets_winner_is_named_if_it_differs() -> None:
    def fast_alike(scenario: Scenario) -> SpeedPrediction:
        found: SpeedPrediction = speed()(scenario)
        alike = scenario.preset == "like-for-like" and scenario.label == "fsdp"
        return replace(found, tokens_per_second_per_gpu=1000.0) if alike else found

    given = Predictors(memory=memory(), speed=fast_alike)
    for preset, own, other in (
        ("library-defaults", "zero1", "like-for-like: fsdp"),
        ("like-for-like", "fsdp", "library-defaults: zero1"),
    ):
        answer = recommend(question(f"runtime.preset={preset}"), given)
        lines = text_of(answer)
        assert lines[0].startswith(f"Use {own}, ")
        assert any(line.startswith(f"With runtime.preset={other}, ") for line in lines)
        assert recommendation(answer)["other_preset"]["best"]["backend"] == other.rpartition(" ")[2]
        assert all(f"--set runtime.preset={preset}" in line for line in answer.commands["compare"][:-1])


@pytest.mark.parametrize("per_token", [1_000, 19_800])
@pytest.mark.parametrize("communication", [0.01, 2.0])
def test_data_parallelism_is_not_called_right_where_the_best_divides_samples(
    per_token: int, communication: float
) -> None:
    answer = recommend(question(), predictors(per_token=per_token, communication=communication))
    shared = registry.mesh_of(answer.best[0].label, 8).shares_samples
    assert recommendation(answer)["data_parallel_is_right"] != shared


ASKED = question("optimizer.learning_rate=0.1")
BEST = [one.planned for one in search(ASKED, predictors()).best_by_backend()[:3]]
TYPED = Typed(
    config=Path("job.yaml"),
    assignments=("optimizer.learning_rate=0.1", "training.precision=fp32", "data.sequence_length=100"),
    model="llama-3.2-1b",
)


def checkpointing(one: Scenario) -> bool | str:
    return one.job.training.activation_checkpointing


def test_backends_of_equal_settings_share_a_comparison_of_the_recommended_job() -> None:
    found = commands(ASKED, BEST, TYPED)
    assert len({(c.micro_batch_size, checkpointing(c)) for c in BEST}) == 1
    (line, report) = found["compare"]
    words = shlex.split(line)
    assert words[:8] == [
        "harness", "compare", "--config", "job.yaml", "--model", "llama-3.2-1b", "--backends",
        ",".join(c.label for c in BEST),
    ]  # fmt: skip
    assert words[words.index("--nproc") + 1] == "8"
    assert report == "harness report runs -o report.md"
    job = load_experiment(None, [word for before, word in pairwise(words) if before == "--set"])
    assert job.training.micro_batch_size == BEST[0].micro_batch_size
    assert job.training.activation_checkpointing == checkpointing(BEST[0])
    assert (job.training.global_batch_size, job.data.sequence_length) == (32, 100)
    assert (job.training.precision, job.optimizer.learning_rate) == ("bf16-mixed", 0.1)


def test_another_checkpointing_is_another_comparison() -> None:
    first = BEST[1]
    again = scenario_of(ASKED, first.label, first.micro_batch_size, checkpointing=True)
    lines = commands(ASKED, [BEST[0], again], TYPED)["compare"]
    assert len(lines) == 3
    assert BEST[1].label in lines[1]
    assert "training.activation_checkpointing=true" in lines[1]
    assert commands(ASKED, [], TYPED) == {"compare": [], "slurm": []}


def test_several_nodes_are_measured_under_slurm_only() -> None:
    found = commands(replace(ASKED, world_sizes=(32,), fabric=FABRIC), BEST, TYPED)
    assert found["compare"] == []
    site, render, submit, _ = found["slurm"]
    assert site == r"[ -e site.yaml ] || printf 'name: here\ngpus_per_node: 8\n' > site.yaml"
    shipped = replace(ASKED, world_sizes=(32,), fabric=FABRIC, device=load_hardware().device("h100"))
    of_known = commands(shipped, BEST, TYPED)["slurm"][0]
    assert of_known.startswith("[ -e site.yaml ] || ")  # one that is there is kept
    assert of_known.endswith(r"printf 'name: here\ngpus_per_node: 8\ngpu: H100-80\n' > site.yaml")
    words = shlex.split(render)
    assert words[:5] == ["harness", "slurm", "render", "--site", "site.yaml"]
    assert (words[words.index("--nodes") + 1], words[words.index("--nproc") + 1]) == ("4", "8")
    assert words[-2:] == ["-o", "jobs-1"]
    assert submit == "harness slurm submit jobs-1 --wait"


def divided(gpus: int, gpus_per_node: int) -> list[str]:
    """Every variant that is tried whose ranks share samples, or keep a second copy within a group."""
    every = (label for entry in distinct_backends()[0] for label in variants(entry, gpus, gpus_per_node, JOB))
    return [
        label
        for label in every
        if registry.mesh_of(label, gpus).shares_samples
        or second_copy_ranks(registry.parse(label)[1].model_dump()) is not None
    ]


@pytest.mark.parametrize(("gpus", "gpus_per_node"), [(8, 8), (16, 8), (64, 8)])
def test_printed_commands_name_every_divided_variant_as_the_registry_spells_it(
    gpus: int, gpus_per_node: int
) -> None:
    tried = divided(gpus, gpus_per_node)
    names = {label.partition(":")[0] for label in tried}
    assert {"tp", "fsdp-tp", "autotp-zero1", "autotp-zero3", "pp", "cp", "fsdp-cp", "ulysses-zero3"} <= names
    assert ({"zero3", "fsdp"} <= names) == (gpus > gpus_per_node)
    asked = question(gpus=gpus, tokens=gpus * 64 * 100)
    for label in tried:
        (size, *_) = micro_batch_sizes(asked, label)
        chosen = scenario_of(asked, label, size, checkpointing=checkpointing(BEST[0]))
        found = commands(asked, [chosen, BEST[1]], Typed())
        words = shlex.split((found["compare"] or found["slurm"][1:])[0])
        labels = split_backends(words[words.index("--backends") + 1])
        assert labels[0] == label == registry.canonical_label(labels[0])
        _, options = registry.parse(labels[0])
        assert options.mesh(gpus).world_size == gpus
        assert parts_of(options, gpus) <= size
        job = load_experiment(None, [w for before, w in pairwise(words) if before == "--set"])
        layout = cell_layout(labels[0], gpus, job_layout(labels[:1], gpus, job.training), job.training)
        assert layout.micro_batch_size == size


def test_states_that_are_too_large_need_more_gpus() -> None:
    # 800 MB of states and 4 samples a rank: 12.5 MB on 64 GPUs are too much, 6.25 on 128 are not.
    asked = question(gpus=16, tokens=512 * 100, checkpointing=(True,))
    (more,) = (one for one in recommend(asked, predictors(states=800, per_token=1)).instead if one.is_roomy)
    assert (more.name, more.planned.world_size) == (MORE_GPUS, 128)


def test_more_gpus_than_samples_are_not_offered() -> None:
    # One sample needs 40 MB and states of 2, of 10, however many GPUs there are.
    answer = recommend(question(tokens=800), predictors(per_token=4_000_000))
    assert not answer.best
    assert all(one.planned.world_size <= 8 for one in answer.instead)


def test_gradients_that_accumulate_need_a_smaller_batch() -> None:
    def accumulating(scenario: Scenario) -> MemoryPrediction:
        kept = 20_000_000 if scenario.accumulation_steps > 1 else 3_000_000 * scenario.micro_batch_size
        return needing(gradients=kept)

    found = search(question(), Predictors(memory=accumulating, speed=speed()))
    assert "a smaller micro-batch needs more" in found.rejected(())[0][1]


def test_exposed_communication_needs_more_tokens_and_a_little_is_no_reason() -> None:
    def bound(gpus: int = 8, tokens: int = 3200, **changes: Any) -> str | None:
        asked = replace(question(gpus=gpus, tokens=tokens), names_all=False, labels=("zero1",))
        answer = recommend(asked, predictors(**changes))
        document = recommendation(answer)
        found: str | None = document["advice"] and document["advice"]["figures"]
        assert (("speed", found) in answer.uncertain) == (found is not None)
        return found

    # ZeRO-1 communicates 2 x 2 s and computes 1.025 s; half of it is exposed.
    found = bound(gpus=64, tokens=64 * 400, communication=2.0)
    assert found is not None
    assert found.endswith("; as long at 1,561 tokens a GPU and step, not 400")
    # 0.2 x 2 / 2 = 0.2 s of 1.225 s.
    assert bound() is bound(communication=0.2) is None
    assert bound(communication=0.3) is not None


GPUS = 64
FIELDS = (
    "label", "strategy", "options", "world_size", "ranks_per_node", "shard_size", "preset",
    "micro_batch_size", "accumulation_steps", "torch_device", "transport", "device", "fabric", "constants",
)  # fmt: skip


@pytest.mark.parametrize("preset", [None, "like-for-like", "library-defaults"])
def test_recommend_plans_what_estimate_estimates(preset: str | None) -> None:
    hardware, model = load_hardware(), load_model("llama-3.1-8b")
    device, fabric = hardware.device("H100-80"), hardware.fabric("NDR400")
    given = [] if preset is None else [f"runtime.preset={preset}"]
    planned_job, _ = with_training_defaults(model, load_experiment(None, given), device)
    asked = ask(
        model, planned_job, world_sizes=[GPUS], ranks_per_node=8, device=device, fabric=fabric,
        tokens=4_000_000,
    ).opened(GPUS)  # fmt: skip
    assert asked.preset == (preset or PRESET)
    every = [label for entry in distinct_backends()[0] for label in variants(entry, GPUS, 8, asked.job)]
    batch = [f"training.global_batch_size={asked.samples}", "training.activation_checkpointing=true"]
    for label in (one for one in every if not one.startswith("pp:")):
        size = micro_batch_sizes(asked, label)[0]
        job = load_experiment(None, [*given, *batch, f"training.micro_batch_size={size}"])
        estimated = ask(
            model, with_training_defaults(model, job, device)[0], backends=[label], world_sizes=[GPUS],
            ranks_per_node=8, device=device, fabric=fabric,
        )  # fmt: skip
        (candidate,) = candidates(estimated)
        if (own := candidate.scenario) is None:
            continue
        planned = scenario_of(asked, label, size, checkpointing=True)
        assert {f: getattr(planned, f) for f in FIELDS} == {f: getattr(own, f) for f in FIELDS}
        assert planned.job.data == own.job.data
        assert planned.job.training.precision == own.job.training.precision
        assert planned.accumulation_steps == samples_of(asked, label) // size


@pytest.mark.parametrize(
    ("gpus", "settings"),
    [(8, ()), (1, ()), (4, ("training.precision=fp32",)), (16, ("training.activation_checkpointing=true",)),
     (8, ("runtime.preset=library-defaults",)), (8, ("data.sequence_length=200",))],
)  # fmt: skip
@pytest.mark.parametrize("states", [16, 40, 80])
def test_estimate_and_recommend_name_the_same_strategy(
    gpus: int, settings: tuple[str, ...], states: int
) -> None:
    """With the batch open, and beside rows at a batch of which the tokens of a step follow."""

    def taken(*batch: str, **asked: bool) -> tuple[Any, ...]:
        given = load_experiment(None, ["data.sequence_length=100", *settings, *batch])
        experiment, remarks = with_training_defaults(MODEL, given, DEVICE)
        found = ask(
            MODEL, experiment, world_sizes=[gpus], ranks_per_node=8, device=DEVICE, fabric=FABRIC,
            remarks=remarks, **asked,
        )  # fmt: skip
        (answer,) = answers(found, by=predictors(states=states))
        return tuple((one.label, one.planned.micro_batch_size, one.checkpointing) for one in answer.best)

    assert taken() == taken(opens=True)
    samples = f"training.global_batch_size={4 * gpus}"
    assert taken(samples) == taken(samples, opens=True)


def test_the_page_asks_as_the_commands_do() -> None:
    for settings in (strategies.SETTINGS, sweeps.COMMON):
        assert load_experiment(None, settings).runtime.preset == PRESET
