"""DistributedDataParallel of torch 2.13: its buckets, which gradients are views of like for like."""

from __future__ import annotations

from harness.forms.ddp import wraps
from harness.forms.layout import Tensor
from harness.forms.peaks.course import GRADIENTS, Course, Holding

BUCKETS = Holding(
    kind="gradients", name="gradients, as views of DDP's buckets", formula="4 P",
    source="torch 2.13, csrc/distributed/c10d/reducer.cpp: buckets stay allocated between steps",
)  # fmt: skip


class DdpCourse(Course):
    """Buckets stay; a gradient is copied into its bucket as it comes, and freed where it is a view."""

    def begin(self) -> None:
        super().begin()
        if self._views:
            size = self.workload.layout.trained_count * self.workload.master_bytes
            self.ledger.add(BUCKETS, size)

    def gradient_ready(self, parameter: Tensor) -> None:
        # Under `no_sync` gradients add up beside the buckets; the last micro-step copies them in.
        if not self._views or not self.last_micro_step:
            super().gradient_ready(parameter)
        elif self.micro_step:
            self.ledger.drop(GRADIENTS, parameter.numel * self.gradient_bytes)

    @property
    def _views(self) -> bool:
        return wraps(self.workload) and self.workload.like_for_like
