"""A script of the user's own under a strategy of ours: what `accelerate launch` is given for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

import yaml

from harness.backends import registry
from harness.backends.base import Preset, Unsupported, World
from harness.backends.options import reduces_each
from harness.errors import HarnessError
from harness.exported.folder import accelerate_values, deepspeed_values, exported_strategy
from harness.files import write_atomically
from harness.imported.reading import at, read_file
from harness.job.batch import BatchLayout
from harness.job.config import load_experiment
from harness.job.job import Job
from harness.plan.scenario import why_not_planned
from harness.record import Record
from harness.run_directory.observed_record import GLOO

ROUTE = "accelerate-"
VARIABLES = ("ACCELERATE_", "FSDP_")
"""By which Accelerate is told a strategy: of a row by its file alone."""
TRAINER = "transformers.Trainer"
"""Which fills in what DeepSpeed's file leaves 'auto', and refuses what differs from its own arguments."""
MANY_PARAMETERS = 10**9
"""Where no row has trained yet: buckets are limited as those of a large model."""


def of_accelerate() -> list[str]:
    """The strategies that Accelerate has, by the names of our own rows."""
    return [name.removeprefix(ROUTE) for name in registry.entries() if name.startswith(ROUTE)]


def strategy_name(label: str) -> str:
    """What an observed script shows of this row. Raises HarnessError for what Accelerate does not have."""
    name = registry.parse(label)[0].name
    if name not in of_accelerate():
        raise HarnessError(
            f"a script cannot be given '{label}'; Accelerate takes {', '.join(of_accelerate())}"
        )
    try:
        _, options = registry.parse(f"{ROUTE}{label}")
    except registry.UnknownBackend as error:
        raise HarnessError(f"a script cannot be given '{label}': {error}") from error
    if reduces_each(options):
        raise HarnessError(f"a script cannot be given '{label}': its own accumulation decides when to reduce")
    return name


@dataclass(frozen=True)
class StrategyFile:
    """A file of Accelerate or DeepSpeed that a script is given as it is."""

    path: Path
    strategy: str
    """One of `of_accelerate`."""
    values: Mapping[str, Any]
    """Accelerate's configuration."""

    @classmethod
    def read(cls, path: Path, tool: Literal["accelerate", "deepspeed"]) -> StrategyFile:
        """Raises HarnessError for what is no such file, or a strategy that Accelerate has not."""

        def document(file: Path) -> dict[str, Any]:
            return read_file(file, f"{tool} file", suffix=file.suffix, has_comments=True).document

        values = document(path)
        if tool == "deepspeed":
            plugin = {"deepspeed_config_file": str(path.resolve()), "zero3_init_flag": False}
            values = {"distributed_type": "DEEPSPEED", "deepspeed_config": plugin}
        strategy = str(values.get("distributed_type", "NO"))
        if strategy in ("MULTI_GPU", "MULTI_CPU"):
            strategy = "ddp"
        elif strategy == "FSDP":
            strategy = "fsdp" if str(at(values, "fsdp_config.fsdp_version")) == "2" else "fsdp1"
        elif strategy == "DEEPSPEED":
            stage = at(values, "deepspeed_config.zero_stage")
            if file := at(values, "deepspeed_config.deepspeed_config_file"):
                stage = at(document(Path(str(file))), "zero_optimization.stage") or 0
            strategy = f"zero{2 if stage is None else stage}"
        if strategy not in of_accelerate():
            raise HarnessError(
                f"{tool} file {path} gives a script '{strategy}'; its row may be {', '.join(of_accelerate())}"
            )
        return cls(path, strategy, values)


def preset_of(label: str, preset: Preset) -> Preset:
    """The preset of a row: only DeepSpeed's file can pin what makes rows differ; others are as Accelerate has
    them."""
    is_zero = exported_strategy(label).zero_stage is not None
    return registry.preset_of(label, preset) if is_zero else "library-defaults"


def variables(label: str, device: str) -> dict[str, str]:
    """What Accelerate 1.15 needs on the CPU beside its file: DDP this variable, DeepSpeed our hook's."""
    if device != "cpu":
        return {}
    own = {"ACCELERATE_USE_CPU": "true"} if exported_strategy(label).zero_stage is None else {GLOO: "1"}
    return own | {"CUDA_VISIBLE_DEVICES": ""}


def why_not(label: str, world_size: int, device: str) -> str | None:
    """Why Accelerate does not run this strategy here; None: it does."""
    world = World.planned(world_size, world_size, device)
    return why_not_planned(f"{ROUTE}{label}", load_experiment(None, ()).job(), world, 1)


def accelerate_launch(
    label: str, folder: Path, base: Record | None, given: StrategyFile | None = None, *, world_size: int,
    device: str, preset: Preset,
) -> list[str]:  # fmt: skip
    """Writes the configuration of the row into the folder; the words that start a script with it. Raises
    Unsupported for what Accelerate does not run here.

    base: the first row that trained: its clipping, precision and batch are DeepSpeed's too, whose file must
    name them; None: this is that row. given: what the row is told as it is, but for the number of ranks.
    """
    if why := why_not(label, world_size, device):
        raise Unsupported(why)
    job = _job_of(base)
    values = accelerate_values(label, job, world_size, device) | {"main_process_port": 0}
    values.pop("mixed_precision", None)  # the script's own
    if given is not None:
        own = {"distributed_type", "deepspeed_config", "fsdp_config"}
        values = {**given.values, **{key: value for key, value in values.items() if key not in own}}
    elif exported_strategy(label).zero_stage is not None:
        effective = base.backend.effective if base else None
        layout = BatchLayout(
            global_batch_size=1,
            micro_batch_size=base.world.micro_batch_size if base else 1,
            accumulation_steps=base.world.accumulation_steps if base else 1,
        )
        count = effective.parameter_count if effective else MANY_PARAMETERS
        config = deepspeed_values(label, job, layout, world_size, device, count, preset)
        config["zero_allow_untested_optimizer"] = True  # the script's own, judged by what it does
        if base is None:
            config["gradient_clipping"] = "auto"
        if base is None or TRAINER in " ".join(base.observation.frameworks if base.observation else []):
            config |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        file = folder / "ds_config.json"
        write_atomically(file, json.dumps(config, indent=1))
        values["deepspeed_config"]["deepspeed_config_file"] = str(file)
    elif "fsdp_config" in values:
        del values["fsdp_config"]["fsdp_activation_checkpointing"]
    path = folder / "accelerate.yaml"
    write_atomically(path, yaml.safe_dump(values))
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]


def _job_of(base: Record | None) -> Job:
    """A job with the settings that the first row was seen to have."""
    if base is None:
        return load_experiment(None, ()).job()
    seen = base.job.training
    clipping = c if (c := seen.gradient_clipping) and 0 < c < inf else "null"
    given = (f"training.precision={seen.precision or 'fp32'}", f"training.gradient_clipping={clipping}")
    return load_experiment(None, given).job()
