"""Markdown files of the repository as GitHub reads them: links and blocks of code."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "docs", "reports", "slurm")
FILES = sorted(
    [
        *ROOT.glob("*.md"),
        ROOT / "benchmarks/README.md",
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
)
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]
PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")


@cache
def tokens(path: Path) -> list[Token]:
    """Block tokens of a file."""
    return PARSER.parse(path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    """Targets of the links and pictures of a file."""
    for block in tokens(path):
        for token in block.children or ():
            target = token.attrGet("href") if token.type == "link_open" else token.attrGet("src")
            if target is not None:
                yield str(target)


def shell_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every command in a file's blocks of shell code; continued lines are joined."""
    for block in tokens(path):
        if block.type != "fence" or block.info.split()[:1] not in (["sh"], ["bash"]):
            continue
        assert block.map
        number, waiting = block.map[0] + 2, ""
        for offset, line in enumerate(block.content.splitlines()):
            if not waiting:
                number = block.map[0] + 2 + offset
            if line.rstrip().endswith("\\"):
                waiting += line.rstrip()[:-1] + " "
                continue
            if (waiting + line).strip():
                yield number, (waiting + line).strip()
            waiting = ""


def generated(path: Path, begin: str, end: str, text: str, *, update: bool) -> str:
    """What a file holds between two comments; `update` writes `text` there first."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    held, _, after = rest.partition(end)
    if update:
        held = f"\n{text.strip()}\n\n"
        path.write_text(f"{before}{begin}{held}{end}{after}", encoding="utf-8")
    return held
