"""What all sections of a configuration share."""

from __future__ import annotations

from harness.backends.values import TypedValues


class Section(TypedValues):
    """A part of a configuration: frozen, unknown keys refused."""
