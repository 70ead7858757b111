"""The reference of backends and their options, from the registry."""

from __future__ import annotations

from docs.hooks.tables import code, table
from harness.backends import registry
from harness.backends.base import BackendOptions
from harness.job.reference import bounds, in_words, yaml_value

HEAD = """\
# Backends

Generated from the registry. Options follow a colon: `zero3:offload=cpu`, `fsdp-hybrid:shard_size=2`.
Every backend but `single` also takes `preset=`. `harness backends` lists those of other packages, too.
"""


def backends_page() -> str:
    """The page in Markdown: summary and options of each built-in backend."""
    parts = [HEAD]
    for name, entry in registry.BUILT_IN.items():
        parts += [f"## {name}", f"{entry.summary[:1].upper()}{entry.summary[1:]}."]
        rows = _options(entry.options_class())
        parts += [table(["option", "type", "default", "meaning"], rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def _options(options: type[BackendOptions]) -> list[list[str]]:
    return [
        [
            code(name),
            " ".join(part for part in (in_words(field.annotation), bounds(field.metadata)) if part),
            code(yaml_value(field.default)),
            field.description or "",
        ]
        for name, field in options.model_fields.items()
    ]
