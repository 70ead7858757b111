"""The configuration file of another tool that a run's settings came from."""

from __future__ import annotations

from typing import Any, Literal

from harness.record.part import Part

FileKind = Literal["accelerate", "deepspeed"]
GivenMode = Literal["like-for-like", "exactly-as-given"]


class GivenSettingPart(Part):
    """One key of the file and what became of it."""

    key: str
    """Dotted, as in the file."""
    given: Any
    """Its value in the file; None: not given, so that the tool's own default counts."""
    handling: Literal["taken", "pinned"]
    """taken: the run has the value; pinned: it has another one, or the key has no part in a run."""
    used: Any = None
    """What the run has; None: nothing that corresponds to the key."""
    setting: str | None = None
    """The job's setting, or the backend's option, that the key became."""
    reason: str | None = None
    """Why a key was pinned, or what else to know."""


class GivenPart(Part):
    """A file of Accelerate or DeepSpeed, key by key."""

    file: str
    """Its name, without folders."""
    kind: FileKind
    """Which tool reads it."""
    mode: GivenMode
    """like-for-like: job and preset pin what would make rows differ; exactly-as-given: the file wins."""
    sha256: str
    """Digest of the file."""
    settings: list[GivenSettingPart]
    """Every key, in the order of the file, then keys that it does not give, with the tool's defaults."""

    @property
    def pinned(self) -> list[GivenSettingPart]:
        return [setting for setting in self.settings if setting.handling == "pinned"]
