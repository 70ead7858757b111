"""Values that a person types, read as YAML with the numbers of YAML 1.2."""

from __future__ import annotations

import re
from typing import Any

import yaml


class ValueLoader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as text; a person means a number."""


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
