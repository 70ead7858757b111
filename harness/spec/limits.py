"""How long a run and its ranks may take before they are ended."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from harness.spec.section import Section


class Limits(Section):
    """Times after which a run is ended and recorded as timeout, with where each rank was."""

    timeout_seconds: PositiveFloat | None = Field(
        None,
        description="seconds after which a run is ended and recorded as timeout; default: 1800 and three "
        "times what its training steps need at their measured pace, once there are two",
    )
    stuck_after_steps: PositiveFloat = Field(
        10.0, description="with the next setting: a run is ended when no rank moved for so many median steps"
    )
    stuck_after_seconds: PositiveFloat = Field(
        30.0, description="seconds added to those steps; the record then shows where each rank was"
    )
    phase_timeout_seconds: PositiveFloat = Field(
        570.0,
        description="the same outside of training steps and evaluations: no rank moved for so many seconds "
        "of the start or a checkpoint",
    )
    start_timeout_seconds: PositiveFloat = Field(
        60.0,
        description="a run is ended when a rank stays for so many seconds in a phase of the start that "
        "others have left, and for three times as long as they needed",
    )
    idle_timeout_seconds: PositiveFloat = Field(
        60.0,
        description="outside of training steps and evaluations a run is ended when for so many seconds no "
        "rank moved, computed, read or wrote (where all ranks are on one machine)",
    )

    @classmethod
    def of(cls, runtime: Limits) -> Limits:
        """These settings alone, of a section that has more."""
        return cls.model_validate(runtime.model_dump(include=set(cls.model_fields)))

    @property
    def collective_seconds(self) -> float:
        """After these a collective gives up by itself, later than who watches the ranks, and says less."""
        return max(600.0, self.phase_timeout_seconds + 30.0)
