"""Text and data made harmless for HTML."""

from __future__ import annotations

import html
import json
from typing import Any

from harness.report.formats import one_line


def text_html(text: str) -> str:
    """Plain text on one line, for an element or an attribute."""
    return html.escape(one_line(text))


def lines_html(text: str) -> str:
    """Plain text with its line breaks and spaces."""
    return html.escape("\n".join(one_line(line, keep_spaces=True) for line in text.rstrip().split("\n")))


def data_script(name: str, value: Any) -> str:
    """A value as JSON that the page's scripts read by this id, on one line.

    Within a script element only '<' could end it.
    """
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{text_html(name)}">{text}</script>'
