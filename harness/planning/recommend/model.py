"""The model of a recommendation, and the settings that run it."""

from __future__ import annotations

import json
from pathlib import Path

from harness.errors import HarnessError
from harness.planning.model import PlannedModel
from harness.planning.models import NOT_COVERED, find_entry, load_model

EXPERTS = "mixture of experts"


def find_model(text: str) -> PlannedModel:
    """The model that `--model` names. Raises HarnessError; for a mixture of experts it names the tool."""
    if not Path(text).exists():
        name, entry = find_entry(text)
        if EXPERTS in str(entry.get(NOT_COVERED, "")):
            raise HarnessError(
                f"{name} is a mixture of experts: expert parallelism is called for, which puts experts on "
                "different GPUs; recommend covers data parallelism of dense models"
            )
    return load_model(text)


def model_settings(text: str) -> tuple[str, ...]:
    """Assignments for `--set` that make a job of the same model with random weights; no hub is needed."""
    path = Path(text)
    if path.is_dir():
        return (f"model.name={text}", "model.weights=random")
    config = json.dumps(load_model(text).config, default=str) if path.is_file() else _of_catalogue(text)
    return (f"model.config={config}",)


def _of_catalogue(text: str) -> str:
    return json.dumps(find_entry(text)[1]["config"])
