"""What the site consists of: navigation, links, generated pages and tables. `make docs` builds it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args
from urllib.parse import urlsplit

import click
import pytest
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from docs.hooks import api
from docs.hooks.api import columns
from docs.hooks.commands import commands
from docs.hooks.hooks import FOLDED, GENERATED
from docs.hooks.offline import loaded_from_elsewhere
from docs.hooks.pairs import LABELS, pairs_table
from docs.hooks.records import meaning, models, record_fields
from docs.hooks.settings import settings, settings_page
from docs.hooks.site_file import site_table
from docs.hooks.tree import report_nav, site_files
from harness.api import Kind, load
from harness.backends import registry
from harness.backends.registry import BUILT_IN
from harness.cli import COMMANDS
from harness.job.experiment import Experiment
from harness.job.reference import in_words, models_within, section_model, unit
from harness.plan.hardware import load_hardware
from harness.plan.models import catalogue_names
from harness.record import Record
from harness.record.measured import MemoryPart, StepPart
from harness.slurm.matrix import Site
from tests.docs.markdown import FILES, NAMES, ROOT, generated, links


def pages(nav: list[Any]) -> Iterator[str]:
    """The pages that the navigation names."""
    for entry in nav:
        for item in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(item) if isinstance(item, list) else [item]


@pytest.fixture(scope="module")
def named() -> list[str]:
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [*pages(nav), *pages(report_nav())]


def test_every_page_is_in_the_navigation_once(named: list[str]) -> None:
    assert len(named) == len(set(named))
    written = {name for name in NAMES if not name.startswith("reports/")}
    assert {name for name in named if not name.startswith("reports/")} == written | GENERATED.keys()


def test_contributors_find_the_subject_of_every_page() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| subject | page |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]
    elsewhere = ("reports/", "docs/labs/")
    pages_of_a_subject = sorted(name for name in NAMES if not name.startswith(elsewhere))
    assert sorted(row.split("`")[1] for row in rows) == pages_of_a_subject


def test_every_report_is_in_the_navigation_or_linked_from_a_page_that_is(named: list[str]) -> None:
    reached = {name for name in named if name.startswith("reports/")}
    for name in list(reached):
        folder = (ROOT / name).parent
        reached |= {
            (folder / target.partition("#")[0]).resolve().relative_to(ROOT).as_posix()
            for target in links(ROOT / name)
            if "://" not in target
        }
    assert {name for name in NAMES if name.endswith("/report.md")} <= reached


def test_the_site_has_every_file_once_and_none_that_git_ignores() -> None:
    files = list(site_files())
    assert len(files) == len(set(files))
    assert set(NAMES) <= set(files)
    assert not [name for name in files if name.startswith(("runs/", "site/", ".venv/"))]


def test_what_reports_fold_is_parsed() -> None:
    folded = FOLDED.sub('<details markdown="1">', "a\n\n<details><summary>b</summary>\n")
    assert folded == 'a\n\n<details markdown="1"><summary>b</summary>\n'


def test_the_example_of_the_python_interface_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(api.HEAD.partition("```python\n")[2].partition("```")[0], {})
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("zero3 2 ") for line in lines)


@pytest.mark.parametrize(
    ("page", "marks", "table"),
    [("docs/job-axes.md", "pairs", pairs_table), ("slurm/README.md", "keys", site_table)],
)
def test_a_generated_table_is_up_to_date(
    page: str, marks: str, table: Callable[[], str], update_golden: bool
) -> None:
    begin, end = f"<!-- {marks} -->\n", f"<!-- end of {marks} -->"
    assert generated(ROOT / page, begin, end, table(), update=update_golden).strip() == table().strip()


def test_every_strategy_whose_ranks_share_samples_has_a_column() -> None:
    sharing = {name for name in registry.BUILT_IN if registry.mesh_of(name, 4).shares_samples}
    assert set(LABELS) == sharing


def test_no_link_leads_to_a_page_that_only_the_site_has_or_to_no_web_address() -> None:
    """`make docs` finds what else is broken."""
    for path in FILES:
        for target in links(path):
            address = urlsplit(target)
            if address.scheme:
                assert address.scheme in ("http", "https"), (path, target)
                assert "." in address.netloc, (path, target)
                assert " " not in target, (path, target)
            else:
                assert (path.parent / address.path).resolve() not in {ROOT / name for name in GENERATED}


def page(name: str) -> str:
    """Its text on one line, without the marks of quotations."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").replace("\n> ", "\n").split())


