"""Values that a person types: read as YAML 1.2, and never bent into another type."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from harness.bounds import LARGEST_NUMBER, MOST_DEPTH, MOST_VALUES


class TypedValues(BaseModel):
    """Settings that a person gives: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _values_keep_their_type(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, a slip that would become a job of one step, and 'none' as a name."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise ValueError(f"this number is too large; at most {LARGEST_NUMBER} is read")
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("this setting is neither true nor false")
        if value in ("none", "None") and annotation == str | None:
            raise ValueError("write null for no value")
        return value


_TOO_MANY = f"holds more than {MOST_VALUES:,} values, or an alias that contains itself"


class InvalidYaml(ValueError):
    """Says in one line where a text stops being YAML, and why."""


def parse_value(text: str) -> Any:
    """The value that `text` spells in YAML 1.2: `1e-3` is a number, `no` a text. Raises InvalidYaml.

    Tags that would build objects and keys that stand twice are refused.
    """
    from ruamel.yaml import composer
    from ruamel.yaml.error import YAMLError

    # ruamel.yaml before 0.19 has no limit of its own: Python's is met.
    too_deep = getattr(composer, "MaxDepthExceededError", RecursionError)
    try:
        value = _bounded_yaml().load(text)
    except (RecursionError, too_deep) as error:
        raise InvalidYaml("is nested too deeply") from error
    except InvalidYaml:
        raise
    except ValueError as error:
        raise InvalidYaml(f"holds a value that cannot be read: {error}") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        # Of a duplicate key ruamel.yaml also shows both values, before it has read them.
        raise InvalidYaml(f"is not valid YAML{line}: {problem.partition(' with value ')[0]}") from error
    require_bounded(value)
    return value


def _bounded_yaml() -> Any:
    """A reader that stops at the first value too many: ruamel.yaml needs about 50 microseconds for each."""
    from ruamel.yaml import YAML
    from ruamel.yaml.composer import Composer

    class BoundedComposer(Composer):
        def __init__(self, loader: Any = None) -> None:
            super().__init__(loader)
            self.warn_double_anchors = False
            self.nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            if self.nodes > MOST_VALUES:
                raise InvalidYaml(_TOO_MANY)
            return super().compose_node(parent, index)

    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = BoundedComposer
    yaml.max_depth = MOST_DEPTH
    return yaml


def require_bounded(value: Any) -> None:
    """Raise InvalidYaml for aliases that contain themselves or multiply, and for integers beyond 64 bits."""
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise InvalidYaml(_TOO_MANY)
        if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
            raise InvalidYaml(f"holds a number that is too large; at most {LARGEST_NUMBER} is read")
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            waiting += item
