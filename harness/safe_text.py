"""Text from libraries, third parties and users, made safe to keep and to print."""

from __future__ import annotations

import re

from harness.secret_names import without_named_secrets
from harness.secret_patterns import SECRET_PATTERNS

MOST_MESSAGE_BYTES = 8 * 2**10
MOST_CONSIDERED = 8 * MOST_MESSAGE_BYTES
"""Characters of an exception's message: half of them its beginning, half its end."""
MOST_LOG_TAIL_BYTES = 32 * 2**10

# Control characters but tab and newline, marks that reverse text or break lines, lone surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

QUOTED_TRACEBACK = "Traceback (most recent call last)"


def harmless(text: str) -> str:
    """The text with terminal escapes and characters that reverse or break lines spelled out: \\u001b.

    The spelling is that of JSON, so a JSON document keeps its meaning.
    """
    return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def encodable(text: str) -> str:
    """The text with lone surrogates, which no file in UTF-8 can hold, spelled out."""
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def redacted(text: str) -> str:
    """The text without users and passwords in addresses, tokens, and values that are named as secrets.

    A JSON document stays one.
    """
    lower = text.lower()
    for pattern in SECRET_PATTERNS:
        text = pattern.replaced(text, lower)
    return without_named_secrets(text)


def capped(text: str, most_bytes: int) -> str:
    """The beginning of a text whose UTF-8 form would be longer."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode(errors="ignore") + f" [{len(data) - most_bytes} bytes left out]"


def capped_tail(text: str, most_bytes: int) -> str:
    """The end of a text whose UTF-8 form would be longer."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return f"[{len(data) - most_bytes} bytes left out] " + data[-most_bytes:].decode(errors="ignore")


def described(error: BaseException) -> str:
    """What an exception says, however badly it behaves when it is asked: encodable, redacted, capped.

    Libraries quote tracebacks of other ranks or processes in messages: their first and last lines stay.
    """
    try:
        text = str(error) or repr(error)
    except BaseException as second:  # a third party's __str__ may raise anything
        text = f"{type(error).__name__} (its message cannot be shown: {type(second).__name__})"
    if len(text) > MOST_CONSIDERED:  # patterns of secrets take minutes over 50 MB
        text = f"{text[: MOST_CONSIDERED // 2]}\n{text[-MOST_CONSIDERED // 2 :]}"
    if QUOTED_TRACEBACK in text:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        text = f"{lines[0]} ... {lines[-1]}"
    return capped(redacted(encodable(text)), MOST_MESSAGE_BYTES)
