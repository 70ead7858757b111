"""Pipeline parallelism of torch 2.13: states by stage, and what stages send each other."""

from __future__ import annotations

from collections.abc import Iterable

from harness.backends.options import PipelineOptions
from harness.backends.pipeline.cut import Cut, why_not_cut
from harness.forms import terms
from harness.forms.layout import DTYPE_BYTES, Tensor, elements
from harness.forms.single import ADAM_MOMENTS, buffer_terms, step_counters
from harness.forms.workload import Workload


def bubble_share(*, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (v m + p - 1) of the time of the passes, for p ranks of v stages and m micro-batches.

    GPipe and 1F1B have v = 1 and the same share: 1F1B saves memory, not time. All stages are taken to last
    equally long, a message no time. Sources: GPipe (arXiv 1811.06965, section 2.3); interleaved stages:
    Narayanan et al. (arXiv 2104.04473, section 2.2), whose ratio to the ideal time this turns into a share.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


ACTIVATIONS = "activations sent to the next stage"
ACTIVATION_GRADIENTS = "gradients of activations sent to the stage before"
ARRIVED = "received from the stages around"
"""Of sends: the other side's payload, which nobody sends twice."""
TIED = "gradient of the tied weight exchanged"
VOTE = "agreement of the stages on static shapes"
VOTE_DTYPE = "int32"
RECEIVED = "where activations and their gradients arrive"


def options_of(workload: Workload) -> PipelineOptions:
    """The backend's options as typed; those of `OtherCode` are none of its own."""
    own = PipelineOptions.model_fields
    return PipelineOptions.model_validate({k: v for k, v in workload.options.items() if k in own})


def ranks_of(workload: Workload) -> int:
    """Ranks of one pipeline."""
    mesh = workload.mesh or options_of(workload).mesh(workload.world_size)
    return mesh.size("pipeline")


def cut_of(workload: Workload) -> Cut:
    """How the model is cut."""
    ranks = ranks_of(workload)
    return Cut(ranks=ranks, stages=options_of(workload).stages_on(ranks), blocks=workload.layout.blocks)


def place_of(workload: Workload) -> int:
    """The rank's place in its pipeline."""
    mesh = workload.mesh or options_of(workload).mesh(workload.world_size)
    return mesh.coordinates(workload.rank)["pipeline"]


def micro_batches_of(workload: Workload) -> int:
    """Parts of the batch of a micro-step."""
    return options_of(workload).micro_batches or ranks_of(workload)


def bubble_of(workload: Workload) -> float:
    """Share of the passes that ranks wait by the schedule alone."""
    cut = cut_of(workload)
    return bubble_share(
        ranks=cut.ranks, micro_batches=micro_batches_of(workload), stages_per_rank=cut.stages // cut.ranks
    )


def held(workload: Workload) -> list[Tensor]:
    """Parameters of this rank's stages, in the model's order; a tied one on both ends of the pipeline."""
    cut, place, layout = cut_of(workload), place_of(workload), workload.layout
    names = [*(tensor.name for tensor in layout.parameters), *layout.tied]
    stages = layout.once(("stages", cut.stages), lambda: cut.stage_by_name(names))
    own = set(cut.of_rank(place))
    tied_here = {first for name, first in layout.tied.items() if stages[name] in own}
    return [t for t in layout.parameters if stages[t.name] in own or t.name in tied_here]


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each parameter of the rank's stages, by group of the optimizer."""
    own = {tensor.name for tensor in held(workload)}
    groups = workload.layout.update_groups()
    return [[tensor.numel for tensor in group if tensor.name in own] for group in groups]


def model_states(workload: Workload) -> terms.ModelStates:
    """Weights, gradients and Adam's states of the rank's stages, and buffers for what arrives.

    `PipelineStage` allocates one for each micro-batch and keeps it (torch 2.13,
    distributed/pipelining/stage.py, `_prepare_forward_infra` and `_create_grad_recv_info`).
    """
    tensors = held(workload)
    size = elements(tensors) * workload.master_bytes
    arriving = sum(neighbours(workload)) * (crossing_bytes(workload) or 0)
    return terms.states(
        [
            terms.Term(kind="weights", name="weights of the rank's stages", bytes=size),
            terms.Term(kind="gradients", name="gradients of the rank's stages", bytes=size),
            terms.Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * size),
            step_counters(len(tensors), workload),
            terms.Term(kind="communication", name=RECEIVED, bytes=arriving, extra=True),
            *buffer_terms(workload),
        ]
    )


