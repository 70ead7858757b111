"""What a rank holds of each parameter: the one form in which all strategies save and load.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .refusals import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states that have the shape of their parameter, by torch's names."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Adjacent columns of a matrix: what a rank holds of one whose second dimension is cut."""

    first: int
    count: int

    def spans(self, start: int, end: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Where elements `start` to `end` of the flattened columns lie in a matrix of `width` columns.

        Yields (position among the columns, first element in the matrix, elements) row by row.
        """
        while start < end:
            row, column = divmod(start, self.count)
            length = min(self.count - column, end - start)
            yield start, row * width + self.first + column, length
            start += length


@dataclass(frozen=True, kw_only=True)
class Piece:
    """This rank's part of one parameter: a range of its flattened elements, as live tensors.

    Every rank has one for every parameter, in the same order; its tensors may have no elements. Writing to
    them writes to the master weights and the optimizer states.
    """

    name: str
    """As in the bare model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element, of the flattened parameter, or of its flattened `columns`."""
    weight: Tensor
    """The master weights, 1-D."""
    moments: dict[str, Tensor]
    """By the names in `MOMENTS`: 1-D, as long as `weight`. Empty for a parameter that is not trained, and
    where only weights were asked for."""
    columns: Columns | None = None
    """Those of a matrix that the range lies in; None: all."""
    copies: int = 1
    """Ranks that hold this same range."""
    copy: int = 0
    """This rank's place among them."""

    def own_range(self) -> tuple[int, int]:
        """What this rank writes of its range, as positions in it: ranks with the same range divide it."""
        count = self.weight.numel()
        return count * self.copy // self.copies, count * (self.copy + 1) // self.copies


@dataclass(frozen=True, kw_only=True)
class OptimizerProgress:
    """What continues besides weights and moments."""

    updates: int
    """Updates that the optimizer made: its step count."""
    loss_scale: float | None = None
    """The loss scale in force; None: no scaler."""
    clean_steps: int | None = None
    """Steps without overflow since the scale last changed; None: no scaler."""


class Portable:
    """The part of an engine's contract that portable checkpoints need; a backend may leave it out."""

    def native_format(self) -> str:
        """Name of the format of `save`, equal for engines that read each other's.

        The default is that of this class alone.
        """
        return f"{type(self).__module__}.{type(self).__name__}"

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds of each parameter's master weights and moments: live tensors.

        The same parameters in the same order on every rank. States that do not exist yet are made, of zeros.
        Portable checkpoints are written from these and read into them. The default raises Unsupported.
        """
        raise Unsupported(
            f"{type(self).__name__} does not list the pieces of its parameters (`Engine.pieces`): it has "
            "native checkpoints only"
        )

    def weight_pieces(self) -> Iterator[Piece]:
        """What this rank holds of each parameter's master weights, without moments; nothing is communicated.

        Digests are taken of these. The default raises Unsupported: weights are then gathered by
        `full_parameters`.
        """
        raise Unsupported(f"{type(self).__name__} does not list the pieces of its weights")

    def weights_in_use(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (masters, weights that forward passes use) of what this rank updates, where these are copies.

        1-D, equally long and live; nothing is communicated. The default yields nothing: masters are in use
        themselves, or are cast anew in each pass.
        """
        return iter(())

    def progress(self) -> OptimizerProgress:
        """What continues besides weights and moments. The default raises Unsupported."""
        raise Unsupported(f"{type(self).__name__} does not report its step count (`Engine.progress`)")

    def continue_from(self, progress: OptimizerProgress) -> None:
        """Take over the progress of a checkpoint after `pieces` were written to; a collective.

        Weights in use that are copies of the masters are made anew. The default raises Unsupported.
        """
        raise Unsupported(f"{type(self).__name__} cannot set its step count (`Engine.continue_from`)")

    def rehearse(self, batch: dict[str, Tensor]) -> None:
        """Bring about what a first step leaves behind; called once, after a checkpoint was loaded.

        A collective, with a batch that trains nothing. The default does nothing.
        """


def require_same_parameters(pieces: Sequence[Piece], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless a checkpoint holds exactly these parameters in these shapes."""
    own = {piece.name: piece.shape for piece in pieces}
    for name in sorted(own.keys() | shapes.keys()):
        if own.get(name) != shapes.get(name):
            raise ValueError(
                f"parameter '{name}': the checkpoint has {_words(shapes.get(name))}, the model "
                f"{_words(own.get(name))}"
            )


def _words(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"shape {list(shape)}"
