"""The record of one run, schema version 2: everything shown to a person is computed from records.

Integers are bytes, floats seconds, values per rank and not aggregated, unless a field says otherwise.
"""

from harness.record.environment import (
    AcceleratorPart,
    EnvironmentPart,
    FabricPart,
    GitPart,
    InterfacePart,
    NodePart,
    SlurmPart,
)
from harness.record.model import (
    OUTSIDE,
    AttentionPart,
    DataPart,
    GeometryPart,
    LayoutPart,
    ModelLossPart,
    ModelPart,
    ObservedPart,
    SplitPart,
    TensorPart,
    WeightsPart,
)
from harness.record.part import Part
from harness.record.ranks import (
    AnswerPart,
    AnswersPart,
    CheckpointPart,
    CommunicationPart,
    EnergyPart,
    EvaluationPart,
    MemoryPart,
    Moment,
    OddUpdatePart,
    OverlapPart,
    PlacementPart,
    ProcessorPart,
    RankPart,
    ResumedPart,
    SavedFormat,
    SetupMemoryPart,
    StepPart,
    TurnsPart,
    WaitPart,
    Window,
    WindowsPart,
)
from harness.record.run import (
    SCHEMA_VERSION,
    ArtifactKind,
    ArtifactPart,
    BackendPart,
    DimensionPart,
    ErrorPart,
    FileKind,
    GivenMode,
    GivenPart,
    GivenSettingPart,
    ObservationPart,
    PredictionPart,
    RankStatePart,
    Record,
    Status,
    WorldPart,
)
