"""Names and shapes of the tensors that transformers builds, by model type, in closed form."""

from harness.plan.architectures.architecture import Architecture
from harness.plan.architectures.catalogue import ARCHITECTURES, find_architecture, mixture_of_experts

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "mixture_of_experts"]
