"""The model of a run and what trained it: built, as the harness saw it, and its weights."""

from __future__ import annotations

from typing import Any

from harness.record.part import Part


class TensorPart(Part):
    """A tensor of the model: a parameter or a buffer."""

    name: str
    shape: list[int]
    dtype: str


class LayoutPart(Part):
    """What closed forms need to know of the model, as it was before a library touched it."""

    parameters: list[TensorPart]
    """In the model's order; a tied tensor comes once, under its first name."""
    decaying: list[str]
    """Names of the parameters that decay: the optimizer has one group of them and one of the rest."""
    buffers: list[TensorPart]
    blocks: list[str]
    """Names of the transformer blocks, each of which is wrapped as one unit."""
    tied: dict[str, str] = {}
    """Further name of a tied parameter -> the name under which it stands above."""


class GeometryPart(Part):
    """What closed forms of the arithmetic need to know of a decoder."""

    multiplying_parameters: int
    """Parameters that every token is multiplied with."""
    layers: int
    attention_width: int
    """Heads times their dimension."""


class ModelPart(Part):
    """What was really built."""

    architecture: str
    attention: str | None
    """The attention kernel."""
    parameters: int
    tied_parameters: int
    activation_checkpointing: bool
    geometry: GeometryPart | None = None
    """None where the closed forms do not hold."""
    config: dict[str, Any]
    """Values of the Hugging Face configuration that differ from its defaults."""


class DataPart(Part):
    """Sizes of the data."""

    samples: int
    training_samples: int
    evaluation_samples: int
    target_tokens: int
    vocabulary_size: int


class WeightsPart(Part):
    """All master weights at one moment."""

    digest: str
    """SHA-256 over the sorted (name, SHA-256 of the fp32 bytes)."""
    l2_norm: float | None
    parameter_count: int
    sketch: dict[str, list[float]] | None = None
    """Of each parameter its L2 norm and projections on fixed sign vectors: see `worker/sketch.py`.
    None: not taken, or some weight is not finite."""


class ObservedPart(Part):
    """What the harness saw of a run without asking the backend; None: it could not see."""

    parameters_left_out: list[str] = []
    """Parameters of the model that no optimizer that trains was given."""
    optimizer_used: bool = False
    """Whether the optimizer that the job built is among those that train."""
    optimizer_steps: int | None = None
    optimizer_groups: list[dict[str, Any]] = []
    """Constants of each group of the optimizers that train, whoever built them, and the names of its
    parameters where they can be known."""
    master_dtypes: list[str] = []
    """Of the tensors that the optimizer updates."""
    optimizer_state_dtypes: list[str] = []
    tied_parameters: int | None = None
    frozen_parameters: list[str] = []
    attention: str | None = None
    activation_checkpointing: bool | None = None
    compiled: bool | None = None
    dropout: float | None = None
    """The largest probability in the live model."""
    tf32: bool | None = None
    deterministic: bool | None = None
