"""What is said of optimizers besides their names. Importable without torch."""

from __future__ import annotations

from typing import Literal

LOW_BIT = ("adamw-8bit", "adamw-8bit-bnb")
"""Kinds that keep moments in 8 bits."""
NewtonSchulz = Literal["fp32", "bf16"]
"""Precision in which Muon orthogonalises."""
