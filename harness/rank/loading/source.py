"""The job's model as backends get it: whole, or a skeleton and parts of its initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import World
from harness.backends.model.precision import COMPUTE_DTYPES
from harness.backends.model_source import Loading, ModelSource
from harness.job.job import Job
from harness.rank.loading.skeleton import CannotStream, fill_buffers, parameter_numbers, stream_weights
from harness.rank.loading.weight_files import WeightReader, await_weights, pieces, provide_weights
from harness.rank.models.adapter import add_adapters, bare_name, initial_values, is_adapter
from harness.rank.models.model import build_model, draw_model, finish_model


@dataclass(frozen=True)
class _Range:
    """What a `fill` asked for."""

    target: Tensor
    start: int


class JobModelSource(ModelSource):
    """Of one rank. `folder`: where ranks of this machine find or put weights that must lie in files."""

    def __init__(
        self,
        job: Job,
        config: Any,
        world: World,
        *,
        loading: Loading,
        folder: Path,
        on_built: Callable[[nn.Module], None],
    ) -> None:
        self.loading = loading
        self._job = job
        self._config = config
        self._world = world
        self._folder = folder
        self._on_built = on_built
        self._compute = COMPUTE_DTYPES[job.training.held_precision]
        self._shapes: dict[str, torch.Size] = {}
        self._first_names: dict[str, str] = {}
        self._draws = loading == "slices" and not job.model.reads_checkpoint and job.model.factory is None
        self._numbers: dict[int, str] = {}
        self._asked: dict[str, list[_Range]] = {}
        self._reader: WeightReader | None = None

    def __call__(self) -> nn.Module:
        model = build_model(self._job, self._config)
        self._on_built(model)
        return model

    def skeleton(self) -> nn.Module:
        model, self._numbers = self._bare_skeleton()
        if self._reads and not self._draws:
            self._open_files(model, self._numbers)
            if self._job.model.factory is not None:
                fill_buffers(model, self._folder)
        add_adapters(self._job, model)
        firsts = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first_names[name] = firsts[id(parameter)]
            self._shapes[name] = parameter.shape
        finish_model(self._job, model)
        self._on_built(model)
        return model

    def fill(self, target: Tensor, name: str, start: int) -> None:
        name = self._first_names[name]
        if self._draws and not is_adapter(name):
            if target.numel():
                self._asked.setdefault(bare_name(name), []).append(_Range(target, start))
            return
        with torch.no_grad():
            if self.loading == "broadcast":
                self._receive(target, name, start)
            else:
                self._copy(target, name, start)

    def filled(self) -> None:
        if not self._asked:
            return
        with torch.no_grad():
            if not (self._drawn(by_block=False) or self._drawn(by_block=True)):
                self._open_files(*self._bare_skeleton())
                for name, ranges in self._asked.items():
                    for asked in ranges:
                        self._copy(asked.target, name, asked.start)
        self._asked.clear()

    def _drawn(self, *, by_block: bool) -> bool:
        """Whether the model could be drawn in this way; every rank finds the same."""
        try:
            stream_weights(self._draw, self._numbers, self._keep, by_block=by_block)
        except CannotStream:
            return False
        return True

    @property
    def _reads(self) -> bool:
        return self.loading == "slices" or self._world.rank == 0

    def _draw(self) -> nn.Module:
        return draw_model(self._job, self._config)

    def _keep(self, name: str, drawn: Tensor) -> None:
        flat = drawn.view(-1)
        for asked in self._asked.get(name, ()):
            part = flat[asked.start : asked.start + asked.target.numel()]
            asked.target.copy_(part.to(self._compute))

    def _bare_skeleton(self) -> tuple[nn.Module, dict[int, str]]:
        return parameter_numbers(lambda: draw_model(self._job, self._config, pretrained=False))

    def _open_files(self, skeleton: nn.Module, numbers: dict[int, str]) -> None:
        if self._world.local_rank == 0:
            provide_weights(self._job, self._config, skeleton, numbers, self._folder)
        self._reader = WeightReader(await_weights(self._folder))

    def _copy(self, target: Tensor, name: str, start: int) -> None:
        for low, high in pieces(start, start + target.numel()):
            target[low - start : high - start].copy_(self._read(name, low, high))

    def _read(self, name: str, low: int, high: int) -> Tensor:
        """Part of a parameter, rounded to the compute dtype as every backend's initial weights are."""
        if is_adapter(name):
            drawn = initial_values(name, self._shapes[name], self._job.training.seed)
            return drawn.view(-1)[low:high].to(self._compute)
        assert self._reader is not None
        return self._reader.read(bare_name(name), low, high).to(self._compute)

    def _receive(self, target: Tensor, name: str, start: int) -> None:
        device = torch.device(self._world.device)
        for low, high in pieces(0, self._shapes[name].numel()):
            if self._reads:
                piece = self._read(name, low, high).to(device)
            else:
                piece = torch.empty(high - low, dtype=self._compute, device=device)
            dist.broadcast(piece, 0)
            first, last = max(low, start), min(high, start + target.numel())
            if first < last:
                target[first - start : last - start].copy_(piece[first - low : last - low])
