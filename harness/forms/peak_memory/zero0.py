"""DeepSpeed 0.19.8, ZeRO stage 0: whole gradients, flattened to be reduced, and widened for the update."""

from __future__ import annotations

from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.peak_memory.step_timeline import GRADIENTS, StepTimeline, harness_norm
from harness.forms.terms import named_terms
from harness.forms.zero.stages import reduce_dtype
from harness.forms.zero.zero0 import FALLBACK_BUCKET_ELEMENTS

FLATTENED, CONVERTED, WIDENED, FLOAT_COPY = named_terms("zero0", "flattened converted widened float_copy")


class Zero0Timeline(StepTimeline):
    """Data parallelism by DeepSpeed's engine."""

    @property
    def gradient_bytes(self) -> int:
        return self.workload.compute_bytes

    def after_backward_of_model(self) -> None:
        if not self.last_micro_step:
            return
        reduced = DTYPE_BYTES[reduce_dtype(self.workload)]
        bucket = self._largest_bucket()
        converted = bucket * reduced if reduced != self.workload.compute_bytes else 0
        flattened = (FLATTENED, bucket * self.workload.compute_bytes)
        with self.ledger.during("reduction"):
            self.ledger.briefly(flattened, (CONVERTED, converted))

    def _largest_bucket(self) -> int:
        """`allreduce_no_retain`: a bucket is reduced once it exceeds its limit."""
        largest = held = 0
        for parameter in self.workload.layout.trained:
            held += parameter.numel
            largest = max(largest, held)
            if held > FALLBACK_BUCKET_ELEMENTS:
                held = 0
        return largest

    def step(self) -> None:
        parameters = self.workload.layout.trained
        largest = max(parameter.numel for parameter in parameters)
        if self.workload.precision == "fp32":
            self.ledger.briefly(harness_norm(self.workload, largest))
            super().step()
            return
        self.ledger.briefly((FLOAT_COPY, 4 * largest))
        self.ledger.add(WIDENED, 4 * self.workload.layout.trained_count)
        super().step()
        self.ledger.drop(WIDENED)
        self.ledger.drop(GRADIENTS)
