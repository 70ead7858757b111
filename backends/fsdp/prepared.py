"""FSDP2 and FSDP1 as a library above torch prepares them: what Accelerate and Trainer do alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness.backends import base
from harness.backends.fsdp import fsdp2
from harness.backends.fsdp.fsdp1 import fsdp1_strategy
from harness.backends.libraries.facts import offloads
from harness.backends.model.blocks import parameter_count, transformer_blocks
from harness.backends.model.loading import reserve_parameters
from harness.backends.model.precision import autocast_dtype
from harness.backends.model_source import Loading, model_source
from harness.backends.options import AccelerateFsdpOptions, unmet_shards_on_host
from harness.backends.torch_engine import TorchEngine, TorchStrategy


class PreparedFsdpBackend(base.Backend):
    """FSDP of version 1 or 2; a library is given the model and the settings of FSDP."""

    Options = AccelerateFsdpOptions
    library: ClassVar[str]
    """The package that is asked for FSDP."""
    through: ClassVar[str]
    """Its name in the strategy's."""
    on_the_cpu: ClassVar[str]
    """What it does there instead."""

    def __init__(self, options: base.BackendOptions, *, version: int) -> None:
        super().__init__(options)
        self.version = version

    def unmet_requirements(self, world: base.World) -> list[str]:
        on_the_cpu = [f"{self._installed} {self.on_the_cpu}"] if world.device == "cpu" else []
        return on_the_cpu + (unmet_shards_on_host(self.options) if self.version == 1 else [])

    @abstractmethod
    def _settings(self, model: nn.Module, context: base.SetupContext) -> dict[str, Any]:
        """FSDP's settings in the library's words."""

    @abstractmethod
    def _prepare(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        build_optimizer: base.BuildOptimizer,
        context: base.SetupContext,
    ) -> tuple[Callable[..., TorchEngine], Any, Any, Any]:
        """What makes the harness's engine of the arguments of TorchEngine; the Accelerator, the wrapped model
        and its optimizer."""

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        model, loading = initial_model(build_model, self.options, context.world)
        count = parameter_count(model)
        settings = self._settings(model, context)
        made, accelerator, prepared, optimizer = self._prepare(model, settings, build_optimizer, context)
        strategy = fsdp_strategy(prepared, accelerator, context, count, self.options, through=self.through)
        strategy = replace(strategy, native_config=native_config(accelerator, settings), loading=loading)
        return made(prepared, optimizer, context, strategy, accelerator.scaler)

    def _require_fsdp(self, accelerator: Any) -> None:
        """Raise Unsupported where the library would train under another strategy than FSDP."""
        from accelerate.utils import DistributedType

        if accelerator.distributed_type is not DistributedType.FSDP:
            raise base.Unsupported(
                f"{self._installed} chose {accelerator.distributed_type.value} although it was asked for FSDP"
            )

    def _common_settings(self, model: nn.Module, **words: str) -> dict[str, Any]:
        """Settings that Accelerate's plugin and Trainer's `fsdp_config` share; `words`: their other names."""
        classes = sorted({type(block).__name__ for block in transformer_blocks(model).values()})
        settings: dict[str, Any] = {
            words["version"]: self.version,
            "reshard_after_forward": True if self.version == 2 else "FULL_SHARD",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP",
            words["classes"]: classes,
            "cpu_offload": offloads(self.options),
            "cpu_ram_efficient_loading": loads_efficiently(self.options),
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if self.version == 1:
            settings |= {"use_orig_params": True, "sync_module_states": loads_efficiently(self.options)}
        return settings

    @property
    def _installed(self) -> str:
        return f"{self.library} {version(self.library)}"


def loads_efficiently(options: base.BackendOptions) -> bool:
    """Whether only rank 0 holds the initial weights."""
    return bool(getattr(options, "cpu_ram_efficient_loading", False))


def initial_model(
    build_model: base.BuildModel, options: base.BackendOptions, world: base.World
) -> tuple[nn.Module, Loading]:
    """The whole model; with `cpu_ram_efficient_loading` on rank 0 alone; elsewhere memory is only reserved.

    The library then broadcasts rank 0's weights while it shards.
    """
    source = model_source(build_model)
    if not loads_efficiently(options):
        return source(), "full"
    if source.loading == "full":
        model = source() if world.rank == 0 else source.skeleton()
        if world.rank != 0:
            reserve_parameters(model)
        return model, "broadcast"
    model = source.skeleton()
    reserve_parameters(model)
    for name, parameter in model.named_parameters() if world.rank == 0 else ():
        source.fill(parameter.data.view(-1), name, 0)
    source.filled()
    return model, "broadcast"


def native_config(accelerator: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What was handed to Accelerate, for the record."""
    return {
        "mixed_precision": accelerator.mixed_precision,
        "fsdp_plugin": {
            key: value if isinstance(value, (bool, int, str, list)) else str(value)
            for key, value in settings.items()
        },
    }


def fsdp_strategy(
    prepared: Any,
    accelerator: Any,
    context: base.SetupContext,
    count: int,
    options: base.BackendOptions,
    *,
    through: str,
) -> TorchStrategy:
    """What Accelerate prepared as FSDP of either version, whoever asked it to."""
    if accelerator.is_fsdp2:
        units: list[Any] = [unit for unit in prepared.modules() if isinstance(unit, FSDPModule)]
        group = next(g for unit in units for g in fsdp2.parameter_groups(unit._get_fsdp_state()))
        mesh, policy = group.mesh_info.mesh, group.mp_policy
        found = replace(
            fsdp2.fsdp2_strategy(prepared, units, mesh, policy, count, offloads(options), {}),
            set_synchronisation=partial(fsdp2.synchronise, prepared),
            named_full_parameters=partial(fsdp2.fsdp2_full_parameters, prepared, "cuda"),
        )
    else:
        found = fsdp1_strategy(prepared, {}, count)
    in_force = accelerator.state.fsdp_plugin.mixed_precision_policy
    # `Accelerator.prepare_model` wraps the forward pass in autocast; it is not called for FSDP2.
    wraps_autocast = hasattr(prepared, "_original_forward")
    return replace(
        found,
        name=f"{found.name} through {through}",
        library_autocast=autocast_dtype(context.precision) if wraps_autocast else None,
        details=found.details | {"mixed_precision_policy": str(in_force)},
        reduces_each=syncs_each_batch(accelerator),
        norm_group=torch.distributed.group.WORLD,
    )


def syncs_each_batch(accelerator: Any) -> bool:
    """Whether `Accelerator.accumulate`, or Trainer in its place, leaves `no_sync` out (accelerate 1.15)."""
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))
