import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from harness.backends import registry
from harness.backends.options import parts_of
from harness.cli.options import split_backends
from harness.forms.workload import second_copy_ranks
from harness.job.batch import cell_layout, job_layout
from harness.job.config import load_experiment
from harness.plan.answer import Typed, commands
from harness.plan.hardware import load_hardware
from harness.plan.scenario import Scenario
from harness.plan.search import distinct_backends, micro_batch_sizes, scenario_of, search, variants
from tests.harness.plan.invented import FABRIC, JOB, predictors, question

ASKED = question("optimizer.learning_rate=0.1")
BEST = [one.planned for one in search(ASKED, predictors()).best_by_backend()[:3]]
TYPED = Typed(
    config=Path("job.yaml"),
    assignments=("optimizer.learning_rate=0.1", "training.precision=fp32", "data.sequence_length=100"),
    model="llama-3.2-1b",
)


def checkpointing(one: Scenario) -> bool | str:
    return one.job.training.activation_checkpointing


def settings(line: str) -> list[str]:
    words = shlex.split(line)
    return [word for before, word in pairwise(words) if before == "--set"]


def test_backends_of_equal_settings_share_a_comparison() -> None:
    found = commands(ASKED, BEST, TYPED)
    assert len({(c.micro_batch_size, checkpointing(c)) for c in BEST}) == 1
    (line, report) = found.compare
    words = shlex.split(line)
    assert words[:8] == [
        "harness", "compare", "--config", "job.yaml", "--model", "llama-3.2-1b", "--backends",
        ",".join(c.label for c in BEST),
    ]  # fmt: skip
    assert words[words.index("--nproc") + 1] == "8"
    assert report == "harness report runs -o report.md"


def test_the_settings_are_a_job_of_the_recommendation() -> None:
    (line, _) = commands(ASKED, BEST, TYPED).compare
    job = load_experiment(None, settings(line))
    assert job.training.micro_batch_size == BEST[0].micro_batch_size
    assert job.training.activation_checkpointing == checkpointing(BEST[0])
    assert (job.training.global_batch_size, job.data.sequence_length) == (32, 100)
    assert (job.training.precision, job.optimizer.learning_rate) == ("bf16-mixed", 0.1)


def test_another_checkpointing_is_another_comparison() -> None:
    first = BEST[1]
    again = scenario_of(ASKED, first.label, first.micro_batch_size, checkpointing=True)
    mixed = [BEST[0], again]
    lines = commands(ASKED, mixed, TYPED).compare
    assert len(lines) == 3
    assert BEST[1].label in lines[1]
    assert "training.activation_checkpointing=true" in lines[1]


def test_several_nodes_are_measured_under_slurm_only() -> None:
    found = commands(replace(ASKED, world_sizes=(32,), fabric=FABRIC), BEST, TYPED)
    assert found.compare == ()
    site, render, submit, _ = found.slurm
    assert site == r"printf 'name: here\ngpus_per_node: 8\n' > site.yaml"
    shipped = replace(ASKED, world_sizes=(32,), fabric=FABRIC, device=load_hardware().device("h100"))
    of_known = commands(shipped, BEST, TYPED).slurm[0]
    assert of_known == r"printf 'name: here\ngpus_per_node: 8\ngpu: H100-80\n' > site.yaml"
    words = shlex.split(render)
    assert words[:5] == ["harness", "slurm", "render", "--site", "site.yaml"]
    assert (words[words.index("--nodes") + 1], words[words.index("--nproc") + 1]) == ("4", "8")
    assert words[-2:] == ["-o", "jobs-1"]
    assert submit == "harness slurm submit jobs-1 --wait"


def test_without_a_configuration_there_is_nothing_to_measure() -> None:
    found = commands(ASKED, [], TYPED)
    assert (found.compare, found.slurm) == ((), ())


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
        words = shlex.split((found.compare or found.slurm[1:])[0])
        labels = split_backends(words[words.index("--backends") + 1])
        assert labels[0] == label == registry.canonical_label(labels[0])
        _, options = registry.parse(labels[0])
        assert options.mesh(gpus).world_size == gpus
        assert parts_of(options, gpus) <= size
        job = load_experiment(None, [w for before, w in pairwise(words) if before == "--set"])
        layout = cell_layout(labels[0], gpus, job_layout(labels[:1], gpus, job.training), job.training)
        assert layout.micro_batch_size == size
