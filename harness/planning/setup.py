"""Host memory while a run is set up: every rank builds the whole model before a library cuts it."""

from __future__ import annotations

from harness.forms.dtypes import COMPUTE, DTYPE_BYTES
from harness.planning.scenario import Scenario

BUILT_BYTES = 4
"""Per parameter: `worker.model.build_model` builds in fp32."""


def setup_bytes(scenario: Scenario) -> int:
    """Host memory of one rank as it builds the model; what its library adds comes on top.

    At a low precision the weights are rounded one parameter after the other, which holds the largest once in
    the low precision and once more in fp32.
    """
    precision = scenario.job.training.held_precision
    parameters = scenario.model.layout.parameters
    built = BUILT_BYTES * sum(parameter.numel for parameter in parameters)
    if precision == "fp32":
        return built
    largest = max(parameter.numel for parameter in parameters)
    return built + largest * (DTYPE_BYTES[COMPUTE[precision]] + BUILT_BYTES)
