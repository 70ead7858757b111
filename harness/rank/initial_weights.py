"""Brings initial weights to the ranks: a skeleton without memory, files of a folder, and parts of both.

As a process, `python -m harness.rank.initial_weights`, it writes a job's whole model: the request as JSON on
standard input.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.backends.base import World
from harness.backends.model.blocks import names_by_id
from harness.backends.model.precision import COMPUTE_DTYPES
from harness.backends.model_source import PIECE_ELEMENTS, AskedLoading, ModelSource
from harness.errors import HarnessError, JobError
from harness.files import locked, refusing, write_atomically
from harness.import_path import ask_module
from harness.job.job import AdapterSection, Job
from harness.rank.data import DataFacts
from harness.rank.models.model import (
    add_adapters,
    bare_name,
    build_model,
    build_own_model,
    draw_model,
    facts_in,
    finish_model,
    initial_values,
    is_adapter,
    model_config,
)
from harness.safe_text import first_line

Register = Callable[[nn.Module, str, nn.Parameter | None], None]
Build = Callable[[], nn.Module]


@contextmanager
def registering(register: Register) -> Iterator[Register]:
    """Have modules register their parameters through a function; yields torch's own."""
    plain = nn.Module.register_parameter
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield plain  # type: ignore[misc]
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it is there already."""
    if parameter.is_meta:
        return parameter
    shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(shape, requires_grad=parameter.requires_grad)


class CannotStream(Exception):
    """This model draws its weights in another way; build it plainly."""


def parameter_numbers(build_skeleton: Build) -> tuple[nn.Module, dict[int, str]]:
    """Build a skeleton; also say which of the registered parameters, numbered in order, has which name.

    A parameter that was replaced by another, as a tied one is, has no name.
    """
    numbers: dict[int, tuple[int, nn.Parameter]] = {}

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            number = len(numbers)
            parameter = on_meta(parameter)
            numbers[id(parameter)] = number, parameter
        plain(module, name, parameter)

    with registering(register) as plain:
        model = build_skeleton()
    return model, {numbers[id(p)][0]: name for name, p in model.named_parameters() if id(p) in numbers}


def stream_weights(
    build: Build, names: Mapping[int, str], keep: Callable[[str, Tensor], None], *, by_block: bool = True
) -> None:
    """Run `build`, handing each named parameter to `keep` once it is initialised.

    build: a plain build, the generator's seed included. names: see `parameter_numbers`. by_block: wait until
    the transformer block is initialised, since some initialise their layers' weights again. Raises
    CannotStream for a model whose initialisation reaches beyond that.
    """
    pass_over = _Streaming(names, keep, by_block)
    with pass_over.at_work(), _GuardMeta():
        build()
    if left := sorted(set(names.values()) - pass_over.kept):
        raise CannotStream(f"{len(left)} parameters were not initialised by a module, such as '{left[0]}'")


class _Streaming:
    def __init__(self, names: Mapping[int, str], keep: Callable[[str, Tensor], None], by_block: bool) -> None:
        self._names = names
        self._keep = keep
        self._by_block = by_block
        self._scratch = None if by_block else _Scratch()
        self._registered = 0
        self._constructs = False
        self._in_blocks: tuple[Any, set[int]] = (None, set())
        self.kept: set[str] = set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        import transformers
        from transformers.pytorch_utils import Conv1D

        base: Any = transformers.PreTrainedModel
        plain_initialise = base._initialize_weights
        plain_constructors = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding, Conv1D)}

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not hasattr(parameter, "harness_number"):
                if self._scratch is not None and self._constructs and not parameter.is_meta:
                    parameter = self._scratch.like(parameter)
                parameter.harness_number = self._registered  # type: ignore[attr-defined]
                self._registered += 1
            plain_register(module, name, parameter)

        def constructing(plain: Any) -> Any:
            def construct(module: nn.Module, *arguments: Any, **keywords: Any) -> None:
                self._constructs = True
                if self._scratch is not None:
                    self._scratch.reuse()
                plain(module, *arguments, **keywords)
                _to_meta(module)
                self._constructs = False

            return construct

        def initialise(model: Any, module: nn.Module, *arguments: Any, **keywords: Any) -> None:
            if getattr(module, "_is_hf_initialized", False):
                return
            if self._scratch is not None:
                self._scratch.reuse()
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    _replace(module, name, parameter, (self._scratch or _Scratch()).like(parameter))
            plain_initialise(model, module, *arguments, **keywords)
            self._initialised(model, module)

        with registering(register) as plain_register:
            try:
                for kind, plain in plain_constructors.items():
                    kind.__init__ = constructing(plain)  # type: ignore[misc,method-assign]
                base._initialize_weights = initialise
                yield
            finally:
                for kind, plain in plain_constructors.items():
                    kind.__init__ = plain  # type: ignore[misc,method-assign]
                base._initialize_weights = plain_initialise

    def _initialised(self, model: Any, module: nn.Module) -> None:
        if not self._by_block:
            self._hand_on(module)
            return
        # GPT-2's blocks initialise their projections a second time, after the layers themselves.
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        if self._in_blocks[0] is not model:
            found = [m for m in model.modules() if type(m).__name__ in blocks]
            self._in_blocks = model, {id(part) for block in found for part in block.modules()}
        if type(module).__name__ in blocks:
            for part in module.modules():
                self._hand_on(part)
        elif id(module) not in self._in_blocks[1]:
            self._hand_on(module)

    def _hand_on(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            name = self._names.get(parameter.harness_number)  # type: ignore[attr-defined]
            if name is not None:
                if name in self.kept:
                    raise CannotStream(f"'{name}' is initialised twice")
                self.kept.add(name)
                self._keep(name, parameter.detach())
        _to_meta(module)


def _to_meta(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        _replace(module, name, parameter, on_meta(parameter))


class _Scratch:
    """Memory for the parameters of one layer after the other: fresh pages cost a third of the drawing."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reuse(self) -> None:
        self._used = 0

    def like(self, parameter: nn.Parameter) -> nn.Parameter:
        """An uninitialised parameter of the same shape and dtype."""
        begin, end = self._used, self._used + parameter.numel() * parameter.element_size()
        if end > self._memory.numel():
            # What was handed out of the old memory keeps it.
            begin, end = 0, end - begin
            self._memory = torch.empty(end, dtype=torch.uint8)
        self._used = -(-end // 64) * 64
        values = self._memory[begin:end].view(parameter.dtype).view(parameter.shape)
        return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _replace(module: nn.Module, name: str, old: nn.Parameter, new: nn.Parameter) -> None:
    new.harness_number = old.harness_number  # type: ignore[attr-defined]
    module._parameters[name] = new


class _GuardMeta(TorchDispatchMode):
    """Raises CannotStream where weights that are not in memory would be written: the draw would be lost."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            raise CannotStream(f"{func} writes weights of another module")
        return func(*args, **(kwargs or {}))


BUFFERS_NAME = "buffers.safetensors"


def why_whole(job: Job, asked: AskedLoading) -> str | None:
    """Why every rank builds the whole model although `asked` is not 'full'; None: no rank needs to.

    The functions of modules run with parameters on the meta device. What they write to these is lost, and
    comes from a file that one process writes; what they read from these cannot be had.
    """
    reason = job.why_whole(asked)
    if reason is not None or asked == "full" or job.model.factory is None:
        return reason
    try:
        skeleton, _ = parameter_numbers(lambda: build_own_model(job, weights=False))
    except JobError as error:
        return f"it cannot be built without memory for its parameters: {error}"
    complex_ones = (name for name, parameter in skeleton.named_parameters() if parameter.is_complex())
    if (name := next(complex_ones, None)) is not None:
        return f"parameter '{name}' is complex, and files of weights hold real numbers"
    for prefix, module in skeleton.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                where = f"{prefix}.{attribute}" if prefix else attribute
                return f"'{where}' is made of its weights and no buffer"
    return None


def write_buffers(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    # Each in memory of its own: safetensors refuses tensors that share some.
    save_file({name: buffer.clone() for name, buffer in model.named_buffers()}, folder / BUFFERS_NAME)


def fill_buffers(skeleton: nn.Module, folder: Path) -> None:
    """Give a skeleton the buffers of the whole model: it drew none of the numbers that weights take."""
    from safetensors.torch import load_file

    values = load_file(folder / BUFFERS_NAME)
    with torch.no_grad():
        for prefix, module in skeleton.named_modules():
            for name in module._buffers:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    module._buffers[name] = values[full]


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for low in range(start, stop, PIECE_ELEMENTS):
        yield low, min(low + PIECE_ELEMENTS, stop)


class StoredTensor(NamedTuple):
    """Where a parameter lies."""

    file: Path
    name: str
    """Its name there."""
    shape: Sequence[int] = ()
    dtype: str = ""


def stored_in(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a file."""
    from safetensors import safe_open

    with safe_open(os.fspath(path), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            part = file.get_slice(name)
            yield StoredTensor(path, name, part.get_shape(), part.get_dtype())


Stored = Mapping[str, StoredTensor]


class WeightReader:
    """Reads parts of tensors; a file's pages are mapped, so they belong to the system's cache."""

    def __init__(self, tensors: Stored) -> None:
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of the flattened tensor as they are stored, in new memory."""
        from safetensors import safe_open

        stored = self._tensors[name]
        if stored.file not in self._open:
            self._open[stored.file] = safe_open(os.fspath(stored.file), "pt")
        file = self._open[stored.file]
        part = file.get_slice(stored.name)
        shape = part.get_shape()
        if not shape:
            return file.get_tensor(stored.name).reshape(-1)[start:stop]
        row = max(1, prod(shape[1:]))
        first, last = start // row, -(-stop // row)
        return part[first:last].reshape(-1)[start - first * row : stop - first * row]


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes whose values are the weights; others stand for them by a scale or a code."""


def checkpoint_tensors(job: Job, config: Any, skeleton: nn.Module) -> dict[str, StoredTensor] | None:
    """Stored tensors by parameter; None where a plain read needs more than slices, or no safetensors.

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


def _stored(job: Job) -> dict[str, StoredTensor]:
    """What the files hold, by their names. Raises JobError where one is missing or damaged."""
    from safetensors import SafetensorError

    entries: dict[str, StoredTensor] = {}
    path = None
    try:
        for path in _files(job):
            entries |= {tensor.name: tensor for tensor in stored_in(path)}
    except SafetensorError as error:
        raise JobError(f"'{path}' is damaged or incomplete ({error}); copy or download it again") from error
    except OSError as error:
        raise JobError(f"files of model '{job.model.name}' cannot be read: {error}") from error
    return entries


def _plain_place(stored: Stored, name: str, base: str, parameter: nn.Parameter) -> StoredTensor | None:
    """Where a parameter lies; None: nowhere under its name in its shape as floating-point numbers.

    base: what a checkpoint of the model without its head leaves out of names.
    """
    found = stored.get(name) or stored.get(name.removeprefix(base))
    fits = found is not None and found.shape == list(parameter.shape) and found.dtype in FLOATING
    return found if fits else None


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
        raise JobError(f"'{index}' is damaged ({first_line(error)}); copy or download it again") from error
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
        job.model.name, name, revision=job.model.revision, _raise_exceptions_for_missing_entries=False
    )
    return Path(found) if found else None


POLL_SECONDS = 0.05
LIST_NAME = "tensors.json"
"""Written last: where each parameter lies."""
SMALL_ELEMENTS = 2**26
"""Of a model that is written whole by a rank: another process would take longer to start."""


def provide_weights(job: Job, config: Any, skeleton: nn.Module, folder: Path) -> None:
    """Write the weights to `folder` unless they are there, or note where the user's checkpoint has them.

    At most one process at a time writes to a folder. Raises HarnessError where it cannot be written.
    """
    listed = folder / LIST_NAME
    with refusing(
        f"initial weights cannot be written to '{folder}'",
        "; free space there, or set runtime.loading=full, which needs none",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not listed.exists():
                stored = _provide(job, config, skeleton, folder)
                places = {name: [str(tensor.file), tensor.name] for name, tensor in stored.items()}
                write_atomically(listed, json.dumps(places))


def await_weights(folder: Path) -> Stored:
    """Where each parameter lies, once another process of this machine has written it."""
    listed = folder / LIST_NAME
    while not listed.exists():
        time.sleep(POLL_SECONDS)
    places = json.loads(listed.read_text(encoding="utf-8"))
    return {name: StoredTensor(Path(file), inside) for name, (file, inside) in places.items()}


def _provide(job: Job, config: Any, skeleton: nn.Module, folder: Path) -> Stored:
    if job.model.reads_checkpoint:
        found = checkpoint_tensors(job, config, skeleton)
        if found is not None:
            return found
    # A name of its own: without locks, another node may write here while ranks of this one read.
    path = folder / f"weights-{secrets.token_hex(4)}.safetensors"
    shapes = {name: list(parameter.shape) for name, parameter in skeleton.named_parameters()}
    facts = facts_in(config) if job.model.factory is None else DataFacts()
    if sum(map(prod, shapes.values())) <= SMALL_ELEMENTS:
        _write_whole(job, facts, path)
    else:
        _build_in_another_process(job, path, facts)
    if job.model.factory is not None and {found.name: found.shape for found in stored_in(path)} != shapes:
        raise JobError(
            f"model.factory '{job.model.factory}' builds other parameters where these have no memory; set "
            "runtime.loading=full"
        )
    return {name: StoredTensor(path, name) for name in shapes}


def _build_in_another_process(job: Job, path: Path, facts: DataFacts) -> None:
    """Have a process that is no rank build the whole model and write it."""
    request = {"job": job.model_dump(mode="json"), "path": str(path), "facts": asdict(facts)}
    done = ask_module("harness.rank.initial_weights", request=json.dumps(request))
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        kind, _, message = last.partition(": ")
        if kind.rpartition(".")[2] == JobError.__name__:
            raise JobError(message)
        raise HarnessError(f"building the initial weights failed: {last}")


def _write_whole(job: Job, facts: DataFacts, path: Path) -> None:
    """Adapters are in no file."""
    from safetensors.torch import save_file

    job = job.model_copy(update={"adapter": AdapterSection()})
    model = build_model(job, model_config(job, facts))
    if job.model.factory is not None:
        write_buffers(model, path.parent)
    # Rounded as initial weights are anyway; parameters may share memory, which safetensors refuses.
    dtype = COMPUTE_DTYPES[job.training.held_precision]
    named = model.named_parameters()
    save_file({name: p.detach().to(dtype, copy=True).contiguous() for name, p in named}, path)


@dataclass(eq=False)
class JobModelSource(ModelSource):
    """Of one rank. `folder`: where ranks of this machine find or put weights that must lie in files."""

    job: Job
    config: Any
    world: World
    _: KW_ONLY
    loading: AskedLoading
    folder: Path
    on_built: Callable[[nn.Module], None]

    def __post_init__(self) -> None:
        self._compute = COMPUTE_DTYPES[self.job.training.held_precision]
        self._shapes: dict[str, torch.Size] = {}
        self._first_names: dict[str, str] = {}
        self._draws = not self.job.model.reads_checkpoint and self.job.model.factory is None
        self._numbers: dict[int, str] = {}
        self._asked: dict[str, list[tuple[Tensor, int]]] = {}
        """By name, targets of `fill` and where each begins."""
        self._reader: WeightReader | None = None

    def __call__(self) -> nn.Module:
        model = build_model(self.job, self.config)
        self.on_built(model)
        return model

    def skeleton(self) -> nn.Module:
        model, self._numbers = self._bare_skeleton()
        if not self._draws:
            self._open_files(model)
            if self.job.model.factory is not None:
                fill_buffers(model, self.folder)
        add_adapters(self.job, model)
        firsts = names_by_id(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first_names[name] = firsts[id(parameter)]
            self._shapes[name] = parameter.shape
        finish_model(self.job, model)
        self.on_built(model)
        return model

    def fill(self, target: Tensor, name: str, start: int) -> None:
        name = self._first_names[name]
        if self._draws and not is_adapter(name):
            if target.numel():
                self._asked.setdefault(bare_name(name), []).append((target, start))
            return
        with torch.no_grad():
            self._copy(target, name, start)

    def filled(self) -> None:
        if not self._asked:
            return
        with torch.no_grad():
            if not (self._drawn(by_block=False) or self._drawn(by_block=True)):
                self._open_files(self._bare_skeleton()[0])
                for name, ranges in self._asked.items():
                    for target, start in ranges:
                        self._copy(target, name, start)
        self._asked.clear()

    def _drawn(self, *, by_block: bool) -> bool:
        """Whether the model could be drawn in this way; every rank finds the same."""
        try:
            stream_weights(
                lambda: draw_model(self.job, self.config), self._numbers, self._keep, by_block=by_block
            )
        except CannotStream:
            return False
        return True

    def _keep(self, name: str, drawn: Tensor) -> None:
        flat = drawn.view(-1)
        for target, start in self._asked.get(name, ()):
            target.copy_(flat[start : start + target.numel()].to(self._compute))

    def _bare_skeleton(self) -> tuple[nn.Module, dict[int, str]]:
        return parameter_numbers(lambda: draw_model(self.job, self.config, pretrained=False))

    def _open_files(self, skeleton: nn.Module) -> None:
        if self.world.local_rank == 0:
            provide_weights(self.job, self.config, skeleton, self.folder)
        self._reader = WeightReader(await_weights(self.folder))

    def _copy(self, target: Tensor, name: str, start: int) -> None:
        for low, high in pieces(start, start + target.numel()):
            target[low - start : high - start].copy_(self._read(name, low, high))

    def _read(self, name: str, low: int, high: int) -> Tensor:
        """Part of a parameter, rounded to the compute dtype as every backend's initial weights are."""
        if is_adapter(name):
            drawn = initial_values(name, self._shapes[name], self.job.training.seed)
            return drawn.view(-1)[low:high].to(self._compute)
        assert self._reader is not None
        return self._reader.read(bare_name(name), low, high).to(self._compute)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    _write_whole(Job.model_validate(asked["job"]), DataFacts(**asked["facts"]), Path(asked["path"]))
