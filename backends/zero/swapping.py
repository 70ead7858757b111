"""ZeRO-Infinity's optimizer states in files: folders, limits, where its tensors are then, and their pieces.

DeepSpeed 0.19, `runtime/swap_tensor`; pieces as of 0.19.8.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from harness.backends.base import SetupContext, TensorKind
from harness.backends.checkpoints.adam import make_states
from harness.backends.checkpoints.zero_pieces import HeldStates, restore_progress, scattered_pieces
from harness.backends.libraries.extensions import swaps_weights
from harness.backends.model.precision import compute_dtype
from harness.backends.model.swapped_weights import (
    in_file,
    locked_bytes,
    mapped,
    read_piece,
    release_read_ahead,
    swapper_of,
    weight_buffers,
    write_piece,
)
from harness.backends.options import SUB_GROUP_ELEMENTS, Zero3Options, ZeroOptions
from harness.backends.piece import MOMENTS, OptimizerProgress, Piece
from harness.backends.zero.engine import ZeroEngine
from harness.backends.zero.extension_builds import load_libaio
from harness.scratch import scratch_prefix

from ..optimizer.groups import tensors_in
from ..refusals import Unsupported


@dataclass(frozen=True)
class _Copied:
    """Of one sub-group, without a gradient."""

    masters: Tensor
    moments: dict[str, Tensor]


class CopiedStates(HeldStates):
    """Copies of what lies in files, in tensors that the system may keep on disk; the rest is live.

    What is written to them reaches DeepSpeed by `write_back`.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self._engine, self._folder = engine, folder
        self._groups: dict[int, _Copied] = {}
        self._frozen: dict[int, Tensor] = {}

    def masters(self, group: int) -> Tensor:
        return self._copied(group).masters if self._is_swapped(group) else super().masters(group)

    def moments(self, group: int) -> dict[str, Tensor]:
        return self._copied(group).moments if self._is_swapped(group) else super().moments(group)

    def frozen(self, parameter: Any) -> Tensor:
        if not in_file(parameter):
            return super().frozen(parameter)
        if id(parameter) not in self._frozen:
            copy = mapped(self._folder, parameter.ds_tensor.ds_numel, parameter.nvme_swapper.dtype)
            self._frozen[id(parameter)] = read_piece(parameter, copy)
        return self._frozen[id(parameter)]

    def pieces(self) -> Iterator[Piece]:
        """Of all parameters, with moments."""
        return scattered_pieces(self._engine, MOMENTS, self)

    def continue_from(self, progress: OptimizerProgress) -> None:
        """Write the copies to their files, and the weights in use after them; a collective."""
        optimizer = self._engine.optimizer
        optimizer.checkpoint_event_prologue()  # frees the parameters that stay gathered
        release_read_ahead(self._engine.module.parameters())
        for parameter in self._engine.module.parameters():
            if (copy := self._frozen.get(id(parameter))) is not None:
                write_piece(parameter, copy)
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            if self._is_swapped(group):
                self._write_back(group)
            else:
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()  # gathers them again
        restore_progress(self._engine, progress)

    def _write_back(self, group: int) -> None:
        optimizer, copied = self._engine.optimizer, self._copied(group)
        parameter = optimizer.fp32_partitioned_groups_flat[group]
        optimizer._optimizer_states_and_gradient_swap_in(group)
        make_states(self._engine.basic_optimizer, [parameter])
        state = self._engine.basic_optimizer.state[parameter]
        with torch.no_grad():
            parameter.data.copy_(copied.masters)
            for name, moment in copied.moments.items():
                state[name].data.copy_(moment)
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer._optimizer_states_and_gradient_swap_out(group)

    def _copied(self, group: int) -> _Copied:
        if group not in self._groups:
            self._groups[group] = self._copy(group)
        return self._groups[group]

    def _copy(self, group: int) -> _Copied:
        """Moments that do not exist yet are zeros, as a new file is."""
        optimizer = self._engine.optimizer
        parameter = optimizer.fp32_partitioned_groups_flat[group]
        optimizer._optimizer_states_and_gradient_swap_in(group)
        state = self._engine.basic_optimizer.state.get(parameter, {})
        live = {"masters": parameter.detach()} | {name: state[name] for name in MOMENTS if name in state}
        copies = {
            name: mapped(self._folder, parameter.numel(), parameter.dtype) for name in ("masters", *MOMENTS)
        }
        for name, tensor in live.items():
            copies[name].copy_(tensor)
        optimizer._release_swap_buffers(group)
        return _Copied(copies.pop("masters"), copies)

    def _is_swapped(self, group: int) -> bool:
        return bool(self._engine.optimizer._swappable_optimizer_subgroup(group))


BUFFERS = 4
"""`buffer_count`: a sub-group's masters, both moments and gradients are in memory while it is updated."""
MASTER_BYTES = 4
LEAST_BYTES = 1024**2
"""`MIN_AIO_BYTES` (utils.py): smaller tensors stay in memory."""
ALIGNMENT_BYTES = 512
"""`O_DIRECT_ALIGNMENT` (csrc/aio/py_lib/deepspeed_py_io_handle.cpp)."""

SubGroups = list[list[int]]


