"""The course of a step by family."""

from __future__ import annotations

from harness.theory.activations import ActivationProfile
from harness.theory.peaks.course import Course
from harness.theory.peaks.ddp import DdpCourse
from harness.theory.peaks.fsdp1 import Fsdp1Course
from harness.theory.peaks.fsdp2 import Fsdp2Course
from harness.theory.peaks.ledger import Fullest, Ledger, Phase
from harness.theory.peaks.walk import Walk
from harness.theory.peaks.zero0 import Zero0Course
from harness.theory.peaks.zero3 import Zero3Course
from harness.theory.peaks.zero12 import Zero12Course
from harness.theory.workload import Workload

COURSES: dict[str, type[Course]] = {
    "single": Course,
    "ddp": DdpCourse,
    "fsdp1": Fsdp1Course,
    "fsdp2": Fsdp2Course,
    "zero0": Zero0Course,
    "zero12": Zero12Course,
    "zero3": Zero3Course,
}


def fullest_moments(workload: Workload, profile: ActivationProfile) -> dict[Phase, Fullest]:
    """The fullest moment of each phase of an ordinary step of one rank."""
    assert workload.part_length is not None
    ledger = Ledger()
    course = COURSES.get(workload.strategy.family, Course)(workload, ledger)
    walk = Walk(course, profile, micro_batch=workload.micro_batch_size, sequence=workload.part_length)
    walk.run()
    return ledger.fullest
