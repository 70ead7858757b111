"""The model of a run and what trained it: built, as the harness saw it, and its weights."""

from __future__ import annotations

from math import prod
from typing import Any

from pydantic import Field, field_validator, model_validator

from harness.bounds import LARGEST_NUMBER
from harness.forms.model.layout import UnitCall, Use
from harness.record.part import Part


class TensorPart(Part):
    """A tensor of the model: a parameter or a buffer."""

    name: str
    """Its name in the model."""
    shape: list[int]
    """Sizes of its dimensions."""
    dtype: str
    """Its dtype, such as 'float32'."""

    @field_validator("shape")
    @classmethod
    def _has_a_size(cls, shape: list[int]) -> list[int]:
        if min(shape, default=0) < 0 or prod(shape) > LARGEST_NUMBER:
            raise ValueError("no tensor has these sizes")
        return shape


class AttentionPart(Part):
    """Heads of a decoder, alike in all of its blocks."""

    layers: int
    """Number of transformer blocks."""
    heads: int
    """Heads of queries."""
    key_value_heads: int
    """Heads of keys and values."""
    head_size: int
    """Elements of a token in one head."""


class LayoutPart(Part):
    """What closed forms need to know of the model, as it was before a library touched it."""

    parameters: list[TensorPart]
    """In the model's order; a tied tensor comes once, under its first name."""
    decaying: list[str]
    """Names of the parameters that decay: the optimizer has one group of them and one of the rest."""
    groups: list[list[str]] = []
    """Names of the parameters of each group of the optimizer, where the job says more of them than what
    decays; any may be empty."""
    buffers: list[TensorPart]
    """Buffers of the model."""
    blocks: list[str]
    """Names of the transformer blocks, each of which is wrapped as one unit."""
    tied: dict[str, str] = {}
    """Further name of a tied parameter -> the name under which it stands above."""
    frozen: list[str] = []
    """Names of the parameters that the job does not train."""
    without_gradient: list[str] | None = []
    """Names of the modules that run and that no gradient comes back to; None: not known."""
    attention: AttentionPart | None = None
    """None: the model does not say its heads, or the record is older."""
    uses: dict[str, list[Use]] | None = {}
    """Parameters that several modules share, or whose module does not run once in a forward pass -> their
    uses in its order; None: not known."""
    unreached: list[str] | None = []
    """Names of the trained parameters that no gradient reaches, by a step on the meta device; None: not
    known."""
    unit_calls: list[UnitCall] | None = []
    """Runs of the blocks and of the whole model, whose name is '', in the order in which they begin; []: each
    runs once and has a backward pass; None: not known."""
    read_outside: list[str] | None = []
    """Names of the parameters that the loss reads while no module runs, such as for a penalty; None: not
    known."""
    changed_in_passes: list[str] | None = []
    """Names of the parameters that forward passes of training write to in place, as to clamp them; None: not
    known."""
    evaluates_alike: bool | None = True
    """Whether an evaluation runs the same modules in the same order; None: not known."""
    depends_on_data: bool = Field(False, exclude_if=lambda value: not value)
    """Whether values or random numbers may decide what a step runs: bytes of the steps are not judged where
    they hang on that."""

    @model_validator(mode="before")
    @classmethod
    def _untraced(cls, values: Any) -> Any:
        """A record from before gradients were traced knows neither, unless each of its modules runs once."""
        if isinstance(values, dict) and values.get("uses", {}) != {}:
            return {"unreached": None, "unit_calls": None, **values}
        return values


class GeometryPart(Part):
    """What closed forms of the arithmetic need to know of a decoder."""

    multiplying_parameters: int
    """Parameters that every token is multiplied with."""
    layers: int
    """Number of transformer blocks."""
    attention_width: int
    """Heads times their dimension."""


