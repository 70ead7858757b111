"""Names and shapes of the tensors that transformers builds, by model type, in closed form."""

from harness.plan.architectures.architecture import Architecture, Values
from harness.plan.architectures.encoders import ENCODERS
from harness.plan.architectures.gpt import GPT_LIKE
from harness.plan.architectures.llama import LLAMA_LIKE, WITH_EXPERTS

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "mixture_of_experts"]

ARCHITECTURES = {entry.model_type: entry for entry in (*LLAMA_LIKE, *WITH_EXPERTS, *GPT_LIKE, *ENCODERS)}
MIXTURES = tuple(entry.model_type for entry in WITH_EXPERTS)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configurations of transformers give a number of experts."""


def find_architecture(model_type: str) -> Architecture | None:
    """The closed form of a model type; None: there is none here."""
    return ARCHITECTURES.get(model_type)


def mixture_of_experts(config: Values) -> bool:
    """Whether tokens pass only some of the parameters, so that activations and speed are not predicted."""
    return any((config.get(key) or 0) > 1 for key in EXPERTS)
