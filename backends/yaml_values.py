"""Values that YAML 1.2 spells: nothing nested too deeply, too large or twice; objects are never built."""

from __future__ import annotations

from typing import Any

from harness.bounds import LARGEST_NUMBER, MOST_DEPTH, MOST_VALUES

MERGE = "tag:yaml.org,2002:merge"
"""Of the key `<<`, which copies the pairs of other mappings before any value is built."""
_TOO_MANY = f"holds more than {MOST_VALUES:,} values"


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
            self.values = 0
            self.pairs: dict[Any, int] = {}
            """Of each mapping, with those that it merges from others."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            self._count(1)
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            merged = [value for key, value in node.value if key.tag == MERGE]
            maps = [one for value in merged for one in (value.value if value.id == "sequence" else [value])]
            self.pairs[node] = len(node.value) + (more := sum(self.pairs.get(one, 0) for one in maps))
            self._count(more)
            return node

        def _count(self, values: int) -> None:
            self.values += values
            if self.values > MOST_VALUES:
                raise InvalidYaml(_TOO_MANY)

    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = BoundedComposer
    yaml.max_depth = MOST_DEPTH
    return yaml


def require_bounded(value: Any) -> None:
    """Raise InvalidYaml for depth, aliases that contain themselves or multiply, integers beyond 64 bits."""
    waiting, seen = [(value, 1)], 0
    while waiting:
        item, depth = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise InvalidYaml(_TOO_MANY)
        if depth > MOST_DEPTH:
            raise InvalidYaml("is nested too deeply, or holds an alias that contains itself")
        if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
            raise InvalidYaml(f"holds a number that is too large; at most {LARGEST_NUMBER} is read")
        if isinstance(item, dict):
            item = [*item.keys(), *item.values()]
        if isinstance(item, list | tuple | set):
            waiting += [(inner, depth + 1) for inner in item]
