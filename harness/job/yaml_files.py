"""YAML files that a user writes, checked against a model with one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.backends.refusals import explain_refusal
from harness.backends.yaml_values import InvalidYaml, parse_value
from harness.errors import HarnessError
from harness.files import read_settings

Model = TypeVar("Model", bound=BaseModel)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises HarnessError that begins with `where`."""
    try:
        return parse_value(text)
    except InvalidYaml as error:
        raise HarnessError(f"{where} {error}") from error


def read_yaml_file(path: Path, what: str, model: type[Model], must_be: str) -> Model:
    """Read and validate; `what` names the kind of file and `must_be` the mapping that it should hold.

    Raises HarnessError naming the file, what was given and what is allowed.
    """
    document = parse_yaml(read_settings(path, what), f"{what} {path}")
    if not isinstance(document, dict):
        raise HarnessError(f"{what} {path} must be {must_be}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise HarnessError(f"{what} {path}: {explain_refusal(error, model)}") from error
