"""Every command, option, setting and field of a record stands in the generated pages, with its meaning."""

from dataclasses import fields

import click
from pydantic import TypeAdapter

from docs.hooks.api import TOPICS, api_page
from docs.hooks.backends import backends_page
from docs.hooks.commands import commands, commands_page
from docs.hooks.records import meaning, models, record_fields, records_page
from docs.hooks.settings import settings, settings_page
from harness.backends.registry import BUILT_IN
from harness.cli import COMMANDS
from harness.job.experiment import Experiment
from harness.job.reference import in_words, models_within, section_model, unit
from harness.record import Record
from harness.record.measured import MemoryPart, StepPart


def section(page: str, heading: str) -> str:
    """The text between a heading of the second level and the next."""
    _, found, rest = page.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def test_every_command_has_its_options_and_their_help() -> None:
    page = commands_page()
    listed = dict(commands())
    assert {words.split()[1] for words in listed} == set(COMMANDS)
    for words, command in listed.items():
        text = section(page, words)
        assert words in text
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for name in parameter.opts:
                    assert f"`{name}`" in text, (words, name)
                assert (parameter.help or "").replace("|", "\\|") in text
            if isinstance(parameter, click.Argument):
                assert parameter.human_readable_name in text, (words, parameter.name)


def test_hidden_commands_are_left_out() -> None:
    assert "harness slurm render" in dict(commands())
    assert "harness slurm begin" not in dict(commands())


def test_every_setting_has_its_default_and_meaning() -> None:
    page = settings_page()
    names = [name for name, _ in settings()]
    assert len(names) == sum(
        len(TypeAdapter(field.annotation).json_schema().get("properties", ["one value"]))
        for field in Experiment.model_fields.values()
    )
    for name, field in settings():
        assert field.description, name
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert " ".join(field.description.split()).replace("|", "\\|") in row


def test_settings_show_type_bounds_and_unit() -> None:
    (row,) = (
        line for line in settings_page().splitlines() if line.startswith("| `runtime.threads_per_rank`")
    )
    assert row.split(" | ")[1] == "integer (> 0) or null (≤ 1024)"
    name = "| `runtime.phase_timeout_seconds`"
    (row,) = (line for line in settings_page().splitlines() if line.startswith(name))
    assert row.split(" | ")[2:4] == ["`570.0`", "s"]


def test_every_field_of_a_record_has_a_meaning() -> None:
    page = records_page()
    for model in models():
        text = section(page, model.__name__)
        for name, annotation, _ in record_fields(model):
            assert f"| `{name}` |" in text, (model, name)
            assert meaning(model, name, annotation), (model, name)


def test_the_page_follows_a_record_into_all_its_parts() -> None:
    assert {Record, MemoryPart, StepPart} <= set(models())
    assert [name for name, *_ in record_fields(StepPart)] == [field.name for field in fields(StepPart)]
    definitions = TypeAdapter(Record).json_schema()["$defs"]
    sections = [model for field in Experiment.model_fields.values() if (model := section_model(field))]
    inner = [field.annotation for section in sections for field in section.model_fields.values()]
    settings_models = {model.__name__ for kind in (*sections, *inner) for model in models_within(kind)}
    assert {model.__name__ for model in models()} >= definitions.keys() - settings_models - {"Job"}


def test_words_for_types_and_units() -> None:
    assert in_words(dict[str, list[float] | None]) == "text → list of number or null"
    assert unit("all_reduce_bus_bytes_per_second") == "bytes/s"
    assert unit("step_seconds") == "s"
    assert unit("samples") == ""


def test_the_api_page_names_modules_that_exist() -> None:
    from importlib.util import find_spec

    for module in (name for modules in TOPICS.values() for name in modules):
        assert find_spec(module), module
        assert f"::: {module}\n" in api_page()


def test_every_backend_has_its_options_with_a_meaning() -> None:
    page = backends_page()
    for name, entry in BUILT_IN.items():
        text = section(page, name)
        for option, field in entry.options_class().model_fields.items():
            assert f"| `{option}` |" in text, (name, option)
            assert field.description, (name, option)
