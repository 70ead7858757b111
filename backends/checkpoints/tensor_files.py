"""Safetensors files of whole tensors, written in place by the ranks that hold their parts.

No rank gathers anything: the header follows from names, shapes and dtypes, so each rank writes its range of
each tensor at its offset. All ranks must see the same folder. The format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from harness.backends.base import Engine
from harness.backends.piece import MOMENTS, Columns, OptimizerProgress, Piece, require_same_parameters

LARGEST_FILE_BYTES = 5 * 10**9
"""A larger tensor gets a file of its own."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """What this rank holds of a whole tensor, and so writes of it."""

    piece: Piece
    values: Tensor
    """1-D: the piece's weight, or one of its moments."""

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.piece.shape) * self.values.element_size()


@dataclass(frozen=True, kw_only=True)
class _File:
    """One file, planned alike on every rank."""

    path: Path
    header: bytes
    data_bytes: int
    offsets: Mapping[str, int]
    """Of each tensor's first byte, from the start of the file."""


class TensorWriter:
    """Writes tensors as `stem`.safetensors, or as several files with an index, in two steps of all ranks."""

    def __init__(self, folder: Path, stem: str, parts: Sequence[TensorRange]) -> None:
        self._folder = folder
        self._stem = stem
        self._parts = parts
        self._files = _plan(folder, stem, parts)

    def lay_out(self) -> None:
        """Make the files with their headers: one rank, before any of them writes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._files:
            with file.path.open("wb") as stream:
                stream.write(file.header)
                stream.truncate(len(file.header) + file.data_bytes)
        if len(self._files) > 1:
            document = {
                "metadata": {"total_size": sum(file.data_bytes for file in self._files)},
                "weight_map": {name: file.path.name for file in self._files for name in file.offsets},
            }
            index = self._folder / f"{self._stem}.safetensors.index.json"
            index.write_text(json.dumps(document, indent=1), encoding="utf-8")

    def write(self) -> None:
        """Write this rank's ranges; they are on disk (fsync) when this returns."""
        for file in self._files:
            with file.path.open("r+b") as stream:
                for part in self._parts:
                    if part.piece.name in file.offsets:
                        _write_part(stream, part, file.offsets[part.piece.name])
                stream.flush()
                os.fsync(stream.fileno())


class TensorFiles:
    """The tensors of `stem`, mapped from their files: what is not read is not loaded."""

    def __init__(self, folder: Path, stem: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        paths = sorted({*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")})
        if not paths:
            raise FileNotFoundError(f"{folder} has no {stem}.safetensors")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ValueError(f"'{path}' is damaged or incomplete: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole tensor, by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def read(self, name: str, start: int, count: int, columns: Columns | None = None) -> Tensor:
        """A range of the flattened tensor, or of its flattened columns, on the CPU; not to be changed."""
        whole: Tensor = self._files[name].get_tensor(name)
        if columns is not None:
            whole = whole.narrow(1, columns.first, columns.count).contiguous()
        return whole.view(-1)[start : start + count]


def _plan(folder: Path, stem: str, parts: Sequence[TensorRange]) -> list[_File]:
    """Tensors in order, as many in a file as fit."""
    groups: list[list[TensorRange]] = [[]]
    for part in parts:
        if groups[-1] and sum(p.whole_bytes for p in groups[-1]) + part.whole_bytes > LARGEST_FILE_BYTES:
            groups.append([])
        groups[-1].append(part)
    count = len(groups)
    names = (
        [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count > 1
        else [f"{stem}.safetensors"]
    )
    files = []
    for name, group in zip(names, groups, strict=True):
        header, starts, end = safetensors_header(
            (part.piece.name, part.values.dtype, part.piece.shape, part.whole_bytes) for part in group
        )
        files.append(_File(path=folder / name, header=header, data_bytes=end, offsets=starts))
    return files


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]],
) -> tuple[bytes, dict[str, int], int]:
    """How a file of these (name, dtype, shape, bytes) begins, where each tensor does, and bytes of all."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, dtype, shape, size in tensors:
        begins[name] = end
        begin, end = end, end + size
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}, end


def _write_part(stream: BinaryIO, part: TensorRange, offset: int) -> None:
    piece, (first, last) = part.piece, part.piece.own_range()
    if first == last:
        return
    values = part.values[first:last].detach().cpu().contiguous()
    begin, end = piece.start + first, piece.start + last
    spans: Iterable[tuple[int, int, int]] = [(begin, begin, end - begin)]
    if piece.columns is not None:
        spans = piece.columns.spans(begin, end, piece.shape[1])
    for position, place, length in spans:
        stream.seek(offset + place * values.element_size())
        written = values[position - begin : position - begin + length]
        stream.write(written.view(torch.uint8).numpy().data)


PortableFormat = Literal["consolidated", "neutral"]
WEIGHTS = "model"
"""Stem of the files of the weights: the name that Hugging Face expects."""
PROGRESS = "progress.json"


def save_portable(engine: Engine, directory: Path, form: PortableFormat) -> None:
    """Write weights by bare name; 'neutral' also writes both moments of Adam and the progress. A collective.

    Every rank writes what it holds: nothing is gathered. The dtype is that of the live tensors.
    """
    pieces = list(engine.pieces())
    stems = [WEIGHTS, *(MOMENTS if form == "neutral" else ())]
    writers = [
        TensorWriter(
            directory,
            stem,
            [TensorRange(piece=piece, values=_held(piece, stem)) for piece in _with_states(pieces, stem)],
        )
        for stem in stems
    ]
    if dist.get_rank() == 0:
        for writer in writers:
            writer.lay_out()
        if form == "neutral":
            (directory / PROGRESS).write_text(json.dumps(asdict(engine.progress())), encoding="utf-8")
    dist.barrier()  # no rank writes to a file that is not laid out
    for writer in writers:
        writer.write()
    dist.barrier()


def load_portable(engine: Engine, directory: Path, form: PortableFormat) -> None:
    """Read what this rank holds of a checkpoint of any backend and world size. A collective.

    'consolidated' restores the weights alone. Raises ValueError where the model has other parameters.
    """
    progress = engine.progress()
    pieces = list(engine.pieces())
    stems = [WEIGHTS, *(MOMENTS if form == "neutral" else ())]
    for stem in stems:
        with TensorFiles(directory, stem) as files:
            held = _with_states(pieces, stem)
            require_same_parameters(held, files.shapes())
            for piece in held:
                target = _held(piece, stem)
                with torch.no_grad():
                    target.copy_(files.read(piece.name, piece.start, target.numel(), piece.columns))
    if form == "neutral":
        progress = read_progress(directory / PROGRESS)
    engine.continue_from(progress)


def read_progress(path: Path) -> OptimizerProgress:
    """Raises ValueError where the file is missing, or holds something else."""
    try:
        return TypeAdapter(OptimizerProgress).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        if isinstance(error, OSError):
            reason = error.strerror
        else:
            first = error.errors()[0]
            reason = " ".join([*map(str, first["loc"]), first["msg"]])
        raise ValueError(
            f"'{path}' is damaged or incomplete: {reason}; copy the checkpoint again, or save another"
        ) from error


def _with_states(pieces: Sequence[Piece], stem: str) -> Sequence[Piece]:
    """Pieces that have what a file holds: all have weights, frozen parameters have no moments."""
    return pieces if stem == WEIGHTS else [piece for piece in pieces if stem in piece.moments]


def _held(piece: Piece, stem: str) -> Tensor:
    return piece.weight if stem == WEIGHTS else piece.moments[stem]
