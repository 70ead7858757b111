"""Where a strategy gets the model from: built whole, or as a skeleton that it fills piece by piece.

Importing this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

AskedLoading = Literal["slices", "full"]
"""How initial weights reach ranks that shard them: each draws them module by module and keeps its part, or
reads its part of files; or every rank builds the whole model, then shards it."""
Loading = Literal[AskedLoading, "broadcast"]
"""The same, and where a library broadcasts what rank 0 holds."""

PIECE_ELEMENTS = 4 * 2**20
"""Of a parameter, read at once."""
WHOLE_ALONE = "this source builds the whole model only"


class ModelSource(ABC):
    """What `Backend.prepare` is given as `build_model`: calling it returns the whole model.

    A strategy that shards weights should not call it unless `loading` is 'full', but build the `skeleton`,
    shard that, `fill` what it keeps of each parameter, and call `filled`.
    """

    loading: AskedLoading
    """What was asked for."""

    @abstractmethod
    def __call__(self) -> nn.Module:
        """The whole model on the CPU, equal on every rank."""

    # Where `loading` is 'full' nobody asks for these: a function that returns a module does not say where a
    # part of one parameter would come from.
    def skeleton(self) -> nn.Module:
        """The model with its parameters on the meta device; buffers hold their values on the CPU.

        A collective where `loading` is not 'full'.
        """
        raise NotImplementedError(WHOLE_ALONE)

    def fill(self, target: Tensor, name: str, start: int) -> None:
        """Have initial weights of one parameter written to `target`, a 1-D tensor of any floating dtype and
        device, by the time that `filled` returns.

        They are elements `start` to `start + target.numel()` of the flattened parameter.
        """
        raise NotImplementedError(WHOLE_ALONE)

    def filled(self) -> None:
        """Called after the last `fill`."""
        raise NotImplementedError(WHOLE_ALONE)


class _Callable(ModelSource):
    loading: AskedLoading = "full"

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build

    def __call__(self) -> nn.Module:
        return self._build()


def model_source(build_model: Callable[[], nn.Module]) -> ModelSource:
    """The source itself, or one that builds the whole model from a function that returns it."""
    return build_model if isinstance(build_model, ModelSource) else _Callable(build_model)
