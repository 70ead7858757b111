"""The units that Accelerate 1.15 makes of a model under FSDP2 besides its blocks."""

from __future__ import annotations

from harness.theory.layout import Layout, Tensor

UnitTensors = tuple[list[Tensor], bool, bool]
"""Parameters of a unit, whether it stays gathered between forward and backward pass, and whether torch's
prefetch takes it for another one (`harness.theory.fsdp.Unit`)."""


def units_around_blocks(layout: Layout) -> list[UnitTensors]:
    """`fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py): embedding, last norm with output, the rest.

    An untied embedding is resharded as the blocks are. The last norm and the output layer are one unit that
    is not, with the embedding if it is tied; nor is the root, for which torch decides.
    """
    outside = dict(layout.units()).get("", [])
    if not outside:
        return []
    embedding = _module(outside[0])
    norm = _last_norm(outside[1:])
    last = [t for t in outside if _module(t) == norm or _is_output(t)]
    rest = [t for t in outside if t not in last and _module(t) != embedding]
    embedded = [t for t in outside if _module(t) == embedding]
    if outside[0].name in layout.tied.values():
        found = [([*last, *embedded], True, False), (rest, True, False)]
    else:
        # The backward pass gives the last unit back at its beginning, the root only at its end.
        found = [(embedded, False, False), (last, True, not rest), (rest, True, False)]
    return [unit for unit in found if unit[0]]


def _module(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _is_output(tensor: Tensor) -> bool:
    """The output layer lies next to the base model, as 'lm_head.weight' does, and not within it."""
    return tensor.name.count(".") == 1


def _last_norm(outside: list[Tensor]) -> str | None:
    """Accelerate looks among the base model's direct children, as 'model.norm.weight' is."""
    norms = [_module(t) for t in outside if len(t.shape) == 1 and t.name.count(".") == 2]
    return norms[-1] if norms else None
