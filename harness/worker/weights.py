"""A digest of all master weights, equal for equal weights whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
import math

from harness.backends.base import Engine
from harness.record import WeightsPart
from harness.worker.sketch import sketch


def digest_weights(engine: Engine) -> WeightsPart:
    """SHA-256 over the sorted (name, SHA-256 of the fp32 bytes), L2 norm, count, a sketch of each.

    A collective: every rank calls it. The norm is accumulated in fp64. Without a sketch where a weight is
    not finite.
    """
    digests = []
    sketches: dict[str, list[float]] = {}
    count = 0
    for name, tensor in engine.full_parameters():
        contiguous = tensor.contiguous()
        content = hashlib.sha256(contiguous.numpy().tobytes()).hexdigest()
        digests.append(f"{name} {tuple(tensor.shape)} {content}")
        sketches[name] = sketch(name, contiguous)
        count += tensor.numel()
    digest = hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
    norm = sum(values[0] ** 2 for values in sketches.values()) ** 0.5
    finite = all(math.isfinite(value) for values in sketches.values() for value in values)
    return WeightsPart(
        digest=digest, l2_norm=norm, parameter_count=count, sketch=sketches if finite else None
    )
