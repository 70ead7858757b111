"""When ZeRO stage 3 gathers weights, and which it keeps gathered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.forms.model.layout import Tensor
from harness.forms.workload import Workload
from harness.forms.zero.stages import preset_values

OPTIONS = (*ZERO3_DEFAULTS, "stage3_prefetch_bucket_size", "leaf_module", "memory_efficient_linear")
"""Options of the backend that decide what is gathered when, and what that costs."""


@dataclass(frozen=True, kw_only=True)
class GatherLimits:
    """Limits in elements, as `PartitionedParameterCoordinator` (DeepSpeed 0.19.8) takes them."""

    persistence: int
    live: int
    reuse: int
    ahead: int
    parameters: int
    """Of the model."""
    blocks: tuple[str, ...]
    """Leaf modules: names of those that are gathered at once."""

    @cached_property
    def gathers_each_use(self) -> bool:
        """Whether each module's weights come for its own use and go after it."""
        return not self.reuse and not (self.live and self.ahead)

    @cached_property
    def keeps_for_backward(self) -> bool:
        """Whether everything that the forward pass gathers stays until the backward pass has used it.

        By reuse: no two uses are further apart than all uses together. By prefetch too: what is
        there already when the fetch queue passes its next use is not released (`__params_to_release`), and
        with room for the whole model the queue passes all uses at once.
        """
        uses = 2 * self.parameters
        if self.blocks:
            return False  # not derived: the reuse scan looks into all children of what it compares with
        return self.reuse >= uses or (self.live >= uses and self.ahead > self.parameters)

    def is_persistent(self, tensor: Tensor) -> bool:
        """`mark_persistent_parameters` (parameter_offload.py)."""
        return tensor.numel <= self.persistence

    def unit(self, tensor: Tensor) -> str:
        """The module with which a parameter is gathered."""
        block = next((name for name in self.blocks if tensor.name.startswith(f"{name}.")), None)
        return block or tensor.name.rpartition(".")[0]


def fetching(workload: Workload) -> GatherLimits:
    """Options as typed, else the preset's values, else the library's."""
    return workload.once("fetching", lambda: _fetching(workload))


def _fetching(workload: Workload) -> GatherLimits:
    known = preset_values(workload)

    def value(name: str, default: int) -> int:
        given = workload.options.get(name)
        return int(known.get(name, default) if given is None else given)

    return GatherLimits(
        persistence=value(
            "stage3_param_persistence_threshold", ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        ),
        live=value("stage3_max_live_parameters", ZERO3_DEFAULTS["stage3_max_live_parameters"]),
        reuse=value("stage3_max_reuse_distance", ZERO3_DEFAULTS["stage3_max_reuse_distance"]),
        ahead=value("stage3_prefetch_bucket_size", ZERO3_PREFETCH_ELEMENTS),
        parameters=workload.layout.parameter_count,
        blocks=tuple(workload.layout.blocks) if workload.options.get("leaf_module") == "blocks" else (),
    )


def own_settings(workload: Workload) -> list[str]:
    """Options given that decide about gathering."""
    return [name for name in OPTIONS if workload.options.get(name) is not None]
