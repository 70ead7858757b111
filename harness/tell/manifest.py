"""What a report carries so that it can be computed again: JSON hidden in its text or in a file next to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from harness.bounds import MOST_REPORT_BYTES
from harness.errors import HarnessError
from harness.files import Stored, read_plain
from harness.job.experiment import Price, ReportFocus
from harness.record import Record
from harness.record.store import RecordFiles
from harness.tell.pictures.drawing import renderer
from harness.version import __version__

Format = Literal["md", "html", "csv", "json"]
Kind = Literal["comparison", "baseline"]
MARK = "harness-report: "
_LINE = re.compile(r'(?:<!-- | ")?harness-report"?: (\{.*\})(?: -->)?')


class RecordEntry(Stored):
    """A record of the report, by its path from the report's folder."""

    path: str
    sha256: str
    run_id: str
    status: str
    before: bool = False
    """Of a report with a baseline: whether it belongs to the baseline."""


class Manifest(Stored):
    """Options and inputs of one report."""

    name: str
    """Of the report's file, from which those of its pictures are made."""
    format: Format
    kind: Kind = "comparison"
    question: ReportFocus = "all"
    """What the report answers."""
    subject: str = ""
    """What its title adds to the job; empty: nothing."""
    price_per_gpu_hour: Price | None = None
    """What replaces the price of the records; None: nothing."""
    over: str = ""
    """The fact over whose values it shows the figures; empty: none."""
    harness: str
    drawing: str
    """Name and version of what drew the pictures; another draws other bytes."""
    records: list[RecordEntry]
    folders: list[str] = []
    """Folders of which every record is in the report."""
    left_out: list[str] = []
    """Records that lay next to those of the report and are not part of it."""
    pictures: dict[str, str] = {}
    """SHA-256 of each picture, by file name."""

    def line(self) -> str:
        """The line that a writer hides."""
        return _hidden(self._values())

    def file(self) -> str:
        """A file next to the report, which `pointer` names."""
        return json.dumps(self._values(), indent=1) + "\n"

    def pointer(self) -> str:
        """The line that a writer hides where the manifest is a file next to the report."""
        file = self.file().encode()
        return _hidden({"manifest": manifest_name(Path(self.name)), "sha256": digest(file)})

    def _values(self) -> dict[str, Any]:
        return self.model_dump(
            exclude={name for name in ("price_per_gpu_hour", "over") if not getattr(self, name)}
        )


class Carried(NamedTuple):
    """The manifest that a report carries."""

    manifest: Manifest
    line: int
    """Of the report, counted from 1: where the manifest is, or the name of its file."""
    file: str = ""
    """Next to the report; empty: the line holds the manifest."""
    is_changed: bool = False
    """Whether the file's digest is not the one in the report."""


def _hidden(values: dict[str, Any]) -> str:
    """A line in which nothing can end a comment or begin a tag."""
    text = json.dumps(values, separators=(",", ":"))
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("--", "-\\u002d")):
        text = text.replace(character, code)
    return MARK + text


def manifest_name(report: Path) -> str:
    return f"{report.stem}.manifest.json"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Asked(TypedDict, total=False):
    """What a report is asked to be."""

    question: ReportFocus | None
    """None: that of the records."""
    subject: str
    """What the title adds to the job."""
    price: Price | None
    """Of an hour of one GPU, in place of that of the records."""
    baseline: Sequence[tuple[Path, Record]]
    """Records from before a change."""
    over: str
    """The fact whose values are compared, such as 'torch'."""
    folders: Sequence[Path]
    """Those whose every record was asked for."""


def make_manifest(
    runs: Sequence[tuple[Path, Record]], output: Path, *, form: Format, **asked: Unpack[Asked]
) -> Manifest:
    """Describe a report of `runs`, in their order, that will be written to `output`.

    Other records next to these are named as left out.
    """
    baseline = asked.get("baseline", ())
    files = RecordFiles()
    relative = paths_from(output.parent)
    entries = [
        RecordEntry(
            path=relative(path),
            sha256=record.once("sha256", partial(_digest, files, path)),
            run_id=record.run_id,
            status=record.status,
            before=before,
        )
        for of_side, before in ((baseline, True), (runs, False))
        for path, record in of_side
    ]
    listed = {entry.path for entry in entries}
    return Manifest(
        name=output.name,
        format=form,
        kind="baseline" if baseline else "comparison",
        question=asked.get("question") or question_of([record for _, record in runs]),
        subject=asked.get("subject", ""),
        price_per_gpu_hour=asked.get("price"),
        over=asked.get("over", ""),
        harness=__version__,
        drawing=renderer(),
        records=entries,
        folders=sorted(set(map(relative, asked.get("folders", ())))),
        left_out=[path for path in neighbours(entries, output.parent, files) if path not in listed],
    )


def question_of(records: Sequence[Record]) -> ReportFocus:
    """What all the records were made to answer; 'all' where they differ or do not say."""
    asked = {record.question for record in records}
    return (asked.pop() if len(asked) == 1 else None) or "all"


def neighbours(entries: Sequence[RecordEntry], folder: Path, files: RecordFiles) -> list[str]:
    """Paths of all records in the folders or archives of runs from which the listed ones come."""
    roots = sorted({(folder / entry.path).parent.parent for entry in entries})
    relative = paths_from(folder)
    return sorted({relative(path) for root in roots for path in files.of_runs(root)})


def _digest(files: RecordFiles, path: Path) -> str:
    return digest(files.read(path))


def paths_from(folder: Path) -> Callable[[Path], str]:
    """Gives a path as it is from a report's folder, with forward slashes."""
    start = os.path.realpath(folder)
    return lambda path: os.path.relpath(os.path.realpath(path), start).replace(os.sep, "/")


def read_manifest(text: str, report: Path) -> Carried:
    """The manifest in a report's text, or in the file next to the report that the text names.

    Raises HarnessError if there is none: the file is no report, or the line was removed.
    """
    lines = text.split("\n")
    candidates = [(n, found[1]) for n, line in enumerate(lines, 1) if (found := _LINE.fullmatch(line))]
    if not candidates:
        raise HarnessError(
            f"'{report}' carries no list of its records: it is not a report of this harness, or the line was "
            "removed; write it with `harness report`"
        )
    number, hidden = candidates[-1]  # a name within a command may hold such a line too
    try:
        values = json.loads(hidden)
        if "manifest" not in values:
            return Carried(Manifest.model_validate(values), number)
        name = Path(str(values["manifest"])).name
        try:
            data = read_plain(report.with_name(name), MOST_REPORT_BYTES)
        except OSError as error:
            raise HarnessError(
                f"report '{report}' needs '{report.with_name(name)}', which lists its records "
                f"({error.strerror or error}); keep the files together, or write the report again with "
                "`harness report`"
            ) from error
        changed = digest(data) != values.get("sha256")
        return Carried(Manifest.model_validate(json.loads(data)), number, name, changed)
    except (ValueError, TypeError) as error:
        raise HarnessError(
            f"report '{report}', line {number}: the list of its records cannot be read; "
            "write the report again with `harness report`"
        ) from error
