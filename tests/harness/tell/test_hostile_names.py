"""Names of models, data and files are text in every format, whatever characters they hold."""

import csv
import html.parser
import importlib
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.record import EnvironmentPart
from harness.record.store import write_record
from harness.safe_text import harmless
from harness.tell import first_page
from harness.tell.before_after import before_after
from harness.tell.document import Column, Document, Section, Table
from harness.tell.first_page import short_document
from harness.tell.pictures.drawing import draw
from harness.tell.report import SECTIONS, Run, details_document, without_odd_runs, write_report
from harness.tell.sections.amounts import pipeline_section
from harness.tell.verify import verify
from harness.tell.writers.html import render_html
from harness.tell.writers.text import render_csv, render_details, render_json, render_markdown
from tests.harness.tell.hostile import NAMES, hostile_records
from tests.pipelines import make_pipeline
from tests.records import ENVIRONMENT, changed, make_record
from tests.representatives import first

pytestmark = pytest.mark.long(seconds=30)

HOSTILE_FILE = "a|b`c`<b>\n$d$ 模型 %20 \"e\" 'f' (g) [h] {i} #j \\k &amp;"
KINDS = ("comparison", "baseline")


@cache
def document(name: str, kind: str) -> Document:
    comparison = Comparison(hostile_records(name))
    if kind == "comparison":
        return short_document(comparison, "all", details_document(comparison))
    kept = [record for record in hostile_records(name) if record.run_id != "third"]
    environment = EnvironmentPart.model_validate(ENVIRONMENT)
    changed = [record.model_copy(update={"environment": environment}) for record in kept]
    return before_after(comparison, Comparison(changed))


@cache
def report(name: str, form: str, kind: str = "comparison") -> str:
    """The text of a report; its pictures are not drawn."""
    shown = document(name, kind)
    pictures = {picture.key: "picture" for picture in shown.pictures()}
    match form:
        case "html":
            return render_html(shown, pictures, "manifest")
        case "md":
            text = render_markdown(shown, pictures, "manifest", "report.details.md")
            return text + (render_details(shown.details, pictures, "report.md") if shown.details else "")
        case "json":
            return render_json(shown, "manifest: {}")
        case _:
            return render_csv(shown, "manifest")[0]


FEW = ("a|b||c", "<script>alert(1)</script><b>x</b>", "=1+1", "- [ ] todo", "a_b*c*d_e")
"""Beginnings of names: a table's bar, HTML, a formula, a list and emphasis of Markdown."""


@pytest.fixture(params=first([n for n, name in enumerate(NAMES) if name.startswith(FEW)], range(len(NAMES))))
def name(request: pytest.FixtureRequest) -> str:
    return NAMES[request.param]


class Tags(html.parser.HTMLParser):
    """Tags and text of a document, the names of their attributes, and where links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.parts: set[tuple[str, ...]] = set()
        self.links: list[str | None] = []
        self.open: list[str] = []
        self.text = ""
        self.is_sound = True
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.parts.add((tag, *(key for key, _ in attributes)))
        self.links += [value for key, value in attributes if key in ("href", "src")]
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.is_sound &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of a first page are cut by their words, and a name of many words would cut another place."""
    for limit in ("MOST_WORDS", "MOST_WORDS_CHECK", "MOST_WORDS_FINDING"):
        monkeypatch.setattr(first_page, limit, 10**6)


def visible(name: str) -> str:
    """The name as a writer shows it on one line."""
    flat = " ".join(name.split())
    return "".join("\ufffd" if c in "\u202e\u2066\x00\x07" else c for c in flat)


def test_html_has_no_tag_that_a_name_brought_and_shows_the_name(name: str, kind: str) -> None:
    tags, harmless = (Tags(report(of, "html", kind)) for of in (name, "plain"))
    assert tags.tags == harmless.tags
    assert tags.is_sound
    assert tags.open == []
    assert visible(name) in tags.text


