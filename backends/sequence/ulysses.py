"""DeepSpeed Ulysses: attention of each rank over whole samples and a part of its heads.

An all-to-all before attention exchanges parts of samples for parts of heads; another one changes back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from harness.backends.base import BuildModel, BuildOptimizer, Effective, Engine, SetupContext, Unsupported
from harness.backends.options import Ulysses12Options
from harness.backends.zero.backend import ZeroBackend
from harness.backends.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from types import ModuleType

KERNEL = "sdpa"
"""The kernel between the two exchanges."""


class UlyssesEngine(ZeroEngine):
    """Gives DeepSpeed the loss that its documentation asks for.

    That loss is the mean over the ranks of a sample, gathered by an operator whose backward pass adds up what
    they return: `sequence` times the gradient of a rank's own part. Stage 3 averages over all ranks
    (`reduce_scatter_coalesced`), which makes it right. Stages 1 and 2 average over data ranks only
    (`average_tensor`, runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.8), which leaves it `sequence` times
    too large; with `corrects` they are given the loss of a rank's own part, which they average rightly.
    """

    corrects = False

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        factor = 1 if self.corrects else self._shared
        super().backward(loss * factor, last_micro_step=last_micro_step)

    def effective(self) -> Effective:
        found = super().effective()
        factor = self._shared if self.stage < 3 and not self.corrects else 1
        details = {"sequence": self._shared, "gradient_factor": factor}
        return replace(found, strategy=f"Ulysses with {found.strategy}", details=found.details | details)

    def close(self) -> None:
        """Take the exchange out of transformers, and DeepSpeed's groups with it."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.utils import groups
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().close()
        del ALL_ATTENTION_FUNCTIONS[KERNEL]
        if hasattr(parallel_state_sp, "_release_sequence_parallel_groups"):  # 0.18 leaves them to the process
            parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None

    @property
    def _shared(self) -> int:
        """Ranks that share samples."""
        return self.context.world.mesh.size("sequence")


class UlyssesBackend(ZeroBackend):
    """ZeRO over all ranks, of which neighbours share samples."""

    engine_class = UlyssesEngine

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        engine = super().prepare(build_model, build_optimizer, context)
        assert isinstance(engine, UlyssesEngine)
        engine.corrects = isinstance(self.options, Ulysses12Options) and self.options.correct_gradients
        return engine

    def _parallel_groups(self, deepspeed: ModuleType, model: nn.Module, context: SetupContext) -> Any:
        """Put the exchange around the model's attention; DeepSpeed's account of the groups of ranks.

        transformers looks kernels up by name for the whole process: what stands under KERNEL is replaced
        until `UlyssesEngine.close`.
        """
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        shared = context.world.mesh.size("sequence")
        if (reason := why_not_exchanged(model, shared)) is not None:
            raise Unsupported(f"DeepSpeed {deepspeed.__version__}, Ulysses: {reason}")
        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=KERNEL,
            sequence_parallel_size=shared,
            micro_batch_size=context.micro_batch_size,
            seq_length_is_variable=True,
        )

    def _configuration(self, model: nn.Module, count: int, context: SetupContext) -> dict[str, Any]:
        return super()._configuration(model, count, context) | {
            "sequence_parallel_size": context.world.mesh.size("sequence")
        }


def why_not_exchanged(model: nn.Module, shared: int) -> str | None:
    """Why attention of a model cannot be divided among ranks by heads; None: it can."""
    name, config = type(model).__name__, getattr(model, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    if kernel != KERNEL:
        return f"Ulysses wraps attention '{KERNEL}', not '{kernel}' of {name}; use model.attention={KERNEL}"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not look its attention up by name, so Ulysses cannot wrap it"
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    if not heads or not keys:
        return f"the configuration of {name} does not say num_attention_heads and num_key_value_heads"
    if heads % shared or (keys % shared and shared % keys):
        return (
            f"{heads} heads and {keys} heads of keys cannot be divided among {shared} ranks; choose a "
            "divisor of both as sequence"
        )
    return None