def swap_folder(place: str | None) -> Path:
    """A new folder for this rank's files below `place`, or below the one for temporary files.

    Raises Unsupported where it cannot be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=scratch_prefix("nvme"), dir=place))
    except OSError as error:
        raise Unsupported(f"nvme_path={place} cannot be written: {error.strerror}") from error


def lay_files(config: dict[str, Any], options: ZeroOptions, model: nn.Module, context: SetupContext) -> None:
    """Write to the configuration where this rank's states lie, and the buffers of its weights.

    Raises Unsupported where they cannot.
    """
    assert isinstance(options, Zero3Options)
    load_libaio()
    zero = config["zero_optimization"]
    if swaps_weights(options):
        zero["offload_param"] |= weight_buffers(
            model, options, zero, context.world.world_size, compute_dtype(context.precision).itemsize
        )
    folder = str(swap_folder(options.nvme_path))
    for name in ("offload_optimizer", *(("offload_param",) if swaps_weights(options) else ())):
        zero[name]["nvme_path"] = folder


def require_swappable(
    config: dict[str, Any], options: ZeroOptions, optimizer: torch.optim.Optimizer, context: SetupContext
) -> None:
    """Raise Unsupported, and leave no folder, where DeepSpeed could not swap these states."""
    assert isinstance(options, Zero3Options)
    ranks, size = context.world.world_size, options.sub_group_size or SUB_GROUP_ELEMENTS
    sub_groups = sub_groups_of(optimizer.param_groups, ranks, size)
    zero, width = config["zero_optimization"], compute_dtype(context.precision).itemsize
    of_weights = (
        locked_bytes(zero["offload_param"], sub_groups, ranks, width) if swaps_weights(options) else 0
    )
    try:
        require_lockable(sub_groups, of_weights)
        require_aligned(sub_groups)
    except Unsupported:
        shutil.rmtree(zero["offload_optimizer"]["nvme_path"])
        raise


def require_lockable(sub_groups: SubGroups, further_bytes: int = 0) -> None:
    """Raise Unsupported if the swapper's buffers exceed what this process may lock in memory.

    `further_bytes`: buffers of weights.

    `ds_page_aligned_alloc` (csrc/pin_memory) returns a null pointer then, and the rank would crash.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = BUFFERS * MASTER_BYTES * max(map(sum, sub_groups), default=0) + further_bytes
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY or needed <= soft:
        return
    raise Unsupported(
        f"NVMe offload locks {needed:,} bytes of memory for its buffers, this process may lock {soft:,}; "
        "raise `ulimit -l` or give a smaller sub_group_size"
    )


def require_aligned(sub_groups: SubGroups) -> None:
    """Raise Unsupported if DeepSpeed would read gradients to where direct I/O cannot.

    Each swapped gradient is read to its place in the sub-group (`_swap_in_pinned_gradients`). At an address
    that is not aligned the read fails, and nobody looks at its result (`_do_io_complete`, csrc/aio): the
    optimizer takes what was in the buffer before for gradients.
    """
    for pieces in sub_groups:
        begins = (MASTER_BYTES * begin for begin in accumulate(pieces, initial=0))
        for begin, piece in zip(begins, pieces, strict=False):
            if piece * MASTER_BYTES >= LEAST_BYTES and begin % ALIGNMENT_BYTES:
                raise Unsupported(
                    f"DeepSpeed {version('deepspeed')} would lose gradients: those of a parameter of "
                    f"{piece:,} elements per rank begin {begin:,} bytes into their sub-group, which is no "
                    f"multiple of {ALIGNMENT_BYTES}, where direct I/O fails silently; "
                    "sub_group_size=1 swaps each parameter by itself"
                )


def sub_groups_of(groups: Sequence[dict[str, Any]], ranks: int, size: int) -> SubGroups:
    """Elements of a rank's pieces by the parts of the optimizer that are updated at once
    (`_create_fp16_sub_groups`)."""
    found: SubGroups = []
    for group in groups:
        members: list[int] = []
        for parameter in group["params"]:
            members.append(-(-int(getattr(parameter, "ds_numel", parameter.numel())) // ranks))
            if sum(members) >= size:
                found.append(members)
                members = []
        if members:
            found.append(members)
    return found


class SwappingEngine(ZeroEngine):
    """Stage 3 with optimizer states, and perhaps weights, in files."""

    _copied: CopiedStates | None = None
    """Since `pieces` were asked for, until the next step."""

    def step(self, lr: float) -> float:
        self._copied = None
        release_read_ahead(self.engine.module.parameters())
        return super().step(lr)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        parameters = list(self.engine.module.parameters())
        away = {id(parameter.ds_tensor) for parameter in parameters if in_file(parameter)}
        yield from (found for found in super().state_tensors() if id(found[1]) not in away)
        if (weights := swapper_of(parameters)) is not None:
            for tensor in (weights.buffers, weights.partitioned_swap_buffer):
                if tensor is not None:
                    yield "communication", tensor
        swapper = self.engine.optimizer.optimizer_swapper
        for tensor in swapper.swap_buffer_manager.all_buffers:
            yield "communication", tensor
        for swapped in swapper.swap_params_info.values():
            for tensor in tensors_in(swapped.unswapped_gradients):
                yield "gradients", tensor

    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())

    def weight_pieces(self) -> Iterator[Piece]:
        raise Unsupported("masters are in memory by sub-groups only: weights are gathered")

    def weights_in_use(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())  # its masters are in memory by sub-groups only

    def pieces(self) -> Iterator[Piece]:
        self._copied = CopiedStates(self.engine, self._folder)
        return self._copied.pieces()

    def continue_from(self, progress: OptimizerProgress) -> None:
        assert self._copied is not None  # `pieces` were written to
        self._copied.continue_from(progress)
        self._copied = None

    def save(self, directory: Path) -> None:
        self._refuse("DeepSpeed's own checkpoints are not written from its files")

    def load(self, directory: Path) -> None:
        self._refuse("DeepSpeed's own checkpoints are not read into its files")

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            shutil.rmtree(self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.config["zero_optimization"]["offload_optimizer"]["nvme_path"])

    def _refuse(self, why: str) -> NoReturn:
        raise Unsupported(f"NVMe offload: {why}; use measure.checkpoint=neutral")