def neighbours(workload: Workload) -> tuple[int, int]:
    """How many of the rank's stages have one before them, and how many one behind them."""
    cut = cut_of(workload)
    own = cut.of_rank(place_of(workload))
    return sum(stage > 0 for stage in own), sum(stage < cut.stages - 1 for stage in own)


def crossing_bytes(workload: Workload) -> int | None:
    """Hidden states of a micro-step at one border of two stages; None: the sequence length is not known.

    samples x length x width of the model, in the dtype of the weights: autocast leaves the residual stream as
    the embedding made it.
    """
    if workload.sequence_length is None:
        return None
    hidden = workload.layout.parameters[0].shape[-1]
    return workload.micro_batch_size * workload.sequence_length * hidden * workload.master_bytes


def collectives(workload: Workload) -> terms.Volume:
    """Hidden states forward, their gradients backward, one all-reduce of gradients over the pipelines."""
    cut = cut_of(workload)
    reason = why_not_cut(blocks=len(cut.blocks), ranks=cut.ranks, stages=cut.stages)
    if reason is not None or crossing_bytes(workload) is None:
        return terms.Volume(unknown=reason or "the sequence length is not known")
    return terms.Volume(collectives=tuple(terms.over_steps(workload, _step)))


def _step(workload: Workload, step: int) -> list[terms.Collective]:
    before, behind = neighbours(workload)
    dtype, passes = workload.master_dtype, workload.accumulation_steps
    size, calls = (crossing_bytes(workload) or 0) * passes, micro_batches_of(workload) * passes
    found = [
        *_messages("forward", ACTIVATIONS, dtype, behind, before, size, calls),
        *_messages("backward", ACTIVATION_GRADIENTS, dtype, before, behind, size, calls),
    ]
    if step == 0:
        # Before its first micro-batch each stage tells the next, then the one before, that it knows its
        # shapes: `_warmup_forward_vote` and `_warmup_backward_result` (stage.py), one int32 each.
        borders = before + behind
        found += _messages("backward", VOTE, VOTE_DTYPE, borders, borders, DTYPE_BYTES[VOTE_DTYPE], 1)
    # The ends of a pipeline swap their gradients of what both hold, and add them up.
    ends = (0, ranks_of(workload) - 1)
    firsts = set(workload.layout.tied.values()) if place_of(workload) in ends else set()
    shared = [tensor for tensor in workload.layout.parameters if tensor.name in firsts]
    tied_bytes = elements(shared) * workload.master_bytes
    found += _messages("backward", TIED, dtype, bool(shared), bool(shared), tied_bytes, len(shared))
    # Tensor by tensor after the last backward pass, over the ranks that hold the same stages.
    if ranks_of(workload) < workload.world_size:
        sizes = terms.whole_sizes(held(workload))
        found += terms.gathered("backward", terms.GRADIENTS, sizes, dtype, op="all_reduce", role="data")
    return [*found, terms.Collective("step", "all_reduce", "float64", terms.NORM, 8, role="pipeline")]


def _messages(
    phase: str, term: str, dtype: str, sent: int, received: int, size: int, calls: int
) -> Iterable[terms.Collective]:
    """sent, received: borders; size: bytes at one of them, in so many calls."""
    for op, borders, of_term in (("send", sent, term), ("recv", received, ARRIVED)):
        if borders:
            yield terms.Collective(phase, op, dtype, of_term, borders * size, borders * calls, "pipeline")


def samples_at_once(workload: Workload) -> int:
    """Samples that one pass of a rank computes: a pipeline cuts the micro-step into micro-batches."""
    if not workload.strategy.facts.cuts_layers:
        return workload.micro_batch_size
    return workload.micro_batch_size // micro_batches_of(workload)