def test_markdown_rows_keep_their_columns_and_html_stays_text(name: str, kind: str) -> None:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(report(name, "md", kind))
    harmless = parser.parse(report("plain", "md", kind))

    def shape(of: list) -> list[str]:  # type: ignore[type-arg]
        kinds = ("fence" if token.content.startswith("<pre>") else token.type for token in of)
        return [kind for kind in kinds if kind not in ("inline", "text")]

    assert shape(tokens) == shape(harmless)
    inline = [child for token in tokens for child in token.children or [] if token.type == "inline"]
    plain = [child for token in harmless for child in token.children or [] if token.type == "inline"]
    kinds = ("html_inline", "link_open", "em_open", "strong_open", "code_inline", "image", "s_open")
    for kind in kinds:
        assert sum(c.type == kind for c in inline) == sum(c.type == kind for c in plain), kind
    cells = "".join(child.content for child in inline if child.type == "text")
    assert visible(name).replace(" ", "") in cells.replace(" ", "")


LIVE = [name for name in NAMES if "alert(" in name or "-->" in name or "todo" in name]
"""Of the names, those that one of these readers once took for markup."""
OF_CODE = {("pre",), ("code",), ("p",), ("br",)}
"""Code without a language, as follows where a name in it needs that."""


@pytest.mark.parametrize("extensions", [[], ["extra", "toc", "admonition"]])
@pytest.mark.parametrize("name", LIVE)
def test_markdown_stays_text_under_python_markdown(name: str, extensions: list[str]) -> None:
    import markdown

    found, harmless = (
        Tags(markdown.markdown(report(of, "md"), extensions=extensions)) for of in (name, "plain")
    )
    assert found.parts - harmless.parts <= OF_CODE
    assert found.links == harmless.links


def test_markdown_stays_text_where_no_html_is_allowed(name: str) -> None:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("js-default")
    found, harmless = (Tags(parser.render(report(of, "md"))) for of in (name, "plain"))
    assert found.parts - harmless.parts <= OF_CODE
    assert found.links == harmless.links


WRITTEN_OUT = {
    f"{scheme}example.org{page}" for scheme in ("http://", "http://www.", "mailto:a@") for page in ("", "/x")
}
"""Where addresses in the names lead that GitHub makes links of; each shows where it leads."""


@pytest.mark.parametrize("kind", KINDS)
def test_markdown_stays_text_on_github(name: str, kind: str) -> None:
    from cmarkgfm import markdown_to_html_with_extensions
    from cmarkgfm.cmark import Options

    options = Options.CMARK_OPT_UNSAFE | Options.CMARK_OPT_FOOTNOTES  # HTML as it stands there
    extensions = ["table", "autolink", "strikethrough", "tasklist"]
    found, harmless = (
        Tags(markdown_to_html_with_extensions(report(of, "md", kind), options, extensions))
        for of in (name, "plain")
    )
    assert found.parts - harmless.parts <= OF_CODE | {("a", "href")}
    assert {str(link).lower() for link in found.links if link not in harmless.links} <= WRITTEN_OUT


def test_csv_reads_back_as_written(name: str) -> None:
    lines = list(csv.DictReader(io.StringIO(report(name, "csv"), newline="")))
    assert lines[1]["backend"] == harmless(f"ddp:{name}")
    assert not any(value.startswith("=") for value in lines[1].values() if value)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "plain"])
def test_no_text_of_a_csv_file_is_a_formula_and_numbers_stay(text: str) -> None:
    table = Table(
        key="results", columns=[Column("text", "text"), Column("number", "number")], rows=[[text, -1]]
    )
    main, _ = render_csv(Document("Title", [Section("part", "Part", [table])]), "manifest")
    shown, number = list(csv.reader(io.StringIO(main, newline="")))[1]
    assert shown == (text if text == "plain" else f"'{text}")
    assert number == "-1"


@pytest.mark.parametrize("name", ["\x1b[2J", "bell\x07", "\u202ereversed", "\x9b31m", "line\u2028end"])
@pytest.mark.parametrize("form", ["csv", "json", "html"])
def test_programs_get_no_control_character(form: str, name: str) -> None:
    texts = [report(name, form), *render_csv(document(name, "comparison"), "")[1].values()]
    assert not any(re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text) for text in texts)
    assert form == "html" or harmless(name) in texts[0]


def test_json_reads_back_as_written(name: str) -> None:
    content = json.loads(report(name, "json"))
    tables = [b for s in content["details"]["sections"] for b in s["blocks"] if b["kind"] == "table"]
    assert next(t for t in tables if t["key"] == "results")["rows"][1]["backend"] == f"ddp:{name}"


