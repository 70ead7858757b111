"""Names and shapes of the tensors that transformers builds, by model type, in closed form."""

from harness.planning.architectures.architecture import Architecture
from harness.planning.architectures.catalogue import ARCHITECTURES, find_architecture, mixture_of_experts

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "mixture_of_experts"]
