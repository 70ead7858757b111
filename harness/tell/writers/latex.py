"""A document as a LaTeX article, for lualatex or xelatex, which read any script."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from harness.tell.document import (
    Block,
    Code,
    Document,
    Folded,
    Heading,
    Items,
    Line,
    Paragraph,
    Picture,
    Table,
)
from harness.tell.formats import one_line, shortened

PREAMBLE = r"""% For lualatex or xelatex.
\documentclass[10pt,a4paper]{article}
\usepackage{fontspec}
\usepackage[margin=2cm]{geometry}
\usepackage{adjustbox,array,booktabs,graphicx}
\setlength{\parindent}{0pt}
\setlength{\parskip}{6pt}
\sloppy
"""
LONGEST_ON_A_PAGE = 40
"""Lines; a longer table goes on in another one, as each is scaled to the width of a page."""
LONGEST_LINE = 60
"""Characters; a column with a longer cell breaks its lines, and no title or word is longer."""
CHARACTERS_OF_A_BREAKING_LINE = 44
BREAKING = r">{\raggedright\arraybackslash}p{8cm}"
_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%",
    "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}", "≈": r"$\approx$", "†": r"\dag{}", "-": r"-\kern0pt{}",
}  # fmt: skip


def render_latex(document: Document, pictures: Mapping[str, str], manifest: str) -> str:
    """The document; `pictures` holds the file name of each picture by its key."""
    parts = [f"\\title{{{latex_text(document.title)}}}\n\\author{{}}\\date{{}}\n\\maketitle"]
    parts += _sections(document, pictures)
    if document.details is not None:
        parts += ["\\clearpage\n\\appendix", *_sections(document.details, pictures)]
    body = "\n\n".join(parts)
    return f"% {manifest}\n{PREAMBLE}\\begin{{document}}\n\n{body}\n\n\\end{{document}}\n"


def _sections(document: Document, pictures: Mapping[str, str]) -> list[str]:
    parts = []
    for section in document.sections:
        parts.append(f"\\section{{{latex_text(section.title)}}}")
        parts += [_block(block, pictures) for block in section.blocks]
    return parts


def latex_text(text: str) -> str:
    """Text made harmless, on one line."""
    return "".join(_SPECIAL.get(character, character) for character in one_line(text))


def _block(block: Block, pictures: Mapping[str, str]) -> str:
    match block:
        case Paragraph():
            return latex_text(block.text)
        case Line():
            return _line(block)
        case Heading():
            return f"\\subsection{{{latex_text(block.text)}}}"
        case Items():
            lines = "\n".join(f"\\item {_line(line)}" for line in block.lines())
            return f"\\begin{{itemize}}\n{lines}\n\\end{{itemize}}"
        case Table():
            return _table(block.for_people())
        case Picture():
            # detokenize: a name with an underscore or tilde is no mathematics here
            name = f"\\detokenize{{{pictures[block.key]}}}"
            return f"\\includegraphics[width=\\linewidth]{{{name}}}\n\n{latex_text(block.caption)}"
        case Code():
            return _code(block.text)
        case Folded():
            inside = "\n\n".join(_block(part, pictures) for part in block.blocks)
            return f"\\subsection{{{latex_text(shortened(block.title, LONGEST_LINE))}}}\n\n{inside}"


def _line(line: Line) -> str:
    text = latex_text(line.text)
    return f"\\textbf{{{latex_text(line.name)}}}: {text}" if line.name else text


def _table(table: Table) -> str:
    texts = table.texts()
    breaks = [any(len(line[index]) > LONGEST_LINE for line in texts) for index in range(len(table.columns))]
    sides = "".join(
        BREAKING if of_column else column.align[0]
        for of_column, column in zip(breaks, table.columns, strict=True)
    )
    head = [_cell(column.title) for column in table.columns]
    caption = f"\n\n{latex_text(table.caption)}" if table.caption else ""
    written = []
    for page in _pages(table.written(_cell, r"\textbf{{{}}}"), breaks):
        first, *lines = (" & ".join(cells) + r" \\" for cells in (head, *page))
        body = "\n".join([first, "\\midrule", *lines])
        written.append(
            f"\\begin{{adjustbox}}{{max width=\\linewidth}}\n\\begin{{tabular}}{{{sides}}}\n\\toprule\n"
            f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{adjustbox}}"
        )
    return "\n\n".join(written) + caption


def _pages(texts: list[list[str]], breaks: list[bool]) -> list[list[list[str]]]:
    """Rows of a table by page, one page at least; `breaks` says of each column whether its lines break."""
    pages: list[list[list[str]]] = [[]]
    left = LONGEST_ON_A_PAGE
    for row in texts:
        broken = [cell for cell, of_column in zip(row, breaks, strict=True) if of_column]
        lines = max((ceil(len(cell) / CHARACTERS_OF_A_BREAKING_LINE) for cell in broken), default=1)
        if lines > left and pages[-1]:
            pages.append([])
            left = LONGEST_ON_A_PAGE
        pages[-1].append(row)
        left -= max(1, lines)
    return pages


def _cell(text: str) -> str:
    return latex_text(" ".join(shortened(word, LONGEST_LINE) for word in text.split()))


def _code(text: str) -> str:
    r"""Lines in typewriter, each escaped: within verbatim, \end{verbatim} would be obeyed."""
    lines = []
    for line in text.rstrip().split("\n"):
        indented = len(line) - len(line.lstrip(" "))
        lines.append(f"\\mbox{{}}\\hspace*{{{indented * 0.5:g}em}}{latex_text(line)}")
    return "{\\footnotesize\\ttfamily\\raggedright\n" + "\\\\\n".join(lines) + "\n\n}"
