"""What DeepSpeed has and no run can have: each with its reason, which a table shows in place of figures.

Importable without torch and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """One feature, asked for by an option."""

    label: str
    """Backend and option that ask for it; of an option with a number, one of them."""
    name: str
    """As DeepSpeed's documents name it."""
    why: str

    @property
    def backend(self) -> str:
        return self.label.partition(":")[0]

    @property
    def option(self) -> str:
        return self.label.partition(":")[2].partition("=")[0]

    @property
    def value(self) -> str:
        return self.label.partition("=")[2]

    @property
    def reason(self) -> str:
        """With the installed version."""
        try:
            installed = version("deepspeed")
        except PackageNotFoundError:
            return f"{self.name}: {self.why}"
        return f"{self.name}, DeepSpeed {installed}: {self.why}"


NOT_RUN = (
    NotRun(
        label="zero3:qwz=true", name="quantized weights (ZeRO++ qwZ)",
        why="its quantizer is a CUDA kernel (QuantizerBuilder), and what it rounds has no closed form here",
    ),
    NotRun(
        label="zero3:qgz=true", name="quantized gradients (ZeRO++ qgZ)",
        why="its quantizer is a CUDA kernel (QuantizerBuilder), and what it rounds has no closed form here",
    ),
    NotRun(
        label="zero3:mics=2", name="MiCS",
        why="removed from DeepSpeed (0.19.8 refuses 'mics_shard_size'); fsdp-hybrid and fsdp1-hybrid shard "
        "within groups of ranks and replicate across them as it did",
    ),
    NotRun(
        label="zero3:deepcompile=true", name="DeepCompile",
        why="it exists on CUDA only (is_deepcompile_supported), and what its passes gather ahead has no "
        "closed form here",
    ),
    NotRun(
        label="zero3:offload=superoffload", name="SuperOffload",
        why="it asserts CUDA (superoffload_stage3.py), and was not run on a GPU here",
    ),
    NotRun(
        label="zero2:offload=zenflow", name="ZenFlow",
        why="it scrambles the model: after `initialize` (seen in 0.19.8 at stage 2) matrices hold the bytes "
        "of their transposes, so that another model trains; use offload=optimizer",
    ),
)  # fmt: skip


def reasons_not_run(options: Mapping[str, object]) -> list[str]:
    """Why no run can have these options of a backend; empty: nothing speaks against it."""
    return [feature.reason for feature in NOT_RUN if _asks_for(feature, options.get(feature.option))]


def _asks_for(feature: NotRun, given: object) -> bool:
    if feature.option == "offload":
        return given == feature.value
    return given is not None and given is not False
