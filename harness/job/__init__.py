"""What a job is. Validation touches neither the environment nor the network nor torch."""

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
    DEFAULT_MODEL_CONFIG,
    DEFAULT_STEPS,
    AdapterSection,
    DataSection,
    EvaluationSection,
    Job,
    LossSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    SettingsSection,
    Task,
    TrainingSection,
)
