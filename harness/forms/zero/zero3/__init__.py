"""DeepSpeed 0.19.8, ZeRO stage 3, natively and through Accelerate."""

from harness.forms.zero.zero3.collectives import collectives
from harness.forms.zero.zero3.states import model_states, updated_tensors

__all__ = ["collectives", "model_states", "updated_tensors"]
