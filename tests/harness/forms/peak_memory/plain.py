"""A model of equal blocks and a profile without activations: what is left is the strategy's own."""

from __future__ import annotations

from typing import Any

from harness.backends.registry import strategy_of
from harness.forms.activations import ActivationProfile, Gradient, Point, Segment, Size
from harness.forms.layout import Layout, Tensor
from harness.forms.peak_memory.families import peak_moments
from harness.forms.peak_memory.step import PeakMoment, Phase
from harness.forms.workload import Workload

WEIGHT = "mlp.weight"


def layout(blocks: int, elements: int, *, root: int = 0) -> Layout:
    """Blocks of one matrix each, and one outside of them if `root`."""
    names = tuple(f"layers.{index}" for index in range(blocks))
    parameters = [Tensor(f"{name}.{WEIGHT}", (elements, 1), "float32") for name in names]
    if root:
        parameters.append(Tensor("head.weight", (root, 1), "float32"))
    decaying = frozenset(parameter.name for parameter in parameters)
    return Layout(parameters=tuple(parameters), decaying=decaying, blocks=names)


def profile(*, root: bool = False) -> ActivationProfile:
    """Gradients that become ready, and nothing else."""

    def segment(*gradients: str) -> Segment:
        return Segment(
            saved=(), forward=(_moment(0),), backward=(_moment(0), _moment(len(gradients))),
            forward_growth=Size(), held=Size(),
            gradients=tuple(Gradient(parameter=name, live=Size()) for name in gradients),
        )  # fmt: skip

    head = segment("head.weight") if root else segment()
    return ActivationProfile(
        embedding=segment(), block=segment(WEIGHT), head=head, loss=segment(), kept=Size()
    )


def _moment(ready: int) -> Point:
    return Point(module="", live=Size(), ready=ready)


def moments(label: str, model: Layout, ranks: int, **settings: Any) -> dict[Phase, PeakMoment]:
    """Of a CUDA rank under NCCL, unless the settings say otherwise."""
    strategy = strategy_of(label)
    assert strategy is not None
    arguments = {"device": "cuda", "transport": "nccl", "sequence_length": 0, "gradient_clipping": None}
    workload = Workload(layout=model, strategy=strategy, world_size=ranks, **(arguments | settings))
    has_root = any(parameter.name == "head.weight" for parameter in model.parameters)
    return peak_moments(workload, profile(root=has_root))


def held(peak: PeakMoment, kind: str, *, without: str = "") -> int:
    """Bytes of a kind, counters of steps left out."""
    return sum(
        count
        for holding, count in peak.held.items()
        if holding.kind == kind
        and "counter" not in holding.name
        and (not without or without not in holding.name)
    )
