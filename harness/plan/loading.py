"""Host memory that the ranks of a node need to load the initial weights; it knows nothing of steps."""

from __future__ import annotations

from harness.backends.model_source import Loading
from harness.forms.dtypes import COMPUTE, DTYPE_BYTES
from harness.forms.loading import PIECE_ELEMENTS
from harness.forms.model.layout import elements
from harness.plan.scenario import Scenario

BUILT_BYTES = 4
"""Per parameter: `rank.models.model.draw_model` builds in fp32."""


def loading_of(scenario: Scenario) -> Loading:
    """How the ranks load, as `backend.effective.loading` of a record says."""
    model, job = scenario.model, scenario.job
    is_whole = model.whole_because is not None or job.why_whole(scenario.loading) is not None
    efficient = bool(scenario.options.get("cpu_ram_efficient_loading"))
    return scenario.strategy.loading(
        "full" if is_whole else scenario.loading, ranks=scenario.world_size, efficient=efficient
    )


def loading_bytes(scenario: Scenario) -> int:
    """Host memory of the node that needs most while its ranks load; what libraries take comes on top.

    With 'full' each rank builds the whole model. Else a rank holds its part of the weights, on the CPU or
    offloaded, and one unit that it draws or one piece that it reads; the whole model is built once on a node
    if it comes from `model.factory`, and once in all under `cpu_ram_efficient_loading`. Not counted: the
    process that builds a model whole because its initialisation cannot be streamed, or its checkpoint must be
    converted (`rank.loading.weight_files`).
    """
    ranks, how, source = scenario.ranks_of_node, loading_of(scenario), scenario.job.model
    if how == "full":
        return ranks * whole_bytes(scenario)
    if scenario.strategy.through_accelerate:
        return whole_bytes(scenario)
    held = ranks * _weights_on_host(scenario)
    if source.reads_checkpoint:
        return held + ranks * _piece_bytes(scenario)
    if how == "slices" and source.factory is None:
        return held + ranks * _unit_bytes(scenario)
    once = _unit_bytes(scenario) if source.factory is None else whole_bytes(scenario)
    return max(once, held + ranks * _piece_bytes(scenario))


def whole_bytes(scenario: Scenario) -> int:
    """Host memory of one rank that builds the whole model.

    A tied tensor that is drawn exists under each of its names until they are tied. At a low precision weights
    are rounded one after the other, which holds the largest once in the low precision and once more in fp32.
    """
    layout, source = scenario.model.layout, scenario.job.model
    numel = {parameter.name: parameter.numel for parameter in layout.parameters}
    is_drawn = source.factory is None and not source.reads_checkpoint
    untied = BUILT_BYTES * sum(numel.get(first, 0) for first in layout.tied.values()) if is_drawn else 0
    precision, rounded = scenario.job.training.held_precision, 0
    if precision != "fp32":
        rounded = max(numel.values()) * (DTYPE_BYTES[COMPUTE[precision]] + BUILT_BYTES)
    return BUILT_BYTES * layout.parameter_count + max(untied, rounded)


def _unit_bytes(scenario: Scenario) -> int:
    """The largest block or parameter in fp32: what is drawn before parts of it are kept."""
    layout = scenario.model.layout
    blocks = [elements(tensors) for name, tensors in layout.units() if name]
    return BUILT_BYTES * max([*blocks, *(parameter.numel for parameter in layout.parameters)])


def _piece_bytes(scenario: Scenario) -> int:
    """What is read of a file at once, and its copy in the compute dtype."""
    largest = max(parameter.numel for parameter in scenario.model.layout.parameters)
    width = DTYPE_BYTES[COMPUTE[scenario.job.training.held_precision]]
    return min(PIECE_ELEMENTS, largest) * (BUILT_BYTES + width)


def _weights_on_host(scenario: Scenario) -> int:
    """A rank's part of the weights, if it lies there."""
    on_cpu = scenario.torch_device == "cpu"
    terms = scenario.states.terms
    return sum(term.bytes for term in terms if term.kind == "weights" and (on_cpu or term.host))
