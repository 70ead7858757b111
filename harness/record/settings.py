"""The settings of a recorded run. Reading them never fails because a later version allows less."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from harness.job.experiment import MeasureSection
from harness.job.job import Job, SettingsSection

Settings = TypeVar("Settings", bound=SettingsSection)


def _as_recorded(kind: type[Settings]) -> WrapValidator:
    def read(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            return value if isinstance(value, kind) else _unchecked(kind, value)

    return WrapValidator(read)


def _unchecked(kind: type[BaseModel], value: Any) -> BaseModel:
    """The settings as they stand, with defaults for those that are missing; an unknown one is refused.

    None, whatever the type, is what was not seen of an observed script.
    """
    if not isinstance(value, dict):
        raise PydanticCustomError("settings", "these are not settings")
    unknown = sorted(value.keys() - kind.model_fields.keys())
    if unknown:
        raise PydanticCustomError("settings", "setting '{name}' is unknown", {"name": unknown[0]})
    for name, item in value.items():
        if item is not None and not isinstance(item, _types(kind.model_fields[name].annotation)):
            raise PydanticCustomError("settings", "setting '{name}' has another type", {"name": name})
    sections: dict[str, Any] = {
        name: _unchecked(annotation, item)
        if item is not None
        and isinstance(annotation := kind.model_fields[name].annotation, type)
        and issubclass(annotation, BaseModel)
        else item
        for name, item in value.items()
    }
    return kind.model_construct(**sections)


def _types(annotation: Any) -> tuple[type, ...]:
    """What JSON can hold for an annotation, whatever bounds and choices it has."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _types(inside[0])
    if origin in (Union, UnionType):
        return tuple({kind for part in inside for kind in _types(part)})
    if origin is Literal:
        return (str, bool, int, float, NoneType)  # earlier versions had switches where there are choices now
    kind = origin or annotation
    if kind is float:
        return (float, int)
    if kind in (bool, int, str, NoneType, list, dict):
        return (kind,)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return (dict,)
    return (object,)


def seen_job(seen: Mapping[str, Any]) -> Job:
    """A job of which only these settings are known, such as {'training.precision': 'fp32'}.

    All others are None, whatever their type says: what is not known of an observed script is not guessed.
    """
    sections: dict[str, Any] = {}
    for name, field in Job.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            values = {key: seen.get(f"{name}.{key}") for key in section.model_fields}
            sections[name] = section.model_construct(**values)
        else:
            sections[name] = seen.get(name)
    return Job.model_construct(**sections)


RecordedJob = Annotated[Job, _as_recorded(Job)]
RecordedMeasure = Annotated[MeasureSection, _as_recorded(MeasureSection)]
