"""Third-party backends whose ranks divide samples, with a known trap each."""

from __future__ import annotations

from unittest.mock import patch

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext
from harness.backends.sequence import context_parallel
from harness.backends.sequence.context_parallel import ContextParallelBackend


class RingAroundEagerAttention(ContextParallelBackend):
    """`context_parallel` entered without asking what the model's attention is."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        with patch.object(context_parallel, "require_ring_attention"):
            return super().prepare(build_model, build_optimizer, context)
