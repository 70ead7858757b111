"""Exported configurations, programs and trackers say what their runs were."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.cli.export import program_of_run
from harness.errors import HarnessError
from harness.exported.folder import exported_files, require_exportable, tool_of, torch_values
from harness.exported.scripts import accelerate_launch
from harness.exported.tracking import scalars, settings
from harness.job.batch import batch_layout
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch.cells import canonical_label
from harness.record import EvaluationPart, Record
from tests.harness.cli.command_line import SMALL, environment, harness, records, succeeds
from tests.harness.exported.round_trip import PARAMETERS, require_round_trip
from tests.harness.imported.files import every_file
from tests.observed import run_script
from tests.patience import SECONDS
from tests.records import LOSSES, changed, make_record, make_steps, saved

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
    run = make_record(label="fsdp:reshard=2", world_size=4)
    experiment, label, ranks, layout = program_of_run(run)
    assert (label, ranks) == ("fsdp:reshard=2", 4)
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


JOB = [
    *SMALL, "--nproc", "2", "--set", "training.steps=3", "--set", "training.accumulation_steps=2",
    "--set", "training.gradient_clipping=0.5",
]  # fmt: skip
NO_PROBES = ["--set", "measure.probed_steps=0", "--set", "measure.traced_steps=0"]
ROUNDING = 2e-6
"""Relative: programs add the gradient norm, by which they clip, in fp32; the harness in fp64."""
STARTED = (("torchrun", "fsdp1-grad-op"), ("accelerate", "zero2"))
LOW_PRECISION = ["--set", "training.precision=bf16-mixed"]


def measured(folder: Path, backend: str, *words: str) -> Record:
    succeeds("run", "--backend", backend, *JOB, *NO_PROBES, *words, cwd=folder)
    (record,) = records(folder / "runs")
    return record


def trained(folder: Path, tool: str, backend: str, *words: str) -> list[dict[str, Any]]:
    """The lines that the exported program prints; the printed command starts those of `STARTED`."""
    done = succeeds(
        "export", "program", "--to", tool, "--backend", backend, *JOB, *words, "-o", "mine", cwd=folder
    )
    command = done.stdout.splitlines()[-1].rpartition("&& ")[2]
    program, *rest = shlex.split(command)
    if (tool, backend) not in STARTED:  # in ranks that have their imports behind them
        assert [program, *rest] == ["torchrun", "--nproc-per-node", "2", "train.py"]
        ran = run_script(folder / "mine", folder / "mine" / "train.py", observe=False)
        assert ran.codes == [0, 0], ran.printed
        return [json.loads(line) for line in ran.lines('{"step"')]
    modules = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.accelerate_cli"]}
    started = subprocess.run(
        [sys.executable, "-m", *modules[program], *rest], cwd=folder / "mine",
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PATH=os.environ["PATH"]),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr[-3000:]
    return [json.loads(line) for line in started.stdout.splitlines() if line.startswith('{"step"')]


@pytest.mark.parametrize(
    ("tool", "backend", "words"),
    [
        pytest.param("torchrun", "fsdp", LOW_PRECISION, marks=pytest.mark.costly),
        pytest.param("torchrun", "fsdp1-grad-op", [], marks=pytest.mark.exhaustive),
        pytest.param("torchrun", "fsdp:sync_each_batch=true", [], marks=pytest.mark.exhaustive),
        pytest.param("deepspeed", "zero3", LOW_PRECISION, marks=pytest.mark.costly),
        pytest.param("accelerate", "zero2", [], marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_those_of_the_harness(tool: str, backend: str, words: list[str], tmp_path: Path) -> None:
    record = measured(tmp_path, backend, *words)
    printed = trained(tmp_path, tool, backend, *words)
    assert [line["step"] for line in printed] == [0, 1, 2]
    losses = [step.loss for step in record.steps]
    assert [line["loss"] for line in printed] == pytest.approx(losses, rel=ROUNDING)
    config = tmp_path / "mine" / "ds_config.json"
    if config.exists():
        assert json.loads(config.read_text()) == record.backend.native_config


def test_the_program_of_a_file_has_the_rates_of_deepspeed_s_own_warmup(tmp_path: Path) -> None:
    document = {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(document))
    words = [*JOB, "--set", "training.steps=4", "-o", "mine"]
    succeeds("export", "program", "--from-deepspeed", "ds.json", *words, cwd=tmp_path)
    settings = json.loads((tmp_path / "mine" / "settings.json").read_text())
    # of kind log, which the file does not say
    assert settings["learning_rates"] == pytest.approx([0, 3.0103e-4, 4.77121e-4, 6.0206e-4], rel=1e-5)
    assert settings["optimizer"].items() >= {"betas": [0.9, 0.999], "weight_decay": 0}.items()


def tracked(folder: Path, tool: str) -> subprocess.CompletedProcess[str]:
    """One run, exported to `board`."""
    saved(folder / "runs", "one")
    return harness("export", "tracking", "runs", "--to", tool, "-o", "board", cwd=folder)


def test_losses_of_a_run_are_read_back_from_tensorboard(tmp_path: Path) -> None:
    done = tracked(tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs logged" in done.stderr
    board = EventAccumulator(str(tmp_path / "board" / "one"))
    board.Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(LOSSES)
    assert [event.step for event in board.Scalars("train/loss")] == [0, 1, 2, 3]
    (rate,) = board.Scalars("run/tokens_per_second")
    assert rate.value == 2048


def test_loss_that_is_not_finite_is_left_out() -> None:
    record = make_record(steps=make_steps([5.0, None], [1.0, None]))
    logged = dict(scalars(Comparison([record]).rows[0]))
    assert logged[0]["train/loss"] == 5.0
    assert "train/loss" not in logged[1]


def test_held_out_loss_stands_at_the_step_after_which_it_was_taken() -> None:
    record = make_record(eval=[EvaluationPart(step=2, loss=4.5, target_tokens=10)])
    logged = dict(scalars(Comparison([record]).rows[0]))
    assert {step for step, values in logged.items() if "evaluation/loss" in values} == {1}


def test_settings_are_simple_values_under_dotted_names() -> None:
    found = settings(Comparison([make_record(label="ddp")]).rows[0])
    assert (found["backend"], found["job.training.global_batch_size"]) == ("ddp", 8)
    assert all(isinstance(value, str | int | float | bool) for value in found.values())


def test_tool_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.exported.tracking.find_spec", lambda name: None)
    done = tracked(tmp_path, "mlflow")
    assert done.returncode == 1
    assert "`pip install mlflow`" in done.stderr


def test_losses_of_a_run_are_read_back_from_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    done = tracked(tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["board", "runs"]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'board' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'sharding-harness'")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [loss.value for loss in losses] == pytest.approx(LOSSES)
    assert run.data.params["backend"] == make_record().backend.label


@pytest.mark.parametrize(
    ("label", "kind", "file"),
    [("ddp", "MULTI_GPU", {}), ("zero3", "DEEPSPEED", {"stage": 3}), ("fsdp", "FSDP", {"fsdp_version": 2}),
     ("fsdp1", "FSDP", {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"})],
)  # fmt: skip
def test_a_script_is_given_its_row_and_what_the_base_was_seen_to_do(
    label: str, kind: str, file: dict[str, Any], tmp_path: Path
) -> None:
    base = make_record(label="ddp")
    base = changed(base, job={"training": {"gradient_clipping": 0.7, "precision": "bf16-mixed"}})
    *_, path = accelerate_launch(label, tmp_path, base, world_size=2, device="cuda", preset="like-for-like")
    document = yaml.safe_load(Path(path).read_text())
    assert (document["distributed_type"], document["num_processes"]) == (kind, 2)
    assert "mixed_precision" not in document
    config = json.loads((tmp_path / "ds_config.json").read_text()) if kind == "DEEPSPEED" else {}
    assert (config.get("zero_optimization") or document.get("fsdp_config") or {}).items() >= file.items()
    if config:
        assert (config["gradient_clipping"], config["bf16"]["enabled"]) == (0.7, True)
        assert config["train_micro_batch_size_per_gpu"] == base.world.micro_batch_size
        accelerate_launch(label, tmp_path, None, world_size=2, device="cuda", preset="like-for-like")
        config = json.loads((tmp_path / "ds_config.json").read_text())
        assert (config["gradient_clipping"], config["train_micro_batch_size_per_gpu"]) == ("auto", "auto")
        assert config["zero_optimization"]["reduce_bucket_size"] > 0
