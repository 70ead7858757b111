"""What every part of a record is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of a record: frozen; keys of a newer minor version are kept out by the schema version."""

    model_config = ConfigDict(extra="forbid", frozen=True)
