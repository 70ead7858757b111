"""Errors that a user can act on: one line that says what was given, what is allowed, what to do."""

from __future__ import annotations

from harness.bounds import MOST_MESSAGE_CHARACTERS


class HarnessError(Exception):
    """Shown as one line; the command line exits with 1. What is too long loses its middle."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(" ".join(message.split()) if "\n" in message else message))


class JobError(HarnessError):
    """The job itself is at fault, so no backend could run it."""


def shortened(text: str) -> str:
    """The begin, which says what was given, and the end, which says what to do."""
    left_out = len(text) - MOST_MESSAGE_CHARACTERS
    if left_out <= 0:
        return text
    third = MOST_MESSAGE_CHARACTERS // 3
    return f"{text[: 2 * third]} [{left_out} characters left out] {text[-third:]}"
