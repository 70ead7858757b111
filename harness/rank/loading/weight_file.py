"""One safetensors file that is written tensor by tensor and read by slices."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from harness.backends.checkpoints.tensor_files import safetensors_header
from harness.backends.model_source import PIECE_ELEMENTS


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most PIECE_ELEMENTS."""
    for low in range(start, stop, PIECE_ELEMENTS):
        yield low, min(low + PIECE_ELEMENTS, stop)


class WeightWriter:
    """Writes tensors of known names and shapes in any order, in one dtype; none is kept.

    The `safetensors` package writes tensors that are all in memory only. Format: 8 bytes of length, a JSON
    header, the tensors (https://github.com/huggingface/safetensors#format).
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._missing = set(shapes)
        sizes = ((n, dtype, shape, math.prod(shape) * dtype.itemsize) for n, shape in shapes.items())
        header, self._begin, end = safetensors_header(sizes)
        self._file = path.open("wb")
        self._file.write(header)
        self._file.truncate(len(header) + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises OSError, and ValueError for a name that is not expected or was written before."""
        if name not in self._missing:
            raise ValueError(f"'{name}' is not expected, or is there already")
        self._missing.remove(name)
        flat = tensor.detach().reshape(-1)
        self._file.seek(self._begin[name])
        for low, high in pieces(0, flat.numel()):
            self._file.write(flat[low:high].to(self._dtype).view(torch.uint8).numpy().data)

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{len(self._missing)} tensors were not written, such as '{min(self._missing)}'")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a parameter lies."""

    file: Path
    name: str
    """Its name there."""


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """The tensors of a file."""
    from safetensors import safe_open

    with safe_open(os.fspath(path), "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


class WeightReader:
    """Reads parts of tensors; a file's pages are mapped, so they belong to the system's cache."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of the flattened tensor as they are stored, in new memory."""
        stored = self._tensors[name]
        file = self._opened(stored.file)
        part = file.get_slice(stored.name)
        shape = part.get_shape()
        if not shape:
            return file.get_tensor(stored.name).reshape(-1)[start:stop]  # type: ignore[no-any-return]
        row = max(1, math.prod(shape[1:]))
        first, last = start // row, -(-stop // row)
        return part[first:last].reshape(-1)[start - first * row : stop - first * row]  # type: ignore[no-any-return]

    def close(self) -> None:
        self._open.clear()

    def _opened(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(os.fspath(path), "pt")
        return self._open[path]
