"""Computes a report again from the records that it lists and names what differs, by line.

Everything is compared with what the records give: text line by line, pictures by what they show.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

from harness.bounds import MOST_REPORT_BYTES
from harness.errors import HarnessError
from harness.files import read_plain, read_settings
from harness.judge.wording import counted
from harness.record import Record
from harness.record.store import RecordFiles, parse_record, read_record
from harness.tell.document import Document
from harness.tell.manifest import Carried, Manifest, RecordEntry, digest, neighbours, read_manifest
from harness.tell.pictures.drawing import renderer
from harness.tell.report import (
    PICTURE_KEYS,
    WITH_PICTURES,
    details_name,
    draw_all,
    make_document,
    picture_names,
    render,
)
from harness.tell.writers.html import DATA_ADDRESS, data_address
from harness.tell.writers.text import MANIFEST
from harness.version import __version__


@dataclass(frozen=True)
class Problem:
    """Something in the report that does not follow from its records."""

    file: str
    line: int | None
    what: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.what}"


@dataclass(kw_only=True)
class Verification:
    """What a check found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: str = ""

    def as_json(self) -> dict[str, Any]:
        problems = [{"file": p.file, "line": p.line, "what": p.what} for p in self.problems]
        return {"holds": not problems, "problems": problems, "notes": self.notes}


WINDOW = 100
"""Characters shown of a line that differs, around the place where it does."""


