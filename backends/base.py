"""The adapter contract: what a backend must offer and what every engine must keep.

Importing this module does not import torch, so names and options can be listed without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from .mesh import Mesh
from .model_source import Loading
from .piece import Portable
from .refusals import TypedValues
from .refusals import Unsupported as Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of one run as one of them sees them."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: str
    """Device type: 'cpu' or 'cuda'."""
    layout: Mesh | None = None
    """As the backend's options lay the ranks out; None: all of them are data parallel."""

    @classmethod
    def planned(cls, world_size: int, ranks_per_node: int, device: str, rank: int = 0) -> World:
        """As a rank will see a run to come."""
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=rank % ranks_per_node,
            ranks_per_node=ranks_per_node,
            device=device,
        )

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def mesh(self) -> Mesh:
        """The dimensions of the ranks."""
        return self.layout or Mesh.data_parallel(self.world_size)

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.mesh.data_size

    @property
    def data_rank(self) -> int:
        """Which share of each micro-batch this rank gets."""
        return self.mesh.data_rank(self.rank)


Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"]
Preset = Literal["like-for-like", "library-defaults"]
Compile = Literal["none", "block", "model"]
OptimizerKind = Literal["adamw", "adam", "sgd", "adamw-8bit", "adamw-8bit-bnb", "muon", "own"]
OptimizerImplementation = Literal["default", "for-loop", "foreach", "fused"]
Batch = dict[str, "Tensor"]
TensorKind = Literal["weights", "gathered", "gradients", "masters", "optimizer", "buffers", "communication"]


class BackendOptions(TypedValues):
    """Options typed after the colon of a backend's name; unknown keys are refused.

    A backend does not read `preset`: the harness hands it the preset in force in `SetupContext`.
    """

    preset: Preset | None = Field(
        None, description="overrides runtime.preset for this row: like-for-like or library-defaults"
    )
    row: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,60}$",
        description="a name that keeps this row apart from others with the same options",
    )

    def mesh(self, world_size: int) -> Mesh:
        """How the ranks are laid out under these options; by default each has samples of its own.

        Read without torch, before ranks start. Raises Unsupported where the sizes do not fit.
        """
        return Mesh.data_parallel(world_size)

    def extensions(self) -> tuple[str, ...]:
        """C++ extensions that the library compiles on first use, to be built before ranks start."""
        return ()


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Constants of the dynamic loss scaler that fp16-mixed uses; identical for every backend."""

    initial: float = 2.0**16
    growth_interval: int = 1000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5


@dataclass(frozen=True, kw_only=True)
class SetupContext:
    """What the job asks of every engine alike."""

    world: World
    precision: Precision
    gradient_clipping: float | None
    """Largest global L2 norm of the gradient; None: no clipping."""
    micro_batch_size: int
    accumulation_steps: int
    preset: Preset
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    """(module, batch) -> scalar: cross entropy summed over the batch's target tokens."""
    loss_scale: LossScale = field(default_factory=LossScale)
    optimizer: OptimizerKind = "adamw"
    """What `build_optimizer` returns."""
    compile: Compile = "none"
    """'model': the engine compiles what its forward pass calls. 'block': the blocks of the model that
    `build_model` returns are compiled already."""


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What really runs, read back from live objects wherever the library lets one look."""

    strategy: str
    """The library's own name of the strategy in force."""
    wrap_units: list[str]
    """Names of the modules that are gathered or reduced as one unit; '' is the root."""
    parameter_dtype: str
    """Dtype of the weights that forward and backward compute with, outside autocast."""
    autocast_dtype: str | None
    """Dtype that autocast computes in; None: no autocast."""
    master_dtype: str
    """Dtype of the weights that the optimizer updates."""
    gradient_dtype: str | None
    """Dtype of the gradients before they are reduced; None: not known."""
    reduce_dtype: str | None
    """Dtype in which gradients cross the wire; None: nothing crosses."""
    optimizer: str
    """Its class with the module: 'torch.optim.adamw.AdamW'."""
    optimizer_groups: list[dict[str, Any]]
    """Constants of each parameter group, as the live optimizer holds them."""
    gradient_clipping: float | None
    """Largest global L2 norm of the gradient; None: no clipping."""
    accumulation_steps: int
    """Micro-steps per optimizer step, as the library counts them."""
    gradient_synchronisation: str
    """'last micro-step' or 'every micro-step'."""
    loss_scale: float | None
    """Loss scale at the start; None: no scaling."""
    offload: list[str]
    """Kinds of model states that lie in host memory."""
    parameter_count: int
    """Parameters of the whole model; a tied tensor counts once."""
    requested_strategy: str | None = None
    """What was asked of the library in its own words; None: `strategy` is what was asked."""
    gather_dtype: str | None = None
    """Dtype in which weights cross the wire; None: they do not."""
    accumulation_dtype: str | None = None
    """Dtype in which the gradients of micro-steps are added up; None: the backend does not say."""
    gradient_norm: str = "L2 over all parameters and ranks"
    """The norm by which gradients are clipped."""
    reduce_bucket_bytes: int | None = None
    """Gradients reduced at once; None: one wrap unit at a time, or the backend does not say."""
    prefetch: str | None = None
    """How gathering runs ahead of use, in the library's words."""
    optimizer_implementation: str | None = None
    """'for-loop', 'foreach' or 'fused' of torch's Adam; None: another optimizer, or the backend is silent."""
    loading: Loading | None = None
    """How the initial weights reached this rank; None: the backend does not say."""
    frozen_dtype: str | None = None
    """Dtype in which weights are held that the job does not train; None: it trains all, or not known."""
    details: dict[str, Any] = field(default_factory=dict)
    """What only this library has: bucket sizes, thresholds, mesh."""