class ModelPart(Part):
    """What was really built."""

    architecture: str
    """Class of the model, such as 'LlamaForCausalLM'."""
    attention: str | None
    """The attention kernel; None: the model does not say."""
    parameters: int
    """Number of parameters; a tied tensor counts once."""
    tied_parameters: int
    """Names that tied parameters have beyond their first."""
    activation_checkpointing: bool
    """Whether blocks recompute their activations."""
    whole_because: str | None = None
    """Why every rank built it whole although runtime.loading asked for less; None: nothing did."""
    geometry: GeometryPart | None = None
    """None where the closed forms do not hold."""
    config: dict[str, Any]
    """Values of the Hugging Face configuration that differ from its defaults; empty: it has none."""


class DataPart(Part):
    """Sizes of the data."""

    samples: int
    """Samples altogether."""
    training_samples: int
    """Samples that training draws from."""
    evaluation_samples: int
    """Samples held out."""
    target_tokens: int
    """Labels that count in the loss, over all samples: tokens of text, one of each classified sample."""
    vocabulary_size: int | None = None
    """Tokens that the tokenizer knows; None: there is none."""
    classes: int | None = None
    """Classes of a classification."""
    misplaced_labels: int = 0
    """Labels that are not the token at their position, over all samples; of causal-lm only."""


DIGEST_KIND = "-sum64"
"""Ends a digest of weights; older records have SHA-256 of the bytes and no such end."""


def weights_differ(left: str | None, right: str | None) -> bool:
    """Whether two digests of weights tell different ones; of two kinds, or without one, they tell nothing."""
    if left is None or right is None or left.endswith(DIGEST_KIND) != right.endswith(DIGEST_KIND):
        return False
    return left != right


class WeightsPart(Part):
    """All master weights at one moment."""

    digest: str
    """SHA-256 over the sorted (name, shape, sum of the fp32 bits: `rank/probes/sketch.py`), and
    DIGEST_KIND."""
    l2_norm: float | None
    """L2 norm of all weights; None: not finite."""
    parameter_count: int
    """Number of weights; a tied tensor counts once."""
    sketch: dict[str, list[float]] | None = None
    """Of each parameter its L2 norm and projections on fixed sign vectors: see `rank/probes/sketch.py`.
    None: not taken, or some weight is not finite."""
    copied_elements: int | None = None
    """Weights that forward passes use and that are copies of masters, over all ranks; None: there are none,
    the backend does not show them, or the record is older."""
    stale_elements: int | None = None
    """Those of them that are not their master, rounded to their dtype."""


class SplitPart(Part):
    """Whether the gradient of a batch hangs on how it is cut: of the first batches, where it does most."""

    difference: float
    """Distance of the gradient of a batch from the sum over its two halves, relative."""
    repetition: float
    """The same of the batch taken twice: more than rounding where the loss draws random numbers, or a
    forward pass changes what the next one reads."""
    rounding: float
    """What rounding explains at most."""
    by_samples: float | None = None
    """Where one batch has another gradient each time: how far samples or chance change it, relative. The
    larger of two distances: of the sum over halves that find the same state, and of the batch after other
    samples. None: not measured."""

    @property
    def varies(self) -> bool:
        """Whether one batch has another gradient each time."""
        return not self.repetition <= self.rounding

    @property
    def counts_passes(self) -> bool:
        """Whether that hangs on how many passes there were alone, as in the power iteration of a spectral
        norm."""
        return self.varies and self.by_samples is not None and self.by_samples <= self.rounding

    @property
    def is_random(self) -> bool:
        """Whether it hangs on chance, or on the samples that there were."""
        return self.varies and not self.counts_passes

    @property
    def depends(self) -> bool:
        """Whether the loss is no sum over samples."""
        return self.varies or not self.difference <= self.rounding


class ModelLossPart(Part):
    """The loss that the model returns, beside the job's of the same outputs: of one batch, at the end."""

    model: float
    """As the model returns it of labels, in nats: a mean over targets, and what else the model adds."""
    job: float
    """The mean of the loss that the job trains, in nats per target token."""
    targets: int
    """Target tokens of the batch."""


OUTSIDE = "outside"
"""Between the end of a step's clock and the begin of the next one's."""


