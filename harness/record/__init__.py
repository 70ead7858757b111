"""The record of one run, schema version 2: everything shown to a person is computed from records.

Integers are bytes, floats seconds, values per rank and not aggregated, unless a field says otherwise.
"""

from harness.record.answers import AnswerPart, AnswersPart
from harness.record.checkpoint import CheckpointPart, ResumedPart, SavedFormat
from harness.record.communication import CommunicationPart
from harness.record.energy import EnergyPart
from harness.record.environment import (
    AcceleratorPart,
    EnvironmentPart,
    FabricPart,
    GitPart,
    InterfacePart,
    NodePart,
    SlurmPart,
)
from harness.record.error import ErrorPart, RankStatePart
from harness.record.given import FileKind, GivenMode, GivenPart, GivenSettingPart
from harness.record.memory import MemoryPart, Moment, SetupMemoryPart
from harness.record.model import (
    AttentionPart,
    DataPart,
    GeometryPart,
    LayoutPart,
    ModelPart,
    ObservedPart,
    TensorPart,
    WeightsPart,
)
from harness.record.observation import ObservationPart
from harness.record.part import Part
from harness.record.prediction import PredictionPart
from harness.record.ranks import OverlapPart, ProcessorPart, RankPart, WaitPart
from harness.record.run import (
    SCHEMA_VERSION,
    ArtifactKind,
    ArtifactPart,
    BackendPart,
    Record,
    Status,
)
from harness.record.steps import EvaluationPart, StepPart, Window, WindowsPart
from harness.record.world import DimensionPart, WorldPart
