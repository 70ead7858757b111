"""What a job is. Validation touches neither the environment nor the network nor torch."""

from harness.job.data import DataSection
from harness.job.experiment import (
    LEAST_TIMED_STEPS,
    CheckpointFormat,
    CompareSection,
    Experiment,
    GivenPrice,
    Limits,
    MeasureSection,
    Price,
    ReportFocus,
    RuntimeSection,
    read_price,
)
from harness.job.job import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_STEPS,
    EvaluationSection,
    Job,
    Task,
    TrainingSection,
)
from harness.job.model import DEFAULT_MODEL_CONFIG, AdapterSection, LossSection, ModelSection, SettingsSection
from harness.job.optimizer import OptimizerSection, ScheduleSection
