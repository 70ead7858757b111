"""What a job is. Validation touches neither the environment nor the network nor torch."""

from harness.spec.adapter import AdapterSection
from harness.spec.data import DataSection
from harness.spec.experiment import (
    LEAST_TIMED_STEPS,
    CheckpointFormat,
    CompareSection,
    Experiment,
    MeasureSection,
    Question,
    RuntimeSection,
)
from harness.spec.job import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_STEPS,
    EvaluationSection,
    Job,
    OptimizerSection,
    ScheduleSection,
    TrainingSection,
)
from harness.spec.limits import Limits
from harness.spec.loss import LossSection
from harness.spec.model import DEFAULT_MODEL_CONFIG, ModelSection
from harness.spec.price import GivenPrice, Price, read_price
from harness.spec.section import Section
from harness.spec.task import Task
