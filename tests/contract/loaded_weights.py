"""On real ranks: the weights with which engines start, however they were loaded."""

from __future__ import annotations

import hashlib
from itertools import product

from harness.backends.base import Backend, World
from harness.backends.model_source import Loading
from harness.record import LayoutPart, ModelPart
from tests.contract.communication import VolumeCase, prepare

Loaded = tuple[str | None, dict[str, str], LayoutPart, ModelPart]
LOADINGS: tuple[Loading, ...] = ("full", "slices", "broadcast")
CASES = [
    VolumeCase(1, precision, "like-for-like", tied=tied, clipping=None, family=family)
    for precision, (family, tied) in product(("fp32", "bf16-mixed"), (("llama", False), ("gpt2", True)))
]
"""The widths of the second family divide by no number of ranks."""
FEW = [CASES[0], CASES[3]]


def loaded_weights(backend: Backend, world: World) -> list[list[Loaded]]:
    """For each case and loading: what the engine says of it, a digest by parameter, and the bare model."""
    return [[_load(backend, world, case, loading) for loading in LOADINGS] for case in CASES]


def few_loaded_weights(backend: Backend, world: World) -> list[list[Loaded]]:
    """The same of each precision and family once."""
    return [[_load(backend, world, case, loading) for loading in LOADINGS] for case in FEW]


def _load(backend: Backend, world: World, case: VolumeCase, loading: Loading) -> Loaded:
    engine, layout, model = prepare(backend, world, case, loading)
    digests = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in engine.full_parameters()
    }
    said = engine.effective().loading
    engine.close()
    return said, digests, layout, model
