"""What every part of a record is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import StringConstraints

from harness.files import Stored

HashSum = Annotated[str, StringConstraints(pattern="^[0-9a-f]{1,16}$")]
"""A sum of hashes modulo 2^64, hexadecimal."""


class Part(Stored):
    """A part of a record: frozen; keys of a newer minor version are kept out by the schema version."""

    @classmethod
    def shared(cls, source: object) -> dict[str, Any]:
        """What an object has under the names of fields of this part; nothing of None."""
        return {name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)}
