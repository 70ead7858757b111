"""The portable formats: `consolidated` (weights, as Hugging Face reads them) and `neutral` (all states)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from harness.backends.base import Engine
from harness.backends.checkpoints.tensor_files import TensorFiles, TensorRange, TensorWriter
from harness.backends.piece import MOMENTS, OptimizerProgress, Piece, require_same_parameters

PortableFormat = Literal["consolidated", "neutral"]
WEIGHTS = "model"
"""Stem of the files of the weights: the name that Hugging Face expects."""
PROGRESS = "progress.json"


def save_portable(engine: Engine, directory: Path, form: PortableFormat) -> None:
    """Write weights by bare name; 'neutral' also writes both moments of Adam and the progress. A collective.

    Every rank writes what it holds: nothing is gathered. The dtype is that of the live tensors.
    """
    pieces = list(engine.pieces())
    stems: dict[str, Callable[[Piece], torch.Tensor]] = {WEIGHTS: lambda piece: piece.weight}
    if form == "neutral":
        stems |= {moment: lambda piece, moment=moment: piece.moments[moment] for moment in MOMENTS}  # type: ignore[misc]
    writers = [
        TensorWriter(directory, stem, _parts(_with_states(pieces, stem), tensor))
        for stem, tensor in stems.items()
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
                target = piece.weight if stem == WEIGHTS else piece.moments[stem]
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
        reason = error.strerror if isinstance(error, OSError) else _first_problem(error)
        raise ValueError(
            f"'{path}' is damaged or incomplete: {reason}; copy the checkpoint again, or save another"
        ) from error


def _first_problem(error: ValidationError) -> str:
    found = error.errors()[0]
    return " ".join([*map(str, found["loc"]), found["msg"]])


def _with_states(pieces: Sequence[Piece], stem: str) -> Sequence[Piece]:
    """Those that have what a file holds: all have weights, frozen parameters have no moments."""
    return pieces if stem == WEIGHTS else [piece for piece in pieces if stem in piece.moments]


def _parts(pieces: Sequence[Piece], tensor: Callable[[Piece], torch.Tensor]) -> list[TensorRange]:
    return [
        TensorRange(
            name=piece.name,
            shape=piece.shape,
            start=piece.start,
            columns=piece.columns,
            values=tensor(piece),
            written=piece.own_range(),
        )
        for piece in pieces
    ]
