"""Colours of every picture: one for a strategy family, one for a kind of memory, one for a part of a step.

Distinct for colour-blind readers, visible on white and on dark pages. Names stand next to the marks, so that
no picture needs its colours to be understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.backends.strategy import Sharding, StrategyKind
from harness.record import Record
from harness.record.workload import known_strategy

GREY = "#7A7A7A"
"""Text and axes: above 4:1 in contrast on white and on black, as the background is transparent."""
FAINT = "rgba(122,122,122,0.25)"
"""What recedes, on any page."""
LIMIT = "#D9483B"
"""Lines that must not be crossed."""
FAMILIES = {
    "single": ("reference", "#8C8C8C"),
    "ddp": ("DDP", "#0A74B8"),
    "zero0": ("ZeRO-0", "#D69A1E"),
    "zero1": ("ZeRO-1", "#CC8400"),
    "zero2": ("ZeRO-2", "#B26800"),
    "zero3": ("ZeRO-3", "#9C5300"),
    "fsdp2": ("FSDP2", "#00966C"),
    "fsdp1": ("FSDP1", "#B8569A"),
    "pipeline": ("pipeline", "#7A4A2B"),
    "tensor": ("tensor parallel", "#7A5CC2"),
    "fsdp2-tensor": ("FSDP2 with tensor parallel", "#4C8F3A"),
    "other": ("other", "#5D7F99"),
}
"""Name and colour of each family of strategies; ZeRO's stages are shades of one hue."""
KINDS = {
    "weights": "#4E41A8",
    "gradients": "#766AC8",
    "masters": "#9E95DC",
    "optimizer": "#C6C0EE",
    "activations": FAINT,
}
"""Kinds of memory in the order of a bar: model states in shades of one hue, then what is none."""
PHASES = {
    "data": "#0D3B4A",
    "forward": "#1B7391",
    "backward": "#4A9AB5",
    "clipping and update": "#A5D3E2",
}
EXPOSED = "exposed communication"
ACTIVITIES = {"computing": "#14607A", EXPOSED: "#E58A2E", "idle": FAINT}
COPIES_ALONE = "copies alone"
DEVICE_ACTIVITIES = {
    "computing": ACTIVITIES["computing"],
    EXPOSED: ACTIVITIES[EXPOSED],
    COPIES_ALONE: "#8C6BB1",
    "idle": FAINT,
}
"""Of a device, whose copies are neither."""
VERDICTS = {"agrees": GREY, "not judged": "#ABABAB"}
"""Of loss curves that are drawn as one band."""
CURVES = ("#0A74B8", "#CC8400", "#00966C", "#B8569A", "#4FA6D8", "#C4511A", "#8A6D00")
"""For curves that belong to no family."""
SHAPES: dict[Sharding, str] = {
    "single": "circle", "none": "triangle-up", "grad-op": "square", "full-shard": "circle",
    "hybrid": "diamond", "hybrid-grad-op": "cross", "pipeline": "triangle-right",
}  # fmt: skip
NATIVE_OPACITY, WRAPPED_OPACITY = 0.62, 0.14


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a strategy is drawn in every picture."""

    family: str
    colour: str
    is_wrapped: bool
    """Through Accelerate: the colour of what it wraps, but only outlined, or dashed."""
    shape: str

    def fields(self) -> dict[str, Any]:
        """The same as fields of a row."""
        return {
            "family": self.family,
            "colour": self.colour,
            "opacity": WRAPPED_OPACITY if self.is_wrapped else NATIVE_OPACITY,
            "dash": [5, 3] if self.is_wrapped else [1, 0],
            "shape": self.shape,
        }


def look_of(strategy: StrategyKind | None) -> Look:
    """The look of a strategy; None: of one that nothing is known of."""
    if strategy is None:
        return Look(family="other", colour=FAMILIES["other"][1], is_wrapped=False, shape="triangle-down")
    key = strategy.family if strategy.zero_stage is None else f"zero{strategy.zero_stage}"
    family, colour = FAMILIES.get(key, FAMILIES["other"])
    wrapped = strategy.through_accelerate
    return Look(family=family, colour=colour, is_wrapped=wrapped, shape=SHAPES[strategy.sharding])


def look_of_record(record: Record) -> Look:
    """The look of the strategy that a run used."""
    return look_of(known_strategy(record))