def line_differences(given: str, expected: str) -> Iterator[tuple[int | None, str]]:
    """Line number from 1, or None before the first, and what is wrong there."""
    left, right = _lines(given), _lines(expected)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            a, b = left[i1 + offset], right[j1 + offset]
            same = next((n for n, (one, other) in enumerate(zip_longest(a, b)) if one != other), 0)
            begin = max(0, same - WINDOW // 3)
            what = f"reads {_cut(a[begin:])!r}, the records give {_cut(b[begin:])!r}"
            yield i1 + offset + 1, what
        for number in range(i1 + paired, i2):
            yield number + 1, f"does not follow from the records: {_cut(left[number])!r}"
        for number in range(j1 + paired, j2):
            yield i2 or None, f"a line is missing after this one: {_cut(right[number])!r}"


def _lines(text: str) -> list[str]:
    """Lines with whole pictures replaced by their digests, which a person can read."""
    return [
        DATA_ADDRESS.sub(lambda found: f"picture sha256:{digest(found[1].encode())}", line)
        for line in text.split("\n")
    ]


def _cut(text: str) -> str:
    return text if len(text) <= WINDOW else f"{text[:WINDOW]}..."


FONT_PIXELS = 2.0
"""How far legends and margins may move: another version of the same font has letters of other widths."""
_TAG = re.compile(rb"<[^>]*>")
_PLACE = re.compile(rb"(?<![#\w.])-?\d+(?:\.\d+)?(?!\w)")
"""A size or a position in a tag; not a colour, nor what follows a letter, as lengths of bars do in paths."""


def same_picture(given: bytes, expected: bytes) -> bool:
    """Whether bytes are equal, or what is seen.

    Text, colours and lengths of bars are equal, and positions within FONT_PIXELS, as they depend on the
    machine's fonts.
    """
    if given == expected:
        return True
    if _TAG.split(given) != _TAG.split(expected):
        return False
    ours, theirs = b"".join(_TAG.findall(given)), b"".join(_TAG.findall(expected))
    if _PLACE.sub(b"", ours) != _PLACE.sub(b"", theirs):
        return False
    pairs = zip(_PLACE.findall(ours), _PLACE.findall(theirs), strict=True)
    return all(abs(float(one) - float(other)) <= FONT_PIXELS for one, other in pairs)


def pictures_within(page: str) -> list[bytes]:
    return [_decoded(code) for code in DATA_ADDRESS.findall(page)]


def as_drawn_here(page: str, expected: str) -> str:
    """An HTML page with the pictures of `expected`, each where it shows the same as the page's own."""
    drawn = iter(pictures_within(expected))

    def replaced(found: re.Match[str]) -> str:
        here = next(drawn, b"")
        return data_address(here) if same_picture(_decoded(found[1]), here) else found[0]

    return DATA_ADDRESS.sub(replaced, page)


def _decoded(code: str) -> bytes:
    """Empty if it is no whole base64."""
    try:
        return base64.b64decode(code)
    except binascii.Error:
        return b""


def verify(report: Path) -> Verification:
    """Check a report against the records next to it.

    Raises HarnessError if the file cannot be read or is no report.
    """
    if report.is_dir():
        some = (report.with_suffix(""), *sorted(report.glob("*.md")))
        near = [one for one in some if one.is_file() and ".details." not in one.name]
        told = f"'{report}' is a folder; give the report that `harness report` wrote"
        raise HarnessError(f"{told}, such as {near[0]}" if near else told)
    stem, mark, suffix = report.name.rpartition(".details.")
    owner = report.with_name(f"{stem}.{suffix}")
    if mark and details_name(owner) == report.name and owner.is_file():
        raise HarnessError(f"'{report}' is checked with the report it belongs to; verify {owner}")
    result, text = Verification(), _read_text(report)
    if "\r\n" in text and report.suffix.lower() != ".csv":
        what = "lines end in CRLF, which `harness report` does not write; the rest was compared without"
        result.problems.append(Problem(report.name, text[: text.index("\r\n")].count("\n") + 1, what))
        text = text.replace("\r\n", "\n")
    _Check(report, text, _find_manifest(report, text), result).run()
    return result


@dataclass(frozen=True)
class _Check:
    report: Path
    text: str
    carried: Carried
    result: Verification
    files: RecordFiles = field(default_factory=RecordFiles)

    @property
    def manifest(self) -> Manifest:
        return self.carried.manifest

    def tell(self, what: str, line: int | None = None) -> None:
        """Add a problem of the report, where the list of records is unless a line is given."""
        self.result.problems.append(Problem(self.report.name, line or self.carried.line, what))

    def run(self) -> None:
        manifest, notes = self.manifest, self.result.notes
        if self.carried.is_changed:
            self.tell(
                f"{self.carried.file}, the list of records, was changed: its SHA-256 is not the one here"
            )
        records = self.records()
        self.unlisted_pictures()
        if manifest.left_out:
            count = counted(len(manifest.left_out), "record")
            notes.append(f"{count} in the same folder: not part of the report, as it says")
        if records.keys() < {entry.path for entry in manifest.records}:
            notes.append("tables and pictures were not computed again: records are missing or unreadable")
            return
        document = make_document(manifest, records)
        if manifest.drawing != renderer() and manifest.format in WITH_PICTURES:
            notes.append(
                f"pictures were drawn by {manifest.drawing}, here by {renderer()}: what they show may differ "
                "because of that"
            )
        self.compare(document)
        if manifest.harness != __version__:
            notes.append(
                f"written by sharding-harness {manifest.harness}, checked by {__version__}: "
                "lines may differ because the report itself changed between them"
            )
        self.result.summary = (
            f"{len(manifest.records)} records unchanged, {len(document.tables())} tables and "
            f"{len(document.pictures())} pictures computed again"
        )

    def records(self) -> dict[str, Record]:
        """Records by path, those left out that are missing or cannot be read."""
        listing = self.text if not self.carried.file else _read_text(self.report.with_name(self.carried.file))
        lines = listing.split("\n")
        records: dict[str, Record] = {}
        runs: dict[tuple[str, bool], str] = {}
        for entry in self.manifest.records:
            path = self.report.parent / entry.path
            if not self.files.exists(path):
                self.tell_of(entry, lines, f"record {entry.path} is missing")
                continue
            data = self.files.read(path)
            if (found := digest(data)) != entry.sha256:
                changed = f"was changed: SHA-256 {found[:16]}, listed {entry.sha256[:16]}"
                self.tell_of(entry, lines, f"record {entry.path} {changed}")
            try:
                record = records[entry.path] = parse_record(data, path)
            except HarnessError as error:
                self.tell_of(entry, lines, str(error))
                continue
            if (entry.run_id, entry.status) != (record.run_id, record.status):
                listed = f"listed as run {entry.run_id}, {entry.status}"
                other = f"record {entry.path} is of run {record.run_id}, {record.status}; {listed}"
                self.tell_of(entry, lines, other)
            if (run := (record.run_id, entry.before)) in runs:
                same = f"record {entry.path} is of the same run as {runs[run]}, so that one run counts twice"
                self.tell_of(entry, lines, same)
            runs.setdefault(run, entry.path)
        self.neighbours({record.job_id for record in records.values()})
        return records

    def tell_of(self, entry: RecordEntry, lines: Sequence[str], what: str) -> None:
        """Add a problem at the first line that names the run."""
        name, listed = self.carried.file or self.report.name, None if self.carried.file else self.carried.line
        numbered = enumerate(lines, 1)
        line = next((n for n, text in numbered if entry.run_id in text and n != listed), listed)
        self.result.problems.append(Problem(name, line, what))

    def neighbours(self, jobs: set[str]) -> None:
        """Records that appeared after the report was written."""
        known = {entry.path for entry in self.manifest.records} | set(self.manifest.left_out)
        for path in neighbours(self.manifest.records, self.report.parent, self.files):
            if path in known:
                continue
            try:
                same_job = read_record(self.report.parent / path, self.files).job_id in jobs
            except HarnessError:
                same_job = True
            if same_job or PurePosixPath(path).parent.parent.as_posix() in self.manifest.folders:
                self.tell(f"record {path} lies next to the records of the report but is not in it")
            else:
                self.result.notes.append(
                    f"record {path}, of another job, lies next to the records of the report"
                )

    def unlisted_pictures(self) -> None:
        """Pictures with names of this report's that it does not show: left by an earlier one, or foreign."""
        if self.manifest.format != "md":
            return
        for name in picture_names(PICTURE_KEYS, self.report).values():
            if name not in self.manifest.pictures and (self.report.parent / name).exists():
                self.tell(f"picture {name} is named as one of this report, which does not show it; remove it")

    def compare(self, document: Document) -> None:
        """Compare the text, and every file next to it, with what the records give."""
        manifest = self.manifest
        name = self.report.parent / manifest.name
        images = draw_all(document, manifest.format)
        beside = bool(self.carried.file)
        rendered = render(document, manifest.format, images, name, manifest, beside=beside)
        names = picture_names(images, name)
        self.compare_text(self.report.name, as_drawn_here(self.text, rendered.text), rendered.text)
        drawn = {names[key]: image for key, image in images.items()}
        # Of an HTML report, each picture within it by the name under which its digest is listed.
        here = {digest(data): file for file, data in drawn.items()}
        pages = zip_longest(pictures_within(rendered.text), pictures_within(self.text), fillvalue=b"")
        within = [(here[digest(ours)], given) for ours, given in pages if digest(ours) in here]
        if not self.lists_pictures(drawn, dict(within)):
            self.tell("the list of the pictures' digests is not that of the pictures")
        for file, expected in rendered.files.items():
            path, line = self.report.parent / file, self.line_showing(file)
            if not path.is_file():
                self.tell(f"{file} is missing next to the report", line)
            elif file not in drawn:
                self.compare_text(file, _read_text(path), expected.decode())
            elif not same_picture(read_plain(path, MOST_REPORT_BYTES), expected):
                self.tell(f"{file} is not the picture that the records give", line)

    def compare_text(self, name: str, given: str, expected: str) -> None:
        found = line_differences(given, expected)
        self.result.problems += [Problem(name, line, what) for line, what in found]

    def line_showing(self, picture: str) -> int:
        """The line that shows a picture; else that which lists its digest."""
        listed, lines = self.carried.line, enumerate(self.text.split("\n"), 1)
        return next((n for n, text in lines if picture in text and n != listed), listed)

    def lists_pictures(self, drawn: Mapping[str, bytes], within: Mapping[str, bytes]) -> bool:
        """Whether each picture's digest is as drawn here, or that of the file, or of what the page holds.

        Fonts move what SVGs show.
        """
        if self.manifest.pictures.keys() != drawn.keys():
            return False
        for name, data in drawn.items():
            file = self.report.parent / name
            known = [data, within.get(name, b"")]
            known += [read_plain(file, MOST_REPORT_BYTES)] if file.is_file() else []
            if self.manifest.pictures[name] not in map(digest, known):
                return False
        return True


def _find_manifest(report: Path, text: str) -> Carried:
    """The manifest within the text; that of a CSV report is a file next to it."""
    of_csv = report.with_suffix(f".{MANIFEST}.csv")
    if of_csv.is_file():
        found = read_manifest(_read_text(of_csv), of_csv)
        if found.manifest.name == report.name:
            return found
    return read_manifest(text, report)


def _read_text(path: Path) -> str:
    return read_settings(path, "report", "; give what `harness report -o FILE` wrote", MOST_REPORT_BYTES)
