"""Digests the weights with which a rank starts, and sums up the host memory of its setup."""

from __future__ import annotations

from harness.backends.base import Engine
from harness.record import SetupMemoryPart, WeightsPart
from harness.run_directory.request import RunRequest
from harness.worker.communication import CommunicationCounter
from harness.worker.host_peak import HostPeak
from harness.worker.resume import require_saved_weights
from harness.worker.weights import combined, digest_share


def digest_initial_weights(
    request: RunRequest, engine: Engine, counter: CommunicationCounter, of_engine: HostPeak
) -> tuple[WeightsPart | None, SetupMemoryPart | None]:
    """Each None where it was not asked for or cannot be measured; a collective.

    of_engine: watched the engine being prepared. Raises HarnessError if others were loaded.
    """
    weights = None
    with HostPeak() as of_digest:
        if request.measure.weight_digests:
            with counter.counting("digest"):
                share = digest_share(engine)
            weights = combined(share, engine)
    require_saved_weights(request.resume, weights)
    if of_engine.before_bytes is None:
        return weights, None
    return weights, SetupMemoryPart(
        before_bytes=of_engine.before_bytes,
        engine_peak_bytes=of_engine.peak_bytes or 0,
        engine_bytes=of_engine.after_bytes or 0,
        digest_peak_bytes=of_digest.peak_bytes or 0,
    )
