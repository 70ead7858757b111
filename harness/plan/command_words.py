"""Options and `--set` as commands repeat them, and the commands that predict or run what was planned."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.plan.alternatives import Alternative
from harness.plan.hardware import Device, load_hardware
from harness.plan.scenario import Scenario

SITE = "site.yaml"


def site_line(gpus_per_node: int, device: Device | None) -> str:
    """Writes the least that Slurm's scripts need; partition, account and modules are added by hand.

    With a GPU that every command knows `slurm submit` refuses what cannot fit, such as the reference.
    """
    name = device.name if device is not None else ""
    is_plain = shlex.quote(name) == name and "%" not in name
    gpu = f"gpu: {name}\\n" if is_plain and name in load_hardware().devices else ""
    return f"printf 'name: here\\ngpus_per_node: {gpus_per_node}\\n{gpu}' > {SITE}"


def estimate_command(one: Alternative, words: Sequence[str]) -> str:
    """What predicts it. `words`: of the model, the job and the hardware, as every command repeats them."""
    place = ["--backends", one.label, "--world-size", str(one.scenario.world_size)]
    return shlex.join(["harness", "estimate", *words, *place, *set_words(one.settings)])


def planned_settings(scenario: Scenario) -> dict[str, Any]:
    """What a command sets so that it runs what was planned."""
    adapter = scenario.job.adapter
    base = {"adapter.base_dtype": adapter.base_dtype} if adapter.is_present and adapter.base_dtype else {}
    return {
        "runtime.preset": scenario.preset,
        "data.sequence_length": scenario.job.data.sequence_length,
        "training.precision": scenario.job.training.precision,
        "training.global_batch_size": scenario.samples * scenario.mesh.data_size,
        "training.micro_batch_size": scenario.micro_batch_size,
        "training.activation_checkpointing": scenario.job.training.activation_checkpointing,
        **base,
    }


def option_words(given: Mapping[str, object], assignments: Sequence[str] = ()) -> list[str]:
    """Options that were given, and `--set` as typed, as a command repeats them."""
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return words + [word for text in assignments for word in ("--set", text)]


def set_texts(settings: Mapping[str, Any]) -> list[str]:
    """'SECTION.KEY=VALUE' for each, its values as YAML reads them."""
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings.items())
    return [f"{key}={text}" for key, text in texts]


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """`--set` for each."""
    return [word for text in set_texts(settings) for word in ("--set", text)]


def run_command(one: Alternative, words: Sequence[str]) -> str:
    """What runs it: on one node, or under Slurm. `words`: of the model and of the job."""
    added = set_words({**planned_settings(one.scenario), **one.settings})
    nodes, per_node = one.scenario.nodes, one.scenario.ranks_per_node
    if nodes > 1:
        start = ["slurm", "render", "--site", SITE, "--backends", one.label, "--nodes", str(nodes)]
        render = shlex.join(["harness", *start, "--nproc", str(per_node), *words, *added, "-o", "jobs"])
        return f"{site_line(per_node, one.scenario.device)} && {render}"
    start = ["run", "--backend", one.label, "--nproc", str(one.scenario.world_size)]
    return shlex.join(["harness", *start, *words, *added])
