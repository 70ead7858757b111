"""Renders and writes the report of a set of records. The same records give the same bytes.

A new section of the details is a function of a comparison and a line of `SECTIONS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from harness.bounds import MOST_REPORT_BYTES
from harness.errors import HarnessError
from harness.files import (
    read_plain,
    refusing,
    require_plain_output,
    stream_number,
    try_writing,
    write_all_atomically,
)
from harness.job.experiment import ReportFocus, speeds_are_asked
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.record.store import RECORD_NAME
from harness.safe_text import described
from harness.tell.document import Block, Document, Folded, Section, Table
from harness.tell.first_page import short_document, title
from harness.tell.manifest import Asked, Format, Manifest, digest, make_manifest, manifest_name, read_manifest
from harness.tell.pictures.drawing import draw
from harness.tell.sections import amounts, choice, job, results, time
from harness.tell.writers.html import data_address, render_html
from harness.tell.writers.text import render_csv, render_details, render_json, render_markdown

Maker = Callable[..., Section | None]
"""Of a comparison, and of what the question asks for where that matters."""
SECTIONS: tuple[Maker, ...] = (
    job.job_section,
    job.machine_section,
    job.measurement_section,
    results.results_section,
    choice.choice_section,
    job.not_comparable_section,
    results.loss_section,
    results.levels_section,
    amounts.memory_section,
    amounts.prediction_section,
    amounts.states_section,
    amounts.volume_section,
    amounts.communication_section,
    amounts.checkpoints_section,
    results.surprises_all_section,
    amounts.nodes_section,
    time.time_section,
    amounts.pipeline_section,
    time.energy_section,
    time.overlap_section,
    results.scaling_section,
    results.findings_section,
    results.failures_section,
    job.given_section,
    job.observed_section,
    job.presets_section,
    job.settings_section,
    results.reading_section,
    job.reproduce_section,
    job.configuration_section,
)

OF_EVERY_RUN = {
    job.job_section,
    job.not_comparable_section,
    results.scaling_section,
    results.findings_section,
    results.failures_section,
    job.given_section,
    job.observed_section,
    job.configuration_section,
}
"""Sections that look at each run by itself, or that leave out themselves what is not the same job. The
others compare runs, and get only comparable ones."""
OF_SPEED = {time.time_section, time.energy_section, time.overlap_section, results.scaling_section}
"""Sections that a report leaves out whose question is neither speed nor scaling."""
PICTURE_KEYS = (
    "throughput", "loss", "trade-off", "memory", "communication", "time", "overlap", "strong-scaling",
    "weak-scaling",
)  # fmt: skip
"""Of every picture that a report holds or held."""
LONGEST_OPEN_TABLE = 30
"""Lines of a table that stands open; the results always do."""


def details_document(comparison: Comparison, *last: Section, question: ReportFocus = "all") -> Document:
    """Everything about a comparison that its question asks for; `last` follows what is computed from it."""
    speeds = speeds_are_asked(question)
    given: dict[Maker, dict[str, Any]] = {
        choice.choice_section: {"question": question},
        results.results_section: {"speeds": speeds},
        results.reading_section: {"speeds": speeds},
    }
    made = [
        make(comparison if make in OF_EVERY_RUN else comparison.comparable, **given.get(make, {}))
        for make in SECTIONS
        if speeds or make not in OF_SPEED
    ]
    return Document("Details of the comparison", [*map(_folded, filter(None, made)), *last])


def _folded(section: Section) -> Section:
    return replace(section, blocks=[*map(_folded_if_long, section.blocks)])


def _folded_if_long(block: Block) -> Block:
    """A long table stands behind its name, so that what follows it is found."""
    if not isinstance(block, Table) or len(block.rows) <= LONGEST_OPEN_TABLE or block.key == "results":
        return block
    return Folded(f"{block.key.replace('_', ' ').capitalize()}: {len(block.rows)} lines", [block])


Run = tuple[Path, Record]
Images = Mapping[str, bytes]
"""Each picture by its key."""
SUFFIXES: dict[str, Format] = {
    ".md": "md", ".markdown": "md", ".html": "html", ".htm": "html", ".csv": "csv", ".json": "json",
}  # fmt: skip
WITH_PICTURES = ("md", "html")


class Rendered(NamedTuple):
    """A report as it is written: its text, and the files next to it by name."""

    text: str
    files: Mapping[str, bytes]


class Prepared(NamedTuple):
    """A report before it is written."""

    manifest: Manifest
    document: Document
    rendered: Rendered

    def write(self, output: Path) -> None:
        """Write it in place of the one that stands there."""
        output.parent.mkdir(parents=True, exist_ok=True)
        stale = _earlier_pictures(output, self.manifest)
        _write(self.rendered, output)
        for picture in stale:
            picture.unlink(missing_ok=True)


def write_report(
    runs: Sequence[Run], output: Path, *, form: Format | None = None, **asked: Unpack[Asked]
) -> Path:
    """Write the report and the files that belong to it, for /dev/stdout none; return the report's path.

    `form` None: it follows from the extension.
    """
    prepare_report(runs, output, form=form, **asked).write(output)
    return output


def _write(rendered: Rendered, output: Path) -> None:
    # A stream has no folder of its own, so the report's text alone goes there.
    files = {} if stream_number(output) is not None else rendered.files
    try:
        write_all_atomically(
            {output.parent / name: data for name, data in files.items()} | {output: rendered.text}
        )
    except OSError as error:
        raise HarnessError(f"report '{error.filename}' cannot be written: {error.strerror}") from error


def prepare_report(
    runs: Sequence[Run], output: Path, *, form: Format | None = None, **asked: Unpack[Asked]
) -> Prepared:
    """All that `write_report` writes, without writing it."""
    form = form or format_of(output)
    manifest = make_manifest(runs, output, form=form, **asked)
    given = (*asked.get("baseline", ()), *runs)
    records = {entry.path: r for entry, (_, r) in zip(manifest.records, given, strict=True)}
    document = make_document(manifest, records)
    images = draw_all(document, form)
    names = picture_names(images, output)
    pictures = {names[key]: digest(image) for key, image in images.items()}
    manifest = manifest.model_copy(update={"pictures": pictures})
    beside = stream_number(output) is None
    return Prepared(manifest, document, render(document, form, images, output, manifest, beside=beside))


def _earlier_pictures(output: Path, manifest: Manifest) -> list[Path]:
    """The pictures of the report that stands there which this one does not have."""
    if stream_number(output) is not None or not output.is_file():
        return []
    try:
        earlier = read_manifest(read_plain(output, MOST_REPORT_BYTES).decode(), output).manifest
    except (OSError, UnicodeDecodeError, HarnessError):
        return []
    found = []
    for name in earlier.pictures.keys() - manifest.pictures.keys():
        picture = output.parent / name
        if (
            Path(name).name == name
            and picture.is_file()
            and digest(read_plain(picture, MOST_REPORT_BYTES)) == earlier.pictures[name]
        ):
            found.append(picture)
    return found


def format_of(output: Path) -> Format:
    """The format follows from the extension; markdown if there is none. Raises HarnessError."""
    form = SUFFIXES.get(output.suffix.lower() or ".md")
    if output.suffix.lower() == ".tex":
        markdown = output.with_suffix(".md").name
        raise HarnessError(f"report '{output}': give {markdown}; `pandoc -s {markdown}` makes LaTeX of it")
    if form is None:
        raise HarnessError(
            f"report '{output}': '{output.suffix}' names no format; end its name in {', '.join(SUFFIXES)}"
        )
    return form


def make_document(manifest: Manifest, records: Mapping[str, Record]) -> Document:
    """The document that a manifest describes; `records` holds its records by their paths."""
    last = _folded(results.records_section(manifest))
    after = [records[entry.path] for entry in manifest.records if not entry.before]
    if manifest.kind == "baseline":
        from harness.tell.before_after import before_after, folders_of

        before = [records[entry.path] for entry in manifest.records if entry.before]
        return before_after(Comparison(before), Comparison(after), folders_of(records), last)
    if manifest.over:
        from harness.tell.before_after import over_time

        return over_time(records, manifest.over, last)
    if manifest.price_per_gpu_hour is not None:
        price = {"price_per_gpu_hour": manifest.price_per_gpu_hour}
        after = [record.model_copy(update=price) for record in after]
    comparison = Comparison(after)
    named = title(comparison, manifest.question, manifest.subject)
    details = details_document(comparison, last, question=manifest.question)
    return short_document(comparison, manifest.question, details, named=named)


def draw_all(document: Document, form: Format) -> dict[str, bytes]:
    """Every picture by its key, as a report of this format needs it."""
    drawn = document.pictures() if form in WITH_PICTURES else []
    return {picture.key: draw(picture, heading=document.heading) for picture in drawn}


def picture_names(keys: Iterable[str], output: Path) -> dict[str, str]:
    return {key: output.with_suffix(f".{key}.svg").name for key in keys}


def details_name(output: Path) -> str:
    return f"{output.stem}.details{output.suffix}"


def render(
    document: Document,
    form: Format,
    images: Images,
    output: Path,
    carried: Manifest | str,
    *,
    beside: bool = True,
) -> Rendered:
    """The bytes of the report and of the files next to it.

    `carried`: what its text hides; of a markdown report the manifest is a file of its own if `beside`.
    """
    names = picture_names(images, output)
    files = {names[key]: data for key, data in images.items()}
    line = carried if isinstance(carried, str) else carried.line()
    match form:
        case "md":
            if beside and isinstance(carried, Manifest):
                line = carried.pointer()
                files[manifest_name(output)] = carried.file().encode()
            details = details_name(output)
            if document.details is not None:
                files[details] = render_details(document.details, names, output.name).encode()
            return Rendered(render_markdown(document, names, line, details), files)
        case "html":
            addresses = {key: data_address(image) for key, image in images.items()}
            return Rendered(render_html(document, addresses, line), {})
        case "json":
            return Rendered(render_json(document, line), {})
        case "csv":
            main, tables = render_csv(document, line)
            others = {output.with_suffix(f".{key}.csv").name: t.encode() for key, t in tables.items()}
            return Rendered(main, others)


Trial = Callable[[Sequence[Run]], object]
"""Computes what will be shown of these runs, and writes nothing."""


def without_odd_runs(runs: Sequence[Run], trial: Trial) -> tuple[list[Run], list[str]]:
    """The runs that can be shown together, and why each of the others cannot.

    Each is tried by itself, then by leaving it out. Raises HarnessError if neither helps.
    """
    problem = _problem(runs, trial)
    if problem is None:
        return list(runs), []
    alone = {path: why for path, record in runs if (why := _problem([(path, record)], trial)) is not None}
    sound = [run for run in runs if run[0] not in alone]
    if not alone or (sound and _problem(sound, trial) is not None):
        path = next((p for p, _ in sound if _problem([r for r in sound if r[0] != p], trial) is None), None)
        if path is None:
            raise HarnessError(f"these records cannot be shown together: {problem}")
        alone[path] = problem
        sound = [run for run in sound if run[0] != path]
    if not sound:
        raise HarnessError(f"no record can be shown: {problem}")
    return sound, [f"record {path} is valid but cannot be shown: {why}" for path, why in alone.items()]


def _problem(runs: Sequence[Run], trial: Trial) -> str | None:
    """Why these runs cannot be shown; None: they can."""
    try:
        trial(runs)
    except (HarnessError, OSError, ImportError):
        raise
    except Exception as error:  # an odd value may break any figure
        return f"{type(error).__name__}: {described(error)}"
    return None


LONGEST_NAME = 200
"""Bytes of a report's file name; file systems allow 255, of which names of tables and pictures need some."""
FILES_OF_RUNS = (RECORD_NAME, "request.json", "matrix.json", "slurm.json")


def require_writable(report: Path, form: Format | None = None) -> None:
    if form is None:
        format_of(report)
    length = len(os.fsencode(report.name))
    if length > LONGEST_NAME:
        raise HarnessError(
            f"report's file name has {length} bytes; at most {LONGEST_NAME} are allowed, as its pictures "
            "have longer names; give a shorter one"
        )
    require_plain_output(report, "report")
    if report.name in FILES_OF_RUNS:
        raise HarnessError(
            f"report '{report}' would replace {report.name}, a file of a run; give another name"
        )
    with refusing(f"report '{report}' cannot be written"):
        report.parent.mkdir(parents=True, exist_ok=True)
        try_writing(report)


def write_document(document: Document, output: Path, made_by: str) -> None:
    """Write a document of no records: markdown with its pictures, or one HTML page, as its extension says.

    Raises HarnessError if it cannot be written.
    """
    form: Format = "html" if output.suffix.lower() in (".html", ".htm") else "md"
    require_writable(output, form)
    _write(render(document, form, draw_all(document, form), output, made_by), output)
