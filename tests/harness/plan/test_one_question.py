"""One question about GPUs has one scenario, whichever command or page asks it."""

import json
import shlex
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner

from docs.hooks import strategies, sweeps
from harness.cli import harness
from harness.job.config import load_experiment
from harness.plan.answer import answers, candidates, set_words
from harness.plan.hardware import PRESET, load_hardware, with_training_defaults
from harness.plan.models import load_model
from harness.plan.question import ask
from harness.plan.search import distinct_backends, micro_batch_sizes, samples_of, scenario_of, variants
from tests.harness.plan.invented import DEVICE, FABRIC, MODEL, predictors

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
    tried = [label for label in every if not label.startswith("pp:")]
    batch = [f"training.global_batch_size={asked.samples}", "training.activation_checkpointing=true"]
    for label in tried:
        size = micro_batch_sizes(asked, label)[0]
        experiment, _ = with_training_defaults(
            model, load_experiment(None, [*given, *batch, f"training.micro_batch_size={size}"]), device
        )
        estimated = ask(
            model, experiment, backends=[label], world_sizes=[GPUS], ranks_per_node=8, device=device,
            fabric=fabric,
        )  # fmt: skip
        (candidate,) = candidates(estimated)
        if candidate.scenario is None:
            continue
        planned = scenario_of(asked, label, size, checkpointing=True)
        assert {f: getattr(planned, f) for f in FIELDS} == {f: getattr(candidate.scenario, f) for f in FIELDS}
        assert planned.job.data == candidate.scenario.job.data
        assert planned.job.training.precision == candidate.scenario.job.training.precision
        assert planned.accumulation_steps == samples_of(asked, label) // size


QUESTIONS = [
    (8, ()),
    (4, ("training.precision=fp32",)),
    (16, ("training.activation_checkpointing=true",)),
    (8, ("runtime.preset=library-defaults",)),
    (1, ()),
    (8, ("data.sequence_length=200",)),
]


@pytest.mark.parametrize(("gpus", "settings"), QUESTIONS)
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


@pytest.mark.exhaustive
@pytest.mark.long(seconds=90)
@pytest.mark.parametrize(("model", "gpu"), [("mistral-7b", "A100-40"), ("llama-3.1-8b", "RTX4090")])
def test_what_recommend_offers_where_nothing_fits_is_what_estimate_predicts(model: str, gpu: str) -> None:
    """Of the settings and of the command as printed: neither knows a way that the other predicts else."""
    words = ["--model", model, "--gpu", gpu, "--json"]
    asked = ["--gpus", "1", "--tokens-per-step", "4096"]
    done = CliRunner().invoke(harness, ["recommend", *words, *asked])
    answer = json.loads(done.stdout)
    offers = answer["alternatives"]
    assert {"LoRA", "QLoRA"} & {one["name"].partition(",")[0] for one in offers}
    for one in offers:
        typed = shlex.split(one["command"])
        as_run = [word for pair in pairwise(typed) if pair[0] == "--set" for word in pair]
        for settings in (set_words(one["settings"]), as_run):
            place = ["--backends", one["backend"], "--world-size", str(one["world_size"])]
            done = CliRunner().invoke(harness, ["estimate", *words, *place, *settings])
            (row,) = json.loads(done.stdout)["rows"]
            assert row["device_bytes"] == one["device_bytes"], one
            assert row["verdict"] in ("fits", "close")
            assert row["tokens_per_second_per_gpu"] == one["tokens_per_second_per_gpu"]