class Engine(Portable, ABC):
    """A model and its optimizer under one strategy, on one rank.

    Every engine keeps this contract:

    1. It never rescales the loss. The gradient that is applied is the sum over micro-steps of the
       mean over data ranks of what `backward` was given; the caller normalises. Ranks that share samples
       are one data rank: along 'tensor' each is given the same loss, along 'sequence' and 'pipeline' the
       losses of the ranks are parts that add up (`backends/mesh.py`).
    2. Master weights and optimizer states are fp32 unless the precision is 'bf16'.
    3. Every default of a library that changes the mathematics is pinned.
    4. It neither prints nor measures.
    """

    own_thread: ClassVar[bool] = False
    """Whether it works on another thread than its caller, which waits meanwhile."""

    enter_phase: Callable[[str], None] = staticmethod(lambda phase: None)
    """An engine that runs the passes of several micro-batches within `backward` says here where 'forward',
    'backward' or 'waiting' begins; its caller sets this, to time them."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return the loss summed over the target tokens that this rank computes: a scalar, fp32.

        Outside `torch.no_grad()` every call is one micro-step and is followed by `backward`. An engine
        that runs both passes there writes the loss into the tensor that it returned here: read it after that.
        """

    @abstractmethod
    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        """Accumulate gradients of `loss`; after the last micro-step they are reduced over ranks."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, update with learning rate `lr`, zero the gradients.

        Returns the global L2 norm of the unscaled gradient before clipping. It is not finite
        when a loss scaler skipped the update.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as in the bare model, whole fp32 tensor on the CPU) of the master weights.

        A collective: every rank must exhaust it. A tied tensor comes once.
        """

    def full_gradients(self) -> Iterator[tuple[str, Tensor]] | None:
        """Yield (name, whole fp32 gradient on the CPU) between the last backward pass and `step`.

        A collective, for diagnosis. None: this engine cannot; only its updates are then compared.
        """
        return None

    @abstractmethod
    def effective(self) -> Effective:
        """Describe what really runs."""

    @abstractmethod
    def native_config(self) -> dict[str, Any]:
        """The configuration as it was handed to the library, JSON-serialisable."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write a checkpoint in the library's own format, from which `load` resumes; a collective."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore weights and optimizer states written by `save`; a collective.

        Raises Unsupported where the library cannot, as for another number of ranks.
        """

    def train(self, mode: bool = True) -> None:
        """Switch dropout and the like on or off."""

    def state_tensors(self) -> Iterator[tuple[TensorKind, torch.Tensor]]:
        """Yield the tensors that live across micro-steps on this rank, with their kind.

        The default yields nothing: model-state bytes of such a backend are reported as n/a.
        Views of one storage may repeat; the caller counts each storage once.
        """
        return iter(())

    def gathered_tensors(self) -> Iterator[torch.Tensor]:
        """State tensors of kind "gathered": asked for after every module of a probed step."""
        return (tensor for kind, tensor in self.state_tensors() if kind == "gathered")

    def hidden_bytes(self) -> dict[TensorKind, int]:
        """Bytes by kind that the library's own code holds where Python reaches no tensor of them.

        Read from the live library. They lie on the device and are in nothing that `state_tensors` yields.
        """
        return {}

    def close(self) -> None:
        """Release what the library holds; called once, after the last collective."""


BuildModel = Callable[[], "nn.Module"]
BuildOptimizer = Callable[[Iterable[tuple[str, "nn.Parameter"]]], "torch.optim.Optimizer"]


class Backend(ABC):
    """One strategy of one library. Built from its options; `prepare` makes the engine."""

    Options: ClassVar[type[BackendOptions]] = BackendOptions
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Distributions whose versions belong to a record of this backend."""
    claims: str | None = None
    """For a third party: the built-in backend that this is another implementation of, such as 'ddp'.

    Model states, memory that `state_tensors` does not list, and the payload of gradients and weights are then
    held to the closed forms of that one; options of the same name are taken to mean the same. What is done
    outside of the steps, and norms and flags, is left to the implementation. None: nothing of this is judged.
    """

    def __init__(self, options: BackendOptions) -> None:
        self.options = options

    def unmet_requirements(self, world: World) -> list[str]:
        """Why this backend cannot run in `world`, one sentence each; empty: it can."""
        return []

    def closed_form(self) -> Any | None:
        """For a third party: closed forms of its own, to which its runs are held byte by byte.

        A module or an object with `model_states(workload)` and `collectives(workload)`, as
        `harness.forms.families.ClosedForms` says and `harness/forms/ddp.py` shows. Rank 0 evaluates them
        for every rank before the training; the record keeps the result. None: there are none.
        """
        return None

    @abstractmethod
    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        """Build the engine; torch.distributed is initialised and the device is set.

        `build_model()` returns the whole model on the CPU, equal on every rank: fp32, or bf16 when
        the precision is 'bf16'. A strategy that shards weights need not hold it: the harness hands over a
        `ModelSource`. `build_optimizer(named parameters)` takes names as in the bare model
        and returns AdamW with the job's constants and weight-decay groups. Raises `Unsupported` where
        the library cannot do what the context asks, with the library's version in the reason.
        """
