"""Values that a person types: read as YAML with the numbers of YAML 1.2, and never bent into another type."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class TypedValues(BaseModel):
    """Settings that a person gives: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1: a slip would become a job of one step."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("this setting is neither true nor false")
        return value


class ValueLoader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; a person means a number. A key that stands twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{key.value}' stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


ValueLoader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ValueLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_value(text: str) -> Any:
    """The value that `text` spells. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=ValueLoader)
