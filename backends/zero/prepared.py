"""DeepSpeed as a library above it prepares it, from the configuration of the native backend."""

from __future__ import annotations

from abc import abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar

from torch import nn

from harness.backends.base import BuildModel, BuildOptimizer, Engine, SetupContext, Unsupported
from harness.backends.libraries.extensions import runs_cpu_adam
from harness.backends.model.blocks import parameter_count
from harness.backends.model.floating_inputs import refuse_complex
from harness.backends.zero.backend import ZeroBackend, start_deepspeed
from harness.backends.zero.engine import ZeroEngine


class PreparedZeroBackend(ZeroBackend):
    """One ZeRO stage; a library is given the model and the configuration."""

    library: ClassVar[str]
    """The package that prepares the engine."""

    def _unmet_adam(self) -> list[str]:
        if not runs_cpu_adam(self.zero_options):
            return []
        return [
            f"{self.library} is given the job's AdamW; adam=deepspeed runs under the native ZeRO backends"
        ]

    @abstractmethod
    def _prepare(
        self,
        model: nn.Module,
        config: dict[str, Any],
        build_optimizer: BuildOptimizer,
        context: SetupContext,
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Who drives the engine, the engine, and the configuration as DeepSpeed was given it."""

    @abstractmethod
    def _engine(self, driver: Any, *arguments: Any) -> ZeroEngine:
        """The harness's engine around DeepSpeed's; the arguments are those of ZeroEngine."""

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        deepspeed = start_deepspeed(context)
        # Before the library has the configuration: with one of stage 3 in force transformers builds
        # partitioned models and draws other initial weights.
        model = build_model()
        refuse_complex(model, "DeepSpeed")
        count = parameter_count(model)
        config = self._configuration(model, count, context)
        driver, engine, handed_over = self._prepare(model, config, build_optimizer, context)
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise Unsupported(
                f"{self.library} {version(self.library)} prepared {type(engine).__name__}, not DeepSpeed"
            )
        return self._engine(driver, engine, context, handed_over, self.stage, count)
