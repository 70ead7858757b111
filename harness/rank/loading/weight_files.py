"""Makes sure that the initial weights of a job lie in files, once for all ranks that share a folder."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.checkpoints.tensor_files import safetensors_header
from harness.backends.model.precision import COMPUTE_DTYPES
from harness.backends.model_source import PIECE_ELEMENTS
from harness.errors import HarnessError, JobError
from harness.files import locked, refusing, write_atomically
from harness.import_path import ask_module
from harness.job.job import AdapterSection, Job
from harness.rank.data.samples import DataFacts
from harness.rank.loading.skeleton import CannotStream, stream_weights, write_buffers
from harness.rank.models.model import build_model, draw_model, facts_in, model_config


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


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes whose values are the weights; others stand for them by a scale or a code."""


def checkpoint_tensors(job: Job, config: Any, skeleton: nn.Module) -> dict[str, StoredTensor] | None:
    """By parameter; None where a plain read needs more than slices: see `_plain_place`, or no safetensors.

    Files keep their dtype. A hub's are downloaded to its cache. Raises JobError for files that are missing or
    damaged, and where parameters that the model ties differ in them.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None  # transformers dequantises it
    stored = _stored(job)
    base = f"{getattr(skeleton, 'base_model_prefix', '')}."
    found: dict[str, StoredTensor] = {}
    firsts: dict[int, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        place = _plain_place(stored, name, base, parameter)
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            if place is not None and not _are_equal(found[first], place, parameter.numel()):
                raise JobError(
                    f"model '{job.model.name}' ties {name} to {first}, but its files hold other values for "
                    "each, which transformers would not tie; set tie_word_embeddings to false in its "
                    "config.json"
                )
        elif place is None:
            return None
        else:
            found[name] = place
    return found


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: Path
    shape: list[int]
    dtype: str


def _stored(job: Job) -> dict[str, _Entry]:
    """What the files hold, by their names. Raises JobError where one is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    entries: dict[str, _Entry] = {}
    path = None
    try:
        for path in _files(job):
            with safe_open(os.fspath(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no dict
                    part = file.get_slice(name)
                    entries[name] = _Entry(file=path, shape=part.get_shape(), dtype=part.get_dtype())
    except SafetensorError as error:
        raise JobError(f"'{path}' is damaged or incomplete ({error}); copy or download it again") from error
    except OSError as error:
        raise JobError(f"files of model '{job.model.name}' cannot be read: {error}") from error
    return entries


def _plain_place(
    stored: Mapping[str, _Entry], name: str, base: str, parameter: nn.Parameter
) -> StoredTensor | None:
    """Where a parameter lies; None: nowhere under its name in its shape as floating-point numbers.

    base: what a checkpoint of the model without its head leaves out of names.
    """
    inside = name if name in stored else name.removeprefix(base)
    entry = stored.get(inside)
    if entry is None or entry.shape != list(parameter.shape) or entry.dtype not in FLOATING:
        return None
    return StoredTensor(file=entry.file, name=inside)


def _are_equal(first: StoredTensor, second: StoredTensor, elements: int) -> bool:
    reader = WeightReader({"first": first, "second": second})
    ranges = pieces(0, elements)
    return all(torch.equal(reader.read("first", *own), reader.read("second", *own)) for own in ranges)


def _files(job: Job) -> Iterator[Path]:
    index = _cached(job, INDEX)
    if index is None:
        whole = _cached(job, WEIGHTS)
        yield from () if whole is None else (whole,)
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise JobError(f"'{index}' is damaged ({error}); copy or download it again") from error
    for name in names:
        path = _cached(job, name)
        if path is None:
            raise JobError(f"'{index}' names the file {name}, which is missing; copy or download it")
        yield path


def _cached(job: Job, name: str) -> Path | None:
    """A file of the model's folder or of the hub's cache, downloaded if need be; None: there is none."""
    from transformers.utils.hub import cached_file

    assert job.model.name is not None
    found: Any = cached_file(
        job.model.name,
        name,
        revision=job.model.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found) if found else None


POLL_SECONDS = 0.05
LIST_NAME = "tensors.json"
"""Written last: where each parameter lies."""
SMALL_ELEMENTS = 2**26
"""Of a model that is not streamed but written whole by a rank: another process would take longer to start."""
Stored = Mapping[str, StoredTensor]


def provide_weights(
    job: Job, config: Any, skeleton: nn.Module, numbers: Mapping[int, str], folder: Path
) -> None:
    """Write the weights to `folder` unless they are there, or note where the user's checkpoint has them.

    skeleton, numbers: see `streaming.parameter_numbers`. At most one process at a time writes to a folder.
    Raises HarnessError where it cannot be written.
    """
    listed = folder / LIST_NAME
    with refusing(
        f"initial weights cannot be written to '{folder}'",
        "; free space there, or set runtime.loading=full, which needs none",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not listed.exists():
                stored = _provide(job, config, skeleton, numbers, folder)
                places = {name: [str(tensor.file), tensor.name] for name, tensor in stored.items()}
                write_atomically(listed, json.dumps(places))


def await_weights(folder: Path) -> Stored:
    """Where each parameter lies, once another process of this machine has written it."""
    listed = folder / LIST_NAME
    while not listed.exists():
        time.sleep(POLL_SECONDS)
    places = json.loads(listed.read_text(encoding="utf-8"))
    return {name: StoredTensor(file=Path(file), name=inside) for name, (file, inside) in places.items()}


def _provide(job: Job, config: Any, skeleton: nn.Module, numbers: Mapping[int, str], folder: Path) -> Stored:
    if job.model.reads_checkpoint:
        found = checkpoint_tensors(job, config, skeleton)
        if found is not None:
            return found
    # A name of its own: without locks, another node may write here while ranks of this one read.
    path = folder / f"weights-{secrets.token_hex(4)}.safetensors"
    shapes = {name: list(parameter.shape) for name, parameter in skeleton.named_parameters()}
    if job.model.factory is not None:
        _provide_own(job, shapes, path)
        return {name: StoredTensor(file=path, name=name) for name in shapes}
    try:
        if job.model.reads_checkpoint:
            raise CannotStream("transformers converts this checkpoint while it reads it")
        with _writer(job, shapes, path) as writer:
            stream_weights(lambda: draw_model(job, config), numbers, writer.write)
    except CannotStream:
        _provide_whole(job, facts_in(config), shapes, path)
    return {name: StoredTensor(file=path, name=name) for name in shapes}


def _writer(job: Job, shapes: Mapping[str, Sequence[int]], path: Path) -> WeightWriter:
    # At a low precision the initial weights are rounded to it anyway.
    return WeightWriter(path, shapes, COMPUTE_DTYPES[job.training.held_precision])


def _provide_own(job: Job, shapes: Mapping[str, Sequence[int]], path: Path) -> None:
    """Have the whole model of the user's own function written."""
    _provide_whole(job, DataFacts(), shapes, path)
    if stored_shapes(path) != {name: list(shape) for name, shape in shapes.items()}:
        raise JobError(
            f"model.factory '{job.model.factory}' builds other parameters where these have no memory; set "
            "runtime.loading=full"
        )


def _provide_whole(job: Job, facts: DataFacts, shapes: Mapping[str, Sequence[int]], path: Path) -> None:
    """Have the whole model written: by this rank if it is small."""
    if sum(map(prod, shapes.values())) <= SMALL_ELEMENTS:
        _write_whole(job, facts, path)
    else:
        _build_in_another_process(job, path, facts)


def _build_in_another_process(job: Job, path: Path, facts: DataFacts) -> None:
    """Have a process that is no rank build the whole model and write it."""
    request = {"job": job.model_dump(mode="json"), "path": str(path), "facts": asdict(facts)}
    done = ask_module("harness.rank.loading", request=json.dumps(request))
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        kind, _, message = last.partition(": ")
        if kind.rpartition(".")[2] == JobError.__name__:
            raise JobError(message)
        raise HarnessError(f"building the initial weights failed: {last}")


def write_whole_model(request: Mapping[str, Any]) -> None:
    """What that process does; adapters are in no file."""
    torch.set_num_threads(1)
    _write_whole(Job.model_validate(request["job"]), DataFacts(**request["facts"]), Path(request["path"]))


def _write_whole(job: Job, facts: DataFacts, path: Path) -> None:
    job = job.model_copy(update={"adapter": AdapterSection()})
    model = build_model(job, model_config(job, facts))
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if job.model.factory is not None:
        write_buffers(model, path.parent)
    with _writer(job, shapes, path) as writer:
        for name, parameter in model.named_parameters():
            writer.write(name, parameter)