@pytest.mark.parametrize("text", ["\x1b[2J", "bell\x07", "zero\0", "\ufffe"])
def test_picture_spells_out_what_xml_cannot_hold(text: str) -> None:
    (picture,) = [p for p in document("plain", "comparison").pictures() if p.key == "loss"]
    root = ElementTree.fromstring(draw(replace(picture, alt=text), heading=text))
    assert harmless(text) in "".join(root.itertext())


def test_picture_is_well_formed_and_shows_the_name(name: str) -> None:
    (picture,) = [p for p in document(name, "comparison").pictures() if p.key == "loss"]
    root = ElementTree.fromstring(draw(picture))
    text = "".join(root.itertext())
    assert visible(name)[:10].strip() in text


def test_the_section_of_pipelines_prints_the_name() -> None:
    """Of names only labels stand in it, as in every other section."""
    section = pipeline_section(Comparison([changed(make_pipeline(), backend={"label": "pp:n-a-m-e"})]))
    assert section is not None
    assert "n-a-m-e" in render_json(Document("", [section]), "manifest: {}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_section_is_there_and_prints_the_name(kind: str) -> None:
    """What is missing here is not tried by the tests above."""
    shown = document("n-a-m-e", kind)
    sections = (shown.details or shown).sections
    assert kind == "baseline" or len(sections) == len(SECTIONS) - 1  # pipelines: below
    without = [s.key for s in sections if "n-a-m-e" not in render_json(Document("", [s]), "manifest: {}")]
    assert without == ["reading"]


@pytest.mark.costly
def test_report_with_all_names_at_once_is_verified(tmp_path: Path) -> None:
    runs = []
    for number, record in enumerate(hostile_records("".join(NAMES))):
        directory = tmp_path / "runs" / f"{number} {HOSTILE_FILE}"
        directory.mkdir(parents=True)
        runs.append((write_record(directory, record), record))
    for suffix in ("md", "html", "csv", "json"):
        for baseline in ([], runs) if suffix == "html" else ([],):
            written = write_report(
                runs, tmp_path / f"{HOSTILE_FILE}{len(baseline)}.{suffix}", baseline=baseline
            )
            assert [str(problem) for problem in verify(written).problems] == []


def test_every_picture_is_well_formed_with_all_names_at_once() -> None:
    pictures = document("".join(NAMES), "comparison").pictures()
    keys = [picture.key for picture in pictures]
    assert keys == ["memory", "communication", "loss", "throughput", "trade-off", "strong-scaling"]
    for picture in pictures:
        ElementTree.fromstring(draw(picture))


RUNS: list[Run] = [(Path(name), make_record(run_id=name)) for name in ("a", "b", "c")]


def names(runs: Sequence[Run]) -> list[str]:
    return [record.run_id for _, record in runs]


def test_sound_runs_all_stay() -> None:
    assert without_odd_runs(RUNS, names) == (RUNS, [])


def test_run_that_fails_by_itself_is_left_out_by_name() -> None:
    def trial(runs: Sequence[Run]) -> None:
        if "b" in names(runs):
            raise TypeError("odd")

    sound, problems = without_odd_runs(RUNS, trial)
    assert names(sound) == ["a", "c"]
    assert problems == ["record b is valid but cannot be shown: TypeError: odd"]


def test_run_that_fails_only_next_to_others_is_left_out() -> None:
    def trial(runs: Sequence[Run]) -> None:
        if "b" in names(runs) and len(runs) > 1:
            raise ZeroDivisionError("odd")

    assert names(without_odd_runs(RUNS, trial)[0]) == ["a", "c"]


def test_if_nothing_can_be_shown_that_is_an_error() -> None:
    def trial(runs: Sequence[Run]) -> None:
        raise MemoryError("much")

    with pytest.raises(HarnessError, match="no record can be shown: MemoryError: much"):
        without_odd_runs(RUNS, trial)


def test_a_library_that_is_missing_is_no_fault_of_records() -> None:
    with pytest.raises(ModuleNotFoundError):
        without_odd_runs(RUNS, lambda _: importlib.import_module("no_such_library"))
