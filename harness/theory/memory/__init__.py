"""Expected model states of every built-in backend, in closed form, from the layout of the model.

Pure arithmetic without torch. Sources are the libraries' own files, named where a form is taken from them.
"""

from __future__ import annotations

from harness.theory.memory.fsdp1 import fsdp1_states
from harness.theory.memory.fsdp2 import fsdp2_states
from harness.theory.memory.replicated import replicated_states
from harness.theory.memory.terms import ModelStates, Setting
from harness.theory.memory.zero import zero0_states, zero12_states
from harness.theory.memory.zero3 import zero3_states

__all__ = ["ModelStates", "Setting", "expected_states"]


def expected_states(setting: Setting) -> ModelStates | None:
    """What one rank holds after a backward pass, from the second step on; None: a third party's backend."""
    match setting.backend:
        case "single":
            return replicated_states(setting, reducer=False)
        case "ddp":
            return replicated_states(setting, reducer=True)
        case "accelerate-ddp":
            return replicated_states(setting, reducer=setting.world_size > 1)
        case "zero0":
            return zero0_states(setting)
        case "zero1" | "zero2" | "accelerate-zero1" | "accelerate-zero2":
            return zero12_states(setting)
        case "zero3" | "accelerate-zero3":
            return zero3_states(setting)
        case "fsdp" | "fsdp-grad-op" | "fsdp-hybrid" | "accelerate-fsdp":
            return fsdp2_states(setting)
        case "fsdp1" | "fsdp1-grad-op" | "fsdp1-hybrid" | "accelerate-fsdp1":
            return fsdp1_states(setting, sharded=setting.shards > 1)
        case "fsdp1-no-shard":
            return fsdp1_states(setting, sharded=False)
        case _:
            return None