def test_the_catalogue_has_as_many_entries_as_the_text_says() -> None:
    hardware, models = load_hardware(), len(catalogue_names())
    sizes = f"{models} public models on {len(hardware.devices)} GPUs and {len(hardware.fabrics)} networks"
    assert sizes in page("CHANGELOG.md")
    assert f"lists {models} public models" in page("docs/planning.md")


def test_every_page_has_the_accumulation_of_the_recommended_command() -> None:
    """4,096 tokens a sample on 64 GPUs."""
    answered = re.search(r"-> Use zero1, micro-batch 1, accumulation (\d+): ", page("README.md"))
    assert answered
    steps = int(answered[1])
    assert f"`zero1`: {steps} micro-steps of one sample fit" in page("docs/which-strategy.md")
    assert f"at {steps * 64 * 4096 / 1e6:.1f} million tokens per step" in page("docs/planning.md")


def test_every_command_setting_and_field_is_listed_with_a_meaning() -> None:
    listed = dict(commands())
    assert "harness slurm render" in listed
    assert "harness slurm begin" not in listed
    assert {words.split()[1] for words in listed} == set(COMMANDS)
    assert len(list(settings())) == sum(
        len(TypeAdapter(field.annotation).json_schema().get("properties", ["one value"]))
        for field in Experiment.model_fields.values()
    )
    options = [option for entry in BUILT_IN.values() for option in entry.options_class().model_fields.items()]
    meanings = [
        *(((words, option.name), option.help) for words, command in listed.items()
          for option in command.params if isinstance(option, click.Option) and not option.hidden),
        *((name, field.description) for name, field in (*settings(), *options, *Site.model_fields.items())),
        *(((model, name), meaning(model, name, annotation))
          for model in models() for name, annotation, _ in record_fields(model)),
    ]  # fmt: skip
    assert [name for name, said in meanings if not said] == []


def test_settings_show_type_bounds_and_unit() -> None:
    (row,) = (
        line for line in settings_page().splitlines() if line.startswith("| `runtime.threads_per_rank`")
    )
    assert row.split(" | ")[1] == "integer (> 0) or null (≤ 1024)"
    name = "| `runtime.phase_timeout_seconds`"
    (row,) = (line for line in settings_page().splitlines() if line.startswith(name))
    assert row.split(" | ")[2:4] == ["`570.0`", "s"]


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


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_column_of_a_frame_has_a_meaning(kind: Kind) -> None:
    frame = load(ROOT / "reports" / "explain-clipping").to_frame(kind)
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", columns()[kind], re.MULTILINE))
    assert set(frame.columns) <= rows.keys()
    assert all(rows.values())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('<script defer src="https://a.b/c.js"></script>', 1),
        ('<link rel="stylesheet" href="//a.b/c.css">', 1),
        ('<link href="https://a.b/f" rel="preconnect">', 1),
        ("<img alt='x' src='http://a.b/c.png'>", 1),
        ('@import "https://a.b/c.css";', 1),
        ("src: url(https://a.b/c.woff2)", 1),
        ('<a href="https://a.b/c">c</a>', 0),
        ('<link rel="canonical" href="https://a.b/c.html">', 0),
        ('<script src="assets/a.js"></script>', 0),
        ("url(data:image/svg+xml;charset=utf-8,<svg xmlns='http://www.w3.org/2000/svg'/>)", 0),
    ],
)
def test_what_a_network_would_serve_is_named_and_nothing_else(text: str, count: int) -> None:
    assert len(loaded_from_elsewhere(text)) == count
