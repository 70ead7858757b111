"""A digest of all master weights, equal for equal weights whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from backends.base import Engine


def digest_weights(engine: Engine) -> dict[str, Any]:
    """SHA-256 over the sorted (name, SHA-256 of the fp32 bytes), L2 norm, and parameter count.

    A collective: every rank calls it. The norm is accumulated in fp64.
    """
    digests = []
    square = 0.0
    count = 0
    for name, tensor in engine.full_parameters():
        contiguous = tensor.contiguous()
        content = hashlib.sha256(contiguous.numpy().tobytes()).hexdigest()
        digests.append(f"{name} {tuple(tensor.shape)} {content}")
        square += float(torch.linalg.vector_norm(contiguous, dtype=torch.float64)) ** 2
        count += tensor.numel()
    whole = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    return {"digest": whole, "l2_norm": square**0.5, "parameter_count": count}
