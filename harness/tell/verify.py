"""Computes a report again from the records that it lists and names what differs, by line.

Everything is compared with what the records give: text line by line, pictures by what they show.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

from harness.bounds import MOST_REPORT_BYTES
from harness.errors import HarnessError
from harness.files import read_plain
from harness.judge.wording import counted
from harness.record import Record
from harness.record.store import RecordFiles, parse_record, read_record
from harness.tell.document import Document
from harness.tell.manifest import Carried, Manifest, RecordEntry, digest, neighbours, read_manifest
from harness.tell.outline import PICTURE_KEYS
from harness.tell.pictures.drawing import RENDERER, renderer
from harness.tell.report import (
    IMAGE_FORMATS,
    Images,
    details_name,
    draw_all,
    make_document,
    picture_names,
    render,
)
from harness.tell.writers.data import MANIFEST
from harness.tell.writers.html import DATA_ADDRESS, data_address


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
        """For programs."""
        problems = [{"file": p.file, "line": p.line, "what": p.what} for p in self.problems]
        return {"holds": not problems, "problems": problems, "notes": self.notes}


def check_records(report: Path, text: str, carried: Carried, result: Verification) -> dict[str, Record]:
    """Records by path, those left out that are missing or cannot be read."""
    if carried.file:
        text = _read_text(report.with_name(carried.file))
    check = _Check(report, text.split("\n"), carried, RecordFiles(), result)
    records: dict[str, Record] = {}
    runs: dict[tuple[str, bool], str] = {}
    for entry in carried.manifest.records:
        if (record := check.read(entry)) is None:
            continue
        records[entry.path] = record
        if (run := (record.run_id, entry.before)) in runs:
            same = f"record {entry.path} is of the same run as {runs[run]}, so that one run counts twice"
            check.tell(entry, same)
        runs.setdefault(run, entry.path)
    check.neighbours({record.job_id for record in records.values()})
    return records


@dataclass(frozen=True)
class _Check:
    report: Path
    lines: list[str]
    """Of the file that lists the records."""
    carried: Carried
    files: RecordFiles
    result: Verification

    def tell(self, entry: RecordEntry, what: str) -> None:
        """Add a problem, at the first line that names the run."""
        name, listed = self.carried.file or self.report.name, None if self.carried.file else self.carried.line
        lines = enumerate(self.lines, 1)
        line = next((n for n, text in lines if entry.run_id in text and n != listed), listed)
        self.result.problems.append(Problem(name, line, what))

    def read(self, entry: RecordEntry) -> Record | None:
        """A listed record, compared with what is listed; None if it is missing or cannot be read."""
        path = self.report.parent / entry.path
        if not self.files.exists(path):
            self.tell(entry, f"record {entry.path} is missing")
            return None
        data = self.files.read(path)
        if (found := digest(data)) != entry.sha256:
            what = f"record {entry.path} was changed: SHA-256 {found[:16]}, listed {entry.sha256[:16]}"
            self.tell(entry, what)
        try:
            record = parse_record(data, path)
        except HarnessError as error:
            self.tell(entry, str(error))
            return None
        if (entry.run_id, entry.status) != (record.run_id, record.status):
            listed = f"listed as run {entry.run_id}, {entry.status}"
            self.tell(entry, f"record {entry.path} is of run {record.run_id}, {record.status}; {listed}")
        return record

    def neighbours(self, jobs: set[str]) -> None:
        """Records that appeared after the report was written."""
        manifest = self.carried.manifest
        known = {entry.path for entry in manifest.records} | set(manifest.left_out)
        for path in neighbours(manifest.records, self.report.parent, self.files):
            if path in known:
                continue
            try:
                same_job = read_record(self.report.parent / path, self.files).job_id in jobs
            except HarnessError:
                same_job = True
            if same_job or PurePosixPath(path).parent.parent.as_posix() in manifest.folders:
                what = f"record {path} lies next to the records of the report but is not in it"
                self.result.problems.append(Problem(self.report.name, self.carried.line, what))
            else:
                what = f"record {path}, of another job, lies next to the records of the report"
                self.result.notes.append(what)


WINDOW = 100
"""Characters shown of a line that differs, around the place where it does."""


def line_differences(given: str, expected: str, *, pictures: bool) -> Iterator[tuple[int | None, str]]:
    """Line number from 1, or None before the first, and what is wrong there.

    Whole pictures within a line count only where `pictures` is true.
    """
    left, right = _lines(given, pictures), _lines(expected, pictures)
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            a, b = _around_difference(left[i1 + offset], right[j1 + offset])
            yield i1 + offset + 1, f"reads {a!r}, the records give {b!r}"
        for number in range(i1 + paired, i2):
            yield number + 1, f"does not follow from the records: {_cut(left[number])!r}"
        for number in range(j1 + paired, j2):
            yield i2 or None, f"a line is missing after this one: {_cut(right[number])!r}"


def _lines(text: str, pictures: bool) -> list[str]:
    """Lines with whole pictures replaced by their digests, which a person can read."""

    def shown(found: re.Match[str]) -> str:
        return f"picture sha256:{digest(found[1].encode())}" if pictures else "picture"

    return [DATA_ADDRESS.sub(shown, line) for line in text.split("\n")]


def _around_difference(left: str, right: str) -> tuple[str, str]:
    same = next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    begin = max(0, same - WINDOW // 3)
    return _cut(left[begin:]), _cut(right[begin:])


def _cut(text: str) -> str:
    return text if len(text) <= WINDOW else f"{text[:WINDOW]}..."


FONT_PIXELS = 2.0
"""How far legends and margins may move: another version of the same font has letters of other widths."""
_TAG = re.compile(rb"<[^>]*>")
_PLACE = re.compile(rb"(?<![#\w.])-?\d+(?:\.\d+)?(?!\w)")
"""A size or a position in a tag; not a colour, nor what follows a letter, as lengths of bars do in paths."""


def same_picture(name: str, given: bytes, expected: bytes) -> bool:
    """Whether bytes are equal, or what is seen.

    SVG: text, colours and lengths of bars are equal, and positions within FONT_PIXELS, as they depend on the
    machine's fonts. PNG: equal pixels, as compression differs between zlib builds.
    """
    if given == expected:
        return True
    if name.endswith(".svg"):
        return _same_drawing(given, expected)
    return name.endswith(".png") and _seen(given) == _seen(expected)


def pictures_within(page: str) -> list[bytes]:
    """The pictures of an HTML page, in its order."""
    return [_decoded(code) for code in DATA_ADDRESS.findall(page)]


def as_drawn_here(page: str, expected: str) -> str:
    """An HTML page with the pictures of `expected`, each where it shows the same as the page's own."""
    drawn = iter(pictures_within(expected))

    def replaced(found: re.Match[str]) -> str:
        here = next(drawn, b"")
        return data_address(here) if same_picture("within.svg", _decoded(found[1]), here) else found[0]

    return DATA_ADDRESS.sub(replaced, page)


