"""Which weights ZeRO-3 has gathered while a module computes (PartitionedParameterCoordinator)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.theory.layout import Tensor, ceil_to, elements
from harness.theory.peaks.ledger import Holding, Ledger
from harness.theory.peaks.transports import gathering
from harness.theory.workload import Workload
from harness.theory.zero3.states import SECOND_COPY

_SOURCE = "DeepSpeed 0.19.8, runtime/zero/partition_parameters.py: "
GATHERED = Holding(
    kind="gathered", name="weights of modules", formula="compute bytes x parameters of the modules",
    source=_SOURCE + "all_gather_coalesced",
)  # fmt: skip
COALESCED = Holding(
    kind="gathered", name="all-gather output of several parameters", formula="compute bytes x parameters",
    source=_SOURCE + "_all_gather_dtype; held until each of its parameters is used",
)  # fmt: skip

COPY_OF_GROUP = Holding(
    kind="weights", name=SECOND_COPY, formula="compute bytes x P / hpz",
    source=_SOURCE + "_partition_param_sec",
)  # fmt: skip


class Fetching(ABC):
    """Gathers and releases as modules come."""

    def __init__(self, workload: Workload, ledger: Ledger) -> None:
        self.workload = workload
        self.ledger = ledger

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self.activations = sum(self.ledger.activations.values())

    @abstractmethod
    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        """A module with these parameters computes next."""

    @abstractmethod
    def stay(self) -> None:
        """Modules follow whose inputs have no gradient: their post-backward hooks do not run, so that their
        weights stay until the backward pass is over (`release_backward_leftovers`)."""

    @abstractmethod
    def end_pass(self) -> None:
        """The backward pass is over."""

    def bytes(self, tensors: tuple[Tensor, ...]) -> int:
        """Gathered, with padding to equal pieces."""
        ranks = self.workload.world_size
        return sum(ceil_to(t.numel, ranks) for t in tensors) * self.workload.compute_bytes


class LikeForLike(Fetching):
    """Each module's parameters alone: nothing is reused, persists or is gathered ahead."""

    def __init__(self, workload: Workload, ledger: Ledger) -> None:
        super().__init__(workload, ledger)
        self._current: tuple[Tensor, ...] = ()
        self._stay = False
        self._copied: set[str] = set()

    def stay(self) -> None:
        self._release()
        self._current, self._stay = (), True

    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        if tensors == self._current:
            return
        if not self._stay:
            self._release()
        self._current = tensors
        if not tensors:
            return
        size = self.bytes(tensors)
        if len(tensors) == 1:
            self.ledger.add(GATHERED, size)
            with self.ledger.temporarily(gathering(self.workload, size)):
                pass
            return
        # Several are gathered into one tensor, and copied out of it.
        self.ledger.add(COALESCED, size)
        with self.ledger.temporarily(gathering(self.workload, size)):
            pass
        self.ledger.add(GATHERED, size)
        self.ledger.look()
        self.ledger.drop(COALESCED)

    def end_pass(self) -> None:
        self._release()
        self._current, self._stay = (), False

    def _release(self) -> None:
        """With hpZ a weight leaves a copy in its group of ranks as it is released for the first time."""
        ranks = self.workload.second_copy_ranks
        if self.workload.offload == "cpu" and self.workload.device != "cpu":
            ranks = None  # it lies on the host
        new = tuple(t for t in self._current if t.name not in self._copied)
        if ranks and new:
            self._copied |= {t.name for t in new}
            self.ledger.add(COPY_OF_GROUP, self.bytes(new) // ranks)
            self.ledger.look()
        self.ledger.drop(GATHERED)


class WithDefaults(Fetching):
    """Up to 1e9 elements are gathered ahead and stay for the backward pass; small parameters always do.

    Each module that is fetched has the next 5e7 elements gathered (`_fetch_sub_module_impl`).
    """

    def begin_pass(self) -> None:
        super().begin_pass()
        threshold = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        limit = ZERO3_DEFAULTS["stage3_max_live_parameters"]
        self._rest = [t for t in self.workload.layout.parameters if t.numel > threshold]
        self._stays = 2 * elements(self._rest) <= limit
        self._most = min(limit, elements(self._rest)) * self.workload.compute_bytes
        self._used: set[str] = set()
        self._released: set[str] = set()
        self._held = 0

    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        threshold = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        fetched = tuple(t for t in tensors if t.numel > threshold)
        if not fetched:
            return
        if backward:
            self._release(fetched)
            return
        first = not self._used
        self._used |= {t.name for t in fetched}
        if first:
            self._start(fetched)
        elif self._held < self._most:
            self._hold(self._most)
        if len(self._used) == len(self._rest):
            self.ledger.drop(COALESCED)

    def stay(self) -> None:
        """They are there, and stay there."""

    def _start(self, fetched: tuple[Tensor, ...]) -> None:
        """The first module's own, then what is gathered ahead of all others, in one call."""
        self._hold(self.bytes(fetched))
        ahead = tuple(t for t in self._rest if t not in fetched)
        size = min(self.bytes(ahead), ZERO3_PREFETCH_ELEMENTS * self.workload.compute_bytes)
        if len(ahead) > 1:
            self.ledger.add(COALESCED, size)
        with self.ledger.temporarily(gathering(self.workload, size)):
            pass

    def _hold(self, size: int) -> None:
        self.ledger.drop(GATHERED)
        self._held = size
        self.ledger.add(GATHERED, size)

    def _release(self, fetched: tuple[Tensor, ...]) -> None:
        """What other modules used before in the backward pass is given back once they are done."""
        if not self._stays:
            return
        left = [t for t in self._rest if t.name not in self._released]
        self._hold(self.bytes(tuple(left)))
        tied = set(self.workload.layout.tied.values())
        self._released |= {t.name for t in fetched if t.name not in tied}

    def end_pass(self) -> None:
        self.ledger.drop(GATHERED)
        self.ledger.drop(COALESCED)
