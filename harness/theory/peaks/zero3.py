"""DeepSpeed 0.19.8, ZeRO stage 3: weights gathered by module, gradients reduced by bucket."""

from __future__ import annotations

from harness.theory.dtypes import DTYPE_BYTES
from harness.theory.layout import Tensor, ceil_to, elements
from harness.theory.optimizer_step import implementation, updated_tensors
from harness.theory.peaks.course import GRADIENTS, STATE_SOURCE, Course
from harness.theory.peaks.ledger import Holding
from harness.theory.peaks.norms import deepspeed_norm
from harness.theory.peaks.transports import gathering, reduce_scattering
from harness.theory.peaks.zero3_fetch import Fetching, LikeForLike, WithDefaults
from harness.theory.zero import bucket_elements, gradient_accumulation_bytes, reduce_dtype
from harness.theory.zero3.states import SECOND_COPY, SECOND_COPY_PADDING

_SOURCE = "DeepSpeed 0.19.8, runtime/zero/stage3.py: "
CONVERTED = Holding(
    kind="communication", name="gradient beyond the bucket, in the reduce dtype",
    formula="reduce bytes x gradient",
    source=_SOURCE + "__avg_scatter_grads",
)  # fmt: skip
INTERLEAVED = Holding(
    kind="communication", name="bucket ordered by rank", formula="reduce bytes x bucket",
    source="DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py: reduce_scatter_coalesced",
)  # fmt: skip
FLAT = Holding(
    kind="gradients", name="flat gradients of a sub-group", formula="accumulation bytes x sub-group",
    source=_SOURCE + "_prepare_fp32_grad_for_sub_group",
)  # fmt: skip
WIDENED = Holding(
    kind="gradients", name="the same in the dtype of the masters", formula="master bytes x sub-group",
    source=FLAT.source,
)  # fmt: skip
UPDATE = Holding(
    kind="temporary", name="AdamW's update", formula="2 x (for-loop) or 1 x (foreach) the sub-group",
    source="torch 2.13, optim/adam.py, on the flat partition of one sub-group",
)  # fmt: skip


class Zero3Course(Course):
    """Like for like nothing is gathered ahead or kept; with the library's defaults small models are whole."""

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        if workload.like_for_like:  # else it is taken to be there from the start
            for holding in [h for h in self.ledger.held if h.name in (SECOND_COPY, SECOND_COPY_PADDING)]:
                self.ledger.drop(holding)
        self._width = workload.compute_bytes
        self._limit = bucket_elements(workload)
        self._reduced = DTYPE_BYTES[reduce_dtype(workload)]
        self._accumulated = gradient_accumulation_bytes(workload)
        self._bucket: list[Tensor] = []
        kind = LikeForLike if workload.like_for_like else WithDefaults
        self._fetching: Fetching = kind(workload, self.ledger)

    def keeps_gradient(self, *, host: bool) -> bool:
        return True  # `_setup_for_real_optimizer`: one of every piece, for good

    @property
    def gradient_bytes(self) -> int:
        return self._width

    def before_model(self) -> None:
        self._fetching.begin_pass()

    def before_backward_of_embedding(self) -> None:
        self._fetching.stay()

    def at_module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        if self.workload.world_size > 1:
            self._fetching.module(tensors, backward=backward)

    def gradient_ready(self, parameter: Tensor) -> None:
        self.ledger.add(GRADIENTS, parameter.numel * self._width)
        self.ledger.look()
        if self._bucket and elements(self._bucket) + parameter.numel > self._limit:
            self._reduce()
        if elements(self._bucket) + parameter.numel <= self._limit:
            self.ledger.drop(GRADIENTS, parameter.numel * self._width)
        self._bucket.append(parameter)

    def after_backward_of_model(self) -> None:
        # The hook of the last gradient reduces (`update_hook_state_and_maybe_run_epilogue`): the embedding's
        # weights are still there.
        self._reduce()
        self._fetching.end_pass()

    def _reduce(self) -> None:
        bucket, self._bucket = self._bucket, []
        if not bucket:
            return
        ranks = self.workload.world_size
        count, padded = elements(bucket), sum(ceil_to(t.numel, ranks) for t in bucket)
        # The bucket itself is in the reduce dtype.
        converted = count * self._reduced if self._reduced != self._width and count > self._limit else 0
        in_place = len(bucket) == 1 and padded == count
        with (
            self.ledger.during("reduction"),
            self.ledger.temporarily(
                (CONVERTED, converted),
                (INTERLEAVED, 0 if in_place else padded * self._reduced),
                reduce_scattering(self.workload, padded * self._reduced),
            ),
        ):
            pass
        if count > self._limit:
            self.ledger.drop(GRADIENTS, count * self._width)

    def step(self) -> None:
        gathered = [h for h in self.ledger.held if h.kind == "gathered" and h.source == STATE_SOURCE]
        kept = {holding: self.ledger.held[holding] for holding in gathered}
        for holding in gathered:
            self.ledger.drop(holding)
        self._update_all()
        for holding, count in kept.items():
            self.ledger.add(holding, count)
            with self.ledger.temporarily(gathering(self.workload, count)):
                pass

    def _update_all(self) -> None:
        offloads = self.workload.offload != "none"
        largest = max(-(-t.numel // self.workload.world_size) for t in self.workload.layout.parameters)
        with self.ledger.temporarily(deepspeed_norm(self.workload, 0 if offloads else largest)):
            pass
        master = self.workload.master_bytes
        times = {"for-loop": 2, "foreach": 1, "fused": 0}[implementation(self.workload)]
        on_device = not offloads or self.workload.device == "cpu"
        for (piece,) in updated_tensors(self.workload):
            if not offloads:
                self._flatten(piece)
            with self.ledger.temporarily((UPDATE, times * piece * master if on_device else 0)):
                pass
            self.ledger.drop(FLAT)
            self.ledger.drop(WIDENED)

    def _flatten(self, piece: int) -> None:
        self.ledger.add(FLAT, piece * self._accumulated)
        if self.workload.master_bytes != self._accumulated:
            self.ledger.add(WIDENED, piece * self.workload.master_bytes)
            self.ledger.look()
            self.ledger.drop(FLAT)
