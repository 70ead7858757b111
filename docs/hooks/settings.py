"""The reference of settings, from the models that read configuration files."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from docs.hooks.tables import code, table
from harness.job.experiment import Experiment
from harness.job.job import SettingsSection
from harness.job.reference import bounds, in_words, models_within, section_model, unit, yaml_value

TITLE = "Settings"
HEAD = """\
# Settings

Generated from `harness/job`. A configuration file has these sections; every setting is optional, and unknown
ones are refused. `--set section.key=value` overrides a file; the value is YAML, such as
`--set training.gradient_clipping=null`. The sections from `task` to `evaluation` are the job: a change there
makes another job, whose losses are not compared.
"""


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as `section.key`, with its field."""
    for section, field in Experiment.model_fields.items():
        model = section_model(field)
        if model is None:
            yield section, field
            continue
        for key, setting in model.model_fields.items():
            yield f"{section}.{key}", setting


def settings_page() -> str:
    """The page in Markdown: one table a section."""
    parts = [HEAD]
    for section, field in Experiment.model_fields.items():
        model = section_model(field)
        named = {f"{section}.{key}": found for key, found in model.model_fields.items()} if model else {}
        for name, setting in [*named.items()]:
            # Settings of each item of a list follow the list.
            for item in models_within(setting.annotation):
                inner = item.model_fields if issubclass(item, SettingsSection) else {}
                named |= {f"{name}[].{key}": found for key, found in inner.items()}
        rows = [setting_row(name, setting) for name, setting in (named or {section: field}).items()]
        head = ["setting", "type", "default", "unit", "meaning"]
        parts += [f"## {section}", (model.__doc__ if model else None) or "", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def setting_row(name: str, setting: FieldInfo) -> list[str]:
    """Cells of a key of a file: name, type, default, unit, meaning."""
    default = setting.get_default(call_default_factory=True)
    return [
        code(name),
        " ".join(part for part in (in_words(setting.annotation), bounds(setting.metadata)) if part),
        "required" if setting.is_required() else code(yaml_value(default)),
        unit(name),
        setting.description or "",
    ]
