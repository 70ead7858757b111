"""Built-in backends by what their strategy does: one that is registered takes part in the tests by itself."""

from harness.backends import registry
from harness.backends.strategy import StrategyKind


def strategy(name: str) -> StrategyKind:
    found = registry.BUILT_IN[name].strategy
    assert found is not None
    return found


def _of_route(route: str) -> tuple[str, ...]:
    elsewhere = (registry.REFERENCE, *HYBRID, *SEQUENCE, *PIPELINED, *TENSOR)
    return tuple(
        name for name in registry.BUILT_IN if strategy(name).route == route and name not in elsewhere
    )


HYBRID = tuple(name for name in registry.BUILT_IN if strategy(name).facts.has_replicas)
"""They need two replicas of two shards."""
SEQUENCE = tuple(name for name in registry.BUILT_IN if strategy(name).sequence is not None)
"""Their ranks divide samples, of models whose attention torch computes in one kernel."""
PIPELINED = tuple(name for name in registry.BUILT_IN if strategy(name).facts.cuts_layers)
"""Their ranks hold different layers, of models whose stages can be cut."""
MULTIPLYING = tuple(name for name in SEQUENCE if strategy(name).multiplies_gradients)
"""Their gradients are too large unless they are corrected."""
TENSOR = tuple(name for name in registry.BUILT_IN if registry.mesh_of(name, 4).size("tensor") > 1)
"""Their ranks cut the layers of Llama-like models."""
NATIVE = _of_route("native")
"""They run on two ranks of a CPU."""
THROUGH_ACCELERATE = tuple(
    name for name in _of_route("accelerate") if strategy(name).family not in ("fsdp1", "fsdp2")
)
"""The same; Accelerate's FSDP needs a device."""
EACH_MICRO_STEP = tuple(
    f"{name}:sync_each_batch=true"
    for name in (*NATIVE, *HYBRID, *THROUGH_ACCELERATE, "trainer-ddp")
    if "sync_each_batch" in type(registry.create(name).options).model_fields
)
"""They reduce gradients in every micro-step, and could wait for the last one."""
DATA_PARALLEL = tuple(name for name in registry.BUILT_IN if name not in (*PIPELINED, *TENSOR))
"""Ranks hold the same layers, or shards of them, and samples of their own; the reference too."""
