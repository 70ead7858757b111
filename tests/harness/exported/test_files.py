"""Exported configurations: read again they are the same row, key by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli.export import program_of_run
from harness.errors import HarnessError
from harness.exported.folder import exported_files, require_exportable, tool_of, torch_values
from harness.job.batch import batch_layout
from harness.job.config import load_experiment
from harness.launch.cells import canonical_label
from tests.harness.exported.round_trip import PARAMETERS, require_round_trip
from tests.harness.imported.files import every_file
from tests.records import make_record

FILES = every_file()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["like-for-like", "exactly-as-given"])
def test_a_file_read_exported_and_read_again_is_the_same_row(name: str, mode: str, tmp_path: Path) -> None:
    kind, document = FILES[name]
    path = tmp_path / f"given.{'json' if kind == 'deepspeed' else 'yaml'}"
    path.write_text(json.dumps(document))
    require_round_trip(path, mode, tmp_path)


EXAMPLE = {
    "tokens": [[1, 2]], "labels": [[1, 2]], "learning_rates": [0.1], "configuration": {"model_type": "llama"},
    "foreach": None, "fused": None,
}  # fmt: skip
FACTS = {"layout": {"blocks": ["model.layers.0"], "decaying": ["a"]}, "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("tool", "label", "names"),
    [
        ("torchrun", "ddp", {"strategy.py", "wrap.py"}),
        ("torchrun", "fsdp1-hybrid", {"strategy.py", "wrap.py"}),
        ("deepspeed", "zero3:offload=cpu", {"strategy.py", "ds_config.json"}),
        ("accelerate", "accelerate-zero3", {"strategy.py", "ds_config.json", "accelerate.yaml"}),
        ("accelerate", "accelerate-fsdp", {"strategy.py", "accelerate.yaml"}),
    ],
)
def test_each_tool_has_its_files(tool: Any, label: str, names: set[str]) -> None:
    experiment = load_experiment(None)
    layout = batch_layout(experiment.training, 4)
    require_exportable(tool, label, experiment)
    found = exported_files(
        tool, canonical_label(label), experiment, layout, world_size=4, device="cpu",
        preset="like-for-like", facts=FACTS, example=EXAMPLE,
    )  # fmt: skip
    always = {"train.py", "samples.json", "settings.json", "model/config.json"}
    assert set(found) == always | names
    for name, text in found.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
            assert "harness" not in text
        elif name.endswith(".json"):
            json.loads(text)


@pytest.mark.parametrize("tool", ["torchrun", "accelerate"])
@pytest.mark.parametrize("each", [True, False])
def test_the_program_reduces_in_every_micro_step_if_the_backend_does(tool: Any, each: bool) -> None:
    experiment = load_experiment(None)
    label = canonical_label(f"ddp:sync_each_batch={each}")
    found = exported_files(
        tool, label, experiment, batch_layout(experiment.training, 4), world_size=4, device="cpu",
        preset="like-for-like", facts=FACTS, example=EXAMPLE,
    )  # fmt: skip
    assert json.loads(found["settings.json"])["strategy"]["sync_each_batch"] is each
    assert "self.reduces_each" in found["strategy.py"]


@pytest.mark.parametrize(
    ("tool", "label", "assignments", "says"),
    [
        ("torchrun", "zero3", [], "--to deepspeed"),
        ("deepspeed", "fsdp", [], "--to torchrun"),
        ("torchrun", "single", [], "cannot be exported"),
        ("accelerate", "replicate", [], "export ddp, which trains alike"),
        ("torchrun", "ddp", ["model.compile=block"], "a job with model.compile=block cannot be exported"),
        ("torchrun", "fsdp", ["training.activation_checkpointing=every-2"], "every-2 cannot be exported"),
        ("torchrun", "ddp", ["adapter.kind=lora"], "a job with an adapter cannot be exported"),
        ("torchrun", "ddp", ["task=seq2seq", "data.source=squad", "data.path=x"], "causal-lm"),
    ],
)
def test_what_cannot_be_exported_says_so(tool: Any, label: str, assignments: list[str], says: str) -> None:
    with pytest.raises(HarnessError, match=says):
        require_exportable(tool, label, load_experiment(None, assignments))


def test_a_program_shards_as_the_backend_of_its_run_does() -> None:
    values = torch_values("fsdp1-grad-op", load_experiment(None).job(), 2, [], "like-for-like")
    assert values["sharding_strategy"] == "SHARD_GRAD_OP"


def test_options_that_a_program_cannot_have_are_refused() -> None:
    job = load_experiment(None).job()
    with pytest.raises(HarnessError, match="'prefetch'"):
        torch_values("fsdp:prefetch=2", job, 2, [], "like-for-like")


def test_the_program_of_a_run_has_its_job_backend_ranks_and_batch() -> None:
    run = make_record(label="fsdp:reshard=always", world_size=4)
    experiment, label, ranks, layout = program_of_run(run)
    assert (label, ranks) == ("fsdp:reshard=always", 4)
    assert experiment.job() == run.job
    assert experiment.runtime.preset == run.world.preset
    assert (layout.micro_batch_size, layout.accumulation_steps) == (
        run.world.micro_batch_size, run.world.accumulation_steps,
    )  # fmt: skip
    assert layout.global_batch_size == run.job.training.global_batch_size


@pytest.mark.parametrize(
    ("label", "tool"),
    [("ddp", "torchrun"), ("fsdp1", "torchrun"), ("zero3", "deepspeed"), ("accelerate-fsdp", "accelerate")],
)
def test_a_strategy_has_a_usual_tool(label: str, tool: str) -> None:
    assert tool_of(label) == tool
