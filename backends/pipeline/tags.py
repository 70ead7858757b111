"""Tags by which messages between stages say what they carry, whoever counts them.

Importing this module does not import torch.
"""

from __future__ import annotations

ACTIVATIONS = 1
GRADIENTS = 2
PHASES = {ACTIVATIONS: "forward", GRADIENTS: "backward"}
"""The pass that a message belongs to: a schedule runs both at a time, and sends both in one batch."""