def _decoded(code: str) -> bytes:
    """Empty if it is no whole base64."""
    try:
        return base64.b64decode(code)
    except binascii.Error:
        return b""


def _same_drawing(given: bytes, expected: bytes) -> bool:
    if _TAG.split(given) != _TAG.split(expected):
        return False
    ours, theirs = b"".join(_TAG.findall(given)), b"".join(_TAG.findall(expected))
    if _PLACE.sub(b"", ours) != _PLACE.sub(b"", theirs):
        return False
    pairs = zip(_PLACE.findall(ours), _PLACE.findall(theirs), strict=True)
    return all(abs(float(one) - float(other)) <= FONT_PIXELS for one, other in pairs)


def _seen(image: bytes) -> tuple[tuple[int, int], int, dict[Any, Any], bytes] | None:
    """Size, number of frames, what changes how pixels look, and the pixels; None if the file is no PNG."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image), formats=("PNG",)) as opened:
            pixels = opened.convert("RGBA").tobytes()
            look = {key: value for key, value in opened.info.items() if key != "dpi"}
            return opened.size, getattr(opened, "n_frames", 1), look, pixels
    except (UnidentifiedImageError, OSError):
        return None


def verify(report: Path, *, pictures_by_digest: bool = False) -> Verification:
    """Check a report against the records next to it.

    Pictures that another renderer, or another version of it, drew cannot be drawn again byte by byte.
    That is a problem of its own, unless `pictures_by_digest` accepts those whose digest the report lists.
    Raises HarnessError if the file cannot be read or is no report.
    """
    if report.is_dir():
        raise HarnessError(f"'{report}' is a folder; give the report in it, such as {report / 'report.md'}")
    if (owner := _owner_of_details(report)) is not None:
        raise HarnessError(f"'{report}' is checked with the report it belongs to; verify {owner}")
    result = Verification()
    text = _read_text(report)
    if "\r\n" in text and report.suffix.lower() != ".csv":
        what = "lines end in CRLF, which `harness report` does not write; the rest was compared without"
        result.problems.append(Problem(report.name, text[: text.index("\r\n")].count("\n") + 1, what))
        text = text.replace("\r\n", "\n")
    carried = _find_manifest(report, text)
    manifest, manifest_line = carried.manifest, carried.line
    if carried.is_changed:
        what = f"{carried.file}, the list of records, was changed: its SHA-256 is not the one here"
        result.problems.append(Problem(report.name, manifest_line, what))
    records = check_records(report, text, carried, result)
    _check_unlisted_pictures(report, manifest, manifest_line, result)
    if manifest.left_out:
        count = counted(len(manifest.left_out), "record")
        result.notes.append(f"{count} in the same folder: not part of the report, as it says")
    if records.keys() < {entry.path for entry in manifest.records}:
        result.notes.append("tables and pictures were not computed again: records are missing or unreadable")
        return result
    document = make_document(manifest, records)
    redraw = manifest.drawing == renderer()
    if not redraw and IMAGE_FORMATS[manifest.format]:
        _report_other_drawing(report.name, manifest, manifest_line, pictures_by_digest, result)
    _compare(report, text, document, carried, redraw, result)
    if manifest.harness != version("sharding-harness"):
        result.notes.append(
            f"written by sharding-harness {manifest.harness}, checked by {version('sharding-harness')}: "
            "lines may differ because the report itself changed between them"
        )
    result.summary = (
        f"{len(manifest.records)} records unchanged, {len(document.tables())} tables and "
        f"{len(document.pictures())} pictures {'computed again' if redraw else 'checked'}"
    )
    return result


def _compare(
    report: Path,
    text: str,
    document: Document,
    carried: Carried,
    redraw: bool,
    result: Verification,
) -> None:
    """Compare the text, and every file next to it, with what the records give."""
    manifest, manifest_line = carried.manifest, carried.line
    name = report.parent / manifest.name
    images = draw_all(document, manifest.format)
    rendered = render(document, manifest, images, name, beside=bool(carried.file))
    names = picture_names(images, name)
    shown = as_drawn_here(text, rendered.text) if redraw else text
    _compare_text(report.name, shown, rendered.text, redraw, result)
    within = _by_file(text, rendered.text, images, names)
    if not redraw and manifest.format == "html":
        if any(digest(given) != manifest.pictures.get(file) for file, given in within):
            result.problems.append(Problem(report.name, None, "holds a picture whose digest is not listed"))
    if redraw and not _lists_pictures(report.parent, manifest, images, names, dict(within)):
        what = "the list of the pictures' digests is not that of the pictures"
        result.problems.append(Problem(report.name, manifest_line, what))
    pictures = set(names.values())
    for file, expected in rendered.files.items():
        path = report.parent / file

        def report_problem(what: str, file: str = file) -> None:
            line = _line_showing(text, file, manifest_line)
            result.problems.append(Problem(report.name, line, f"{file} {what}"))

        if not path.is_file():
            report_problem("is missing next to the report")
        elif file not in pictures:
            _compare_text(file, _read_text(path), expected.decode(), redraw, result)
        elif redraw:
            if not same_picture(file, read_plain(path, MOST_REPORT_BYTES), expected):
                report_problem("is not the picture that the records give")
        elif digest(read_plain(path, MOST_REPORT_BYTES)) != manifest.pictures.get(file):
            report_problem("is not the picture whose digest the report lists")


def _by_file(
    page: str, expected: str, images: Images, names: Mapping[tuple[str, str], str]
) -> list[tuple[str, bytes]]:
    """Each picture of an HTML report, with the name under which its digest is listed; none of others."""
    here = {digest(images[key][form]): file for (key, form), file in names.items()}
    return [
        (here[digest(drawn)], given)
        for drawn, given in zip_longest(pictures_within(expected), pictures_within(page), fillvalue=b"")
        if digest(drawn) in here
    ]


def _line_showing(text: str, picture: str, manifest_line: int) -> int:
    """The line that shows a picture, be it in its other image format; else that which lists its digest."""
    of_any_format = str(Path(picture).with_suffix(""))
    lines = enumerate(text.split("\n"), 1)
    return next((n for n, t in lines if f"{of_any_format}." in t and n != manifest_line), manifest_line)


def _lists_pictures(
    folder: Path,
    manifest: Manifest,
    images: Images,
    names: Mapping[tuple[str, str], str],
    within: Mapping[str, bytes],
) -> bool:
    """Whether each picture's digest is as drawn here, or that of the file, or of what the page holds.

    PNGs are compressed otherwise elsewhere, and fonts move what SVGs show.
    """
    if manifest.pictures.keys() != set(names.values()):
        return False
    for (key, form), name in names.items():
        file = folder / name
        drawn = [images[key][form], within.get(name, b"")]
        drawn += [read_plain(file, MOST_REPORT_BYTES)] if file.is_file() else []
        if manifest.pictures[name] not in map(digest, drawn):
            return False
    return True


def _report_other_drawing(
    name: str, manifest: Manifest, line: int, by_digest: bool, result: Verification
) -> None:
    how = f"pictures were drawn by {manifest.drawing}, here is {renderer()}"
    if by_digest:
        result.notes.append(f"{how}: they were checked by their digests only")
        return
    name_and_version = manifest.drawing.partition(" ")
    same = name_and_version[0] == RENDERER
    mend = f"install {'=='.join(name_and_version[::2])}" if same else "write the report again"
    advice = f"{mend}, or accept their digests with --pictures-by-digest"
    result.problems.append(Problem(name, line, f"{how}, so they cannot be drawn again; {advice}"))


def _owner_of_details(report: Path) -> Path | None:
    """The report whose details the file is; None where it is none."""
    stem, mark, suffix = report.name.rpartition(".details.")
    owner = report.with_name(f"{stem}.{suffix}")
    return owner if mark and details_name(owner) == report.name and owner.is_file() else None


def _find_manifest(report: Path, text: str) -> Carried:
    """The manifest within the text; that of a CSV report is a file next to it."""
    of_csv = report.with_suffix(f".{MANIFEST}.csv")
    if of_csv.is_file():
        found = read_manifest(_read_text(of_csv), of_csv)
        if found.manifest.name == report.name:
            return found
    return read_manifest(text, report)


def _read_text(path: Path) -> str:
    try:
        return read_plain(path, MOST_REPORT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise HarnessError(f"report '{path}' cannot be read: {why}") from error


def _check_unlisted_pictures(
    report: Path, manifest: Manifest, manifest_line: int, result: Verification
) -> None:
    """Pictures with names of this report's that it does not show: left by an earlier one, or foreign."""
    if manifest.format not in ("md", "latex"):
        return
    possible = picture_names(
        {key: dict.fromkeys(IMAGE_FORMATS[manifest.format], b"") for key in PICTURE_KEYS}, report
    )
    for name in possible.values():
        if name not in manifest.pictures and (report.parent / name).exists():
            what = f"picture {name} is named as one of this report, which does not show it; remove it"
            result.problems.append(Problem(report.name, manifest_line, what))


def _compare_text(name: str, given: str, expected: str, pictures: bool, result: Verification) -> None:
    found = line_differences(given, expected, pictures=pictures)
    result.problems += [Problem(name, line, what) for line, what in found]