class ObservedPart(Part):
    """What the harness saw of a run without asking the backend; None: it could not see."""

    parameters_left_out: list[str] = []
    """Parameters of the model that no optimizer that trains was given."""
    optimizer_used: bool = False
    """Whether the optimizer that the job built is among those that train."""
    optimizer_steps: int | None = None
    """Updates that the optimizers made."""
    optimizer_groups: list[dict[str, Any]] = []
    """Constants of each group of the optimizers that train, whoever built them, and the names of its
    parameters where they can be known; of an observed script also its last rate, its dtypes and the number
    of its tensors."""
    learning_rates: list[list[float | None]] = []
    """Of each of these groups its rate in every step that was taken; []: that of the steps."""
    constants_by_step: dict[int, list[dict[str, Any]]] = {}
    """Constants of these groups by the first step at whose end they were seen, before or after whose update
    they changed; {}: they never did."""
    updated_tensors: int | None = None
    """Tensors with a gradient that the optimizers of an observed script were given in one of the first
    steps, on rank 0; None: not looked at."""
    updates_by_phase: dict[str, int] = {}
    """How often torch optimizers stepped in the first steps, by what the loop did: 'step' as it should be;
    'outside': after a step's time was taken, before that of the next began. Empty: none stepped."""
    evaluating_in_training: list[str] | None = None
    """Modules that behave otherwise in training, such as dropout, and were in evaluation mode in a training
    pass; None: not looked at, as in compiled models or an older record."""
    training_in_evaluation: list[str] | None = None
    """The same: in training mode in an evaluation pass, that at the end of the training included."""
    buffers: dict[str, str] = {}
    """Digest of the values of each buffer of floating-point numbers when the first step begins; {}: there are
    none, an older record, or an observed script."""
    still_buffers: list[str] | None = None
    """Those of them that have the same values after the last step; None: not looked at, or there are none."""
    compute_dtype: str | None = None
    """Of most outputs of linear layers and convolutions in the first steps; None: none was seen."""
    products_otherwise: dict[str, list[str]] = Field({}, exclude_if=lambda value: not value)
    """Linear layers and convolutions whose outputs had another dtype than most, by dtype."""
    model_loss: ModelLossPart | None = None
    """None: the model returns no loss, is compiled or divided, or the job has a loss of its own."""
    master_dtypes: list[str] = []
    """Of the tensors that the optimizer updates."""
    optimizer_state_dtypes: list[str] = []
    """Of the moments that the optimizer keeps."""
    wide_optimizer_bytes: int | None = None
    """Of moments in full width that an 8-bit optimizer of the job could hold in 8 bits; None: it has none."""
    matrices_in_parts: int | None = None
    """Matrices of which no optimizer of a Muon job keeps the momentum whole; None: another optimizer."""
    wide_linears: int | None = None
    """Linear layers of blocks that do not multiply in fp8; None: the run is not to do so."""
    tied_parameters: int | None = None
    """Names that tied parameters have beyond their first, in the live model."""
    frozen_parameters: list[str] = []
    """Parameters that need no gradient, beyond those that the job freezes."""
    frozen_dtypes: list[str] = []
    """Of the weights that the job freezes, as the live model holds them."""
    attention: str | None = None
    """The attention kernel of the live model."""
    activation_checkpointing: bool | None = None
    """Whether blocks recompute their activations."""
    compiled: bool | None = None
    """Whether a module is compiled by torch.compile."""
    compiled_graphs: int | None = None
    """Graphs that the compiler made in a rank's process; None: nothing is compiled."""
    graph_breaks: int | None = None
    """Places where Python code interrupts a graph."""
    recompilations: int | None = None
    """Functions compiled once more because what their code assumed no longer held."""
    dropout: float | None = None
    """The largest probability in the live model."""
    tf32: bool | None = None
    """Whether matrix products on CUDA may use TF32."""
    deterministic: bool | None = None
    """Whether torch uses deterministic kernels. Not if CUDA's attention would only warn."""

    @model_validator(mode="before")
    @classmethod
    def _without_counts(cls, values: Any) -> Any:
        """Older records have what the reference counted where values decide what runs."""
        return {k: v for k, v in values.items() if k != "counted"} if isinstance(values, dict) else values
