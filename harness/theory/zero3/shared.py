"""How often ZeRO stage 3 gathers weights that several modules share, or whose module runs several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.theory.layout import Layout, Tensor, Use, ceil_to
from harness.theory.terms import Collective, gathered
from harness.theory.workload import Role, Workload

SHARED_TERM = "shared weights gathered at each use"


def uses_of(layout: Layout, tensor: Tensor) -> tuple[Use, ...] | None:
    """Uses of a parameter; None: one, or one by each of its names."""
    return None if layout.uses is None else layout.uses.get(tensor.name)


def uses_unknown(workload: Workload) -> str | None:
    """Why it is not known how often weights are gathered that are gathered at each use; None: it is."""
    layout = workload.layout
    if layout.uses is None:
        return (
            "which modules of the model run, and how often, could not be found out: its loss does not run on "
            "tensors without values (torch's meta device)"
        )
    names = Counter(layout.tied.values())
    for first, further in names.items():
        if further > 1 and first not in layout.uses:
            return (
                f"'{first}' is the weight of more than two modules: which run, and which find it gathered by "
                "another in the backward pass, is not known from their names"
            )
    blocks = tuple(f"{block}." for block in layout.blocks)
    if workload.activation_checkpointing and any(name.startswith(blocks) for name in layout.uses):
        return "what ZeRO-3 gathers to recompute a block whose weights are shared was not looked up"
    return None


def shared_gathers(
    workload: Workload, phase: str, fetched: Sequence[Tensor], passes: int, *, first: Role = "world"
) -> list[Collective]:
    """Of parameters with uses of their own, in one pass of a phase; `first`: the group of their first use."""
    layout, found = workload.layout, []
    counted: set[str] = set()
    for tensor in fetched:
        uses = uses_of(layout, tensor)
        times = 0 if uses is None else _gathers(uses, backward=phase == "backward")
        if not times:
            continue
        module = tensor.name.rpartition(".")[0]
        size = tensor.numel, ceil_to(tensor.numel, workload.world_size)
        for count, role in ((1, first), (times - 1, workload.regathered_in)):
            found += gathered(
                phase,
                SHARED_TERM,
                [size] * count,
                workload.held_dtype(tensor),
                # A module gathers all of its parameters in one call.
                calls=0 if module in counted else count,
                passes=passes,
                role=role,
            )
        counted.add(module)
    return found


def _gathers(uses: Sequence[Use], *, backward: bool) -> int:
    """A module gathers what it finds released, and releases it behind itself.

    In the backward pass what releases hangs on the module's inputs (`_post_backward_module_hook`,
    parameter_offload.py): without a gradient there, as for token ids, the weight stays gathered until the
    pass has ended (`release_backward_leftovers`), and other modules find it.
    """
    if not backward:
        return len(uses)
    times = 0
    for use in reversed(uses):
        if use == "forward only":
            continue
        times += 1
        if use == "inputs without gradient":
            break
    return times
