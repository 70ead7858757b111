"""Reads a configuration file, exports its row and reads that again."""

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from harness.exported.folder import accelerate_values, deepspeed_values, exported_strategy
from harness.imported.rows import GivenRow, exactly_as_given, like_for_like, read_files
from harness.job.batch import batch_layout, with_global_batch
from harness.job.config import load_experiment
from harness.job.experiment import Experiment

PARAMETERS = 10**6
OF_ROW = ("row", "preset")
"""Options of the row and not of its strategy."""


def exported(row: GivenRow, folder: Path) -> list[Path]:
    """The configuration files that a row becomes: Accelerate's last."""
    experiment = row.experiment
    layout = batch_layout(experiment.training, 2)
    job = with_global_batch(experiment.job(), layout)
    preset = "library-defaults" if row.part.mode == "exactly-as-given" else "like-for-like"
    paths = []
    if exported_strategy(row.label).zero_stage is not None:
        values = deepspeed_values(row.label, job, layout, 2, "cpu", PARAMETERS, preset)  # type: ignore[arg-type]
        paths.append(folder / "ds_config.json")
        paths[-1].write_text(json.dumps(values))
    paths.append(folder / "accelerate.yaml")
    YAML(typ="safe", pure=True).dump(accelerate_values(row.label, job, 2, "cuda"), paths[-1])
    return paths


def strategy_options(label: str) -> tuple[str, dict[str, str]]:
    name, _, text = label.partition(":")
    options = dict(option.split("=") for option in text.split(",") if option)
    return name, {key: value for key, value in options.items() if key not in OF_ROW}


def settings(experiment: Experiment) -> dict[str, Any]:
    """What Accelerate and DeepSpeed can say of a job; the optimizer and the schedule are the program's."""
    layout = batch_layout(experiment.training, 2)
    return {
        "precision": experiment.training.precision, "clipping": experiment.training.gradient_clipping,
        "checkpointing": experiment.training.activation_checkpointing, "layout": layout,
    }  # fmt: skip


def job_of(row: GivenRow, known: tuple[str, ...]) -> Experiment:
    """The configuration next to an exported file: what the tool's own file cannot say."""
    training = row.experiment.training
    assignments = ["training.steps=3"]
    if "batch" in known:
        layout = batch_layout(training, 2)
        clipping = "null" if training.gradient_clipping is None else training.gradient_clipping
        assignments += [
            f"training.micro_batch_size={layout.micro_batch_size}",
            f"training.accumulation_steps={layout.accumulation_steps}",
            f"training.gradient_clipping={clipping}",
            f"training.activation_checkpointing={str(training.activation_checkpointing).lower()}",
        ]
    return load_experiment(None, assignments)


def read(path: Path, experiment: Experiment, mode: str) -> GivenRow:
    files = read_files([], [path]) if path.suffix == ".json" else read_files([path], [])
    if mode == "exactly-as-given":
        return exactly_as_given(files[0], experiment)
    return like_for_like(files, experiment)[1][0]


def require_round_trip(path: Path, mode: str, folder: Path) -> GivenRow:
    """The row of a file. Raises AssertionError if what it exports to, written to `folder`, is another one."""
    row = read(path, load_experiment(None, ["training.steps=3"]), mode)
    for again in exported(row, folder):
        # The program itself clips outside of DeepSpeed, and the batch is that of its loader.
        known = () if again.suffix == ".json" else ("training.gradient_clipping", "batch")
        second = read(again, job_of(row, known), mode)
        assert strategy_options(second.label)[0] == strategy_options(row.label)[0]
        ours, theirs = strategy_options(row.label)[1], strategy_options(second.label)[1]
        if mode == "like-for-like":
            assert theirs == ours
        assert ours.items() <= theirs.items()
        assert settings(second.experiment) == settings(row.experiment)
    return row
