"""The course of a step by family, and that of DDP."""

from __future__ import annotations

from harness.forms.activations import ActivationProfile
from harness.forms.ddp import wraps
from harness.forms.layout import Tensor
from harness.forms.part import within
from harness.forms.peaks.course import GRADIENTS, Course, Fullest, Ledger, Phase
from harness.forms.peaks.fsdp1 import Fsdp1Course
from harness.forms.peaks.fsdp2 import Fsdp2Course
from harness.forms.peaks.pipeline import pipeline_moments
from harness.forms.peaks.walk import Walk
from harness.forms.peaks.zero0 import Zero0Course
from harness.forms.peaks.zero3 import Zero3Course, Zero3TensorCourse
from harness.forms.peaks.zero12 import Zero12Course
from harness.forms.terms import Term
from harness.forms.workload import Workload

BUCKETS = Term(
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


COURSES: dict[str, type[Course]] = {
    "single": Course,
    "ddp": DdpCourse,
    "fsdp1": Fsdp1Course,
    "fsdp2": Fsdp2Course,
    "zero0": Zero0Course,
    "zero12": Zero12Course,
    "zero3": Zero3Course,
    "zero3-tensor": Zero3TensorCourse,
}
PIPELINE = "pipeline"


def has_course(workload: Workload) -> bool:
    """Whether the course of a step is known."""
    family = within(workload).strategy.family
    return family == PIPELINE or family in COURSES


def fullest_moments(workload: Workload, profile: ActivationProfile) -> dict[Phase, Fullest]:
    """The fullest moment of each phase of an ordinary step of one rank."""
    if workload.strategy.family == PIPELINE:
        return pipeline_moments(workload, profile)
    length = workload.part_length
    assert length is not None
    of_cut_layers = COURSES.get(workload.strategy.family)
    ledger, workload = Ledger(), within(workload)
    course = (of_cut_layers or COURSES.get(workload.strategy.family, Course))(workload, ledger)
    if type(course).at_module is Course.at_module:
        profile = profile.fullest(workload.micro_batch_size, length)
    walk = Walk(course, profile, micro_batch=workload.micro_batch_size, sequence=length)
    walk.run()
    return ledger.moments()
