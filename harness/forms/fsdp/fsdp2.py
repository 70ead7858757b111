"""fully_shard (FSDP2) of torch 2.13, on one and two-dimensional meshes, natively and through Accelerate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from harness.forms import terms
from harness.forms.fsdp.units import (
    KEPT_BY_EVALUATION,
    GatherUnit,
    all_reduced,
    blocks_without_gradient,
    gathers,
    gathers_and_reductions,
    irregular_units,
    norm,
    overflow,
    reduction_remarks,
    reductions,
    shard_role,
)
from harness.forms.layout import DTYPE_BYTES, Layout, Tensor, UnitCall, ceil_to, elements
from harness.forms.single import ADAM_MOMENTS, buffer_terms, cut_frozen, step_counters
from harness.forms.workload import Workload


class Order:
    """The units of one rank as they are gathered and given back; each pass returns how often each was."""

    def __init__(self, calls: Sequence[UnitCall], kept: Mapping[str, bool]) -> None:
        """kept: by unit, whether it stays gathered after a forward pass."""
        self._moments = [moment for moment in _moments(calls) if moment[0] in kept]
        self._kept = kept
        self._there: set[str] = set()
        self._not_waited_for: set[str] = set()
        """Gathered ahead, which giving back leaves alone (`_all_gather_result`)."""
        self._ran: list[str] = []
        """`post_forward_order`, which lasts until the last backward pass of a step."""

    def forward(self) -> Counter[str]:
        gathered: Counter[str] = Counter()
        for name, _, begins in self._moments:
            if begins:
                self._need(name, gathered)
            else:
                self._ran.append(name)
                if not self._kept[name]:
                    self._there.discard(name)
        return gathered

    def backward(self, *, last: bool) -> Counter[str]:
        """`pre_backward` gathers a unit and, ahead, the one that ran before it; `post_backward`, which hangs
        on its inputs, gives it back, at the latest at the end (`_root_post_backward_final_callback`)."""
        gathered: Counter[str] = Counter()
        indices = {name: [n for n, ran in enumerate(self._ran) if ran == name] for name in self._kept}
        at_work: dict[str, bool] = {}
        for name, use, begins in reversed(self._moments):
            if use == "forward only" or (not begins and at_work.get(name)):
                continue
            if not begins:
                at_work[name] = True
                self._need(name, gathered)
                before = indices[name].pop() - 1
                if before >= 0 and (target := self._ran[before]) not in self._there:
                    self._need(target, gathered)
                    self._not_waited_for.add(target)
            elif use == "inputs with gradient":
                at_work[name] = False
                self._there -= {name} - self._not_waited_for
        self._there -= {name for name in self._kept if at_work.get(name) is not False} - self._not_waited_for
        if last:
            self._there -= self._not_waited_for
            self._not_waited_for.clear()
            self._ran.clear()
        return gathered

    def _need(self, name: str, gathered: Counter[str]) -> None:
        if name not in self._there:
            gathered[name] += 1
            self._there.add(name)
        self._not_waited_for.discard(name)


def _moments(calls: Sequence[UnitCall]) -> Iterator[tuple[str, str, bool]]:
    """(unit, use, whether it begins): a run of the whole model ends before the next begins."""
    whole: str | None = None
    for name, use in calls:
        if name == "":
            if whole is not None:
                yield "", whole, False
            whole = use
        yield name, use, True
        if name:
            yield name, use, False
    if whole is not None:
        yield "", whole, False


def in_order(workload: Workload, units: Mapping[str, GatherUnit], step: int) -> Iterator[terms.Collective]:
    """What one step gathers. units: by name, '' for what no block holds."""
    order = Order(workload.layout.unit_calls or (), {name: unit.kept for name, unit in units.items()})
    if workload.follows_evaluation(step):
        order.forward()
    for micro_step in range(workload.accumulation_steps):
        last = workload.reduces_each or micro_step == workload.accumulation_steps - 1
        forward, backward = (
            (terms.FURTHER_FORWARD, terms.FURTHER_BACKWARD) if micro_step else (terms.FORWARD, terms.BACKWARD)
        )
        passes = (
            ("forward", forward, order.forward),
            ("backward", backward, partial(order.backward, last=last)),
        )
        for phase, term, run in passes:
            yield from gathers(workload, phase, term, [units[name] for name in run().elements()])


UnitTensors = tuple[list[Tensor], bool, bool]
"""Parameters of a unit, whether it stays gathered between forward and backward pass, and whether torch's
prefetch takes it for another one (`harness.forms.fsdp.units.GatherUnit`)."""


def units_around_blocks(layout: Layout) -> list[UnitTensors]:
    """`fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py): embedding, last norm with output, the rest.

    An untied embedding is resharded as the blocks are. The last norm and the output layer are one unit that
    is not, with the embedding if it is tied; nor is the root, for which torch decides.
    """
    outside = dict(layout.units()).get("", [])
    if not outside:
        return []
    embedding = _module(outside[0])
    # Accelerate looks among the base model's direct children, as 'model.norm.weight' is.
    norms = [_module(t) for t in outside[1:] if len(t.shape) == 1 and t.name.count(".") == 2]
    norm = norms[-1] if norms else None
    # The output layer lies next to the base model, as 'lm_head.weight' does, and not within it.
    last = [t for t in outside if _module(t) == norm or t.name.count(".") == 1]
    rest = [t for t in outside if t not in last and _module(t) != embedding]
    embedded = [t for t in outside if _module(t) == embedding]
    if outside[0].name in layout.tied.values():
        found = [([*last, *embedded], True, False), (rest, True, False)]
    else:
        # The backward pass gives the last unit back at its beginning, the root only at its end.
        found = [(embedded, False, False), (last, True, not rest), (rest, True, False)]
    return [unit for unit in found if unit[0]]


def _module(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


ROOT_KEPT = "the root unit stays gathered between forward and backward pass (reshard_after_forward: None)"


def model_states(workload: Workload) -> terms.ModelStates:
    """Closed form per rank, from torch 2.13, `distributed/fsdp/_fully_shard`: rows cut over the ranks.

    Weights: `FSDPParam._init_sharded_param` cuts dim 0 with `torch.chunk` and pads every rank's piece to
    the first: ceil(rows / N) rows. Gradients: `foreach_reduce` takes them from one reduce-scatter output
    per unit, padded alike, cast back to the weights' dtype; offloaded ones are copied without padding.
    Adam's moments are as large as the rank's own rows, so the last ranks may hold less.
    """
    width = workload.master_bytes
    host = workload.offload == "cpu"
    layout = workload.layout
    held, reduced = layout.once(
        ("rows", workload.shards, workload.shard_rank),
        lambda: (_share(workload, layout.trained), _share(workload, layout.reached)),
    )
    reduced = reduced.unpadded() if host and workload.device != "cpu" else reduced
    return terms.states(
        [
            *held.terms("weights", "own rows", width, host=host),
            *cut_frozen(workload, partial(_share, workload), host=host),
            *reduced.terms("gradients", "own rows", width, host=host),
            *reduced.unpadded().terms(
                "optimizer", "Adam's moments of own rows", ADAM_MOMENTS * width, host=host
            ),
            step_counters(len(layout.reached), workload),
            *buffer_terms(workload),
        ]
    )


def _share(workload: Workload, parameters: Sequence[Tensor]) -> terms.Share:
    own = sum(_own(workload, parameter) for parameter in parameters)
    padding = _padded(parameters, workload.shards) // workload.shards - own
    return terms.Share(own=own, padding=padding, padding_name="padding of the first dimension")


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of the rank's rows of each parameter, by group: one DTensor each."""
    return [[_own(workload, tensor) for tensor in group] for group in workload.layout.reached_groups()]


def _replicated(workload: Workload) -> terms.Volume:
    """`replicate` of torch 2.13 (`_composable/replicate_with_fsdp.py`): FSDP2's units, each rank a replica.

    Gradients of each unit are all-reduced whole, in the last micro-step or in each. `FSDPParamGroup.unshard`
    gathers nothing in a group of one rank and `foreach_reduce` (_fsdp_collectives.py) scatters nothing there;
    every rank has all of the norm.
    """
    layout = workload.layout
    counts = [elements(list(filter(layout.is_reached, tensors))) for _, tensors in layout.units()]
    sizes = [(count, count) for count in counts if count]
    found = all_reduced(workload, sizes) * len(workload.steps)
    return terms.Volume(collectives=tuple(found), remarks=tuple(reduction_remarks(workload)))


def collectives(workload: Workload) -> terms.Volume:
    """`backends/fsdp/fsdp2.py`: the root follows the blocks like for like; else torch keeps it gathered.

    Weights are gathered in every micro-step, since the backward pass gives them back
    (`FSDPParamGroup.post_backward`), gradients reduced in the last one only
    (`set_requires_gradient_sync`), or in each. In a group of one rank nothing is gathered or reduced
    (`FSDPParamGroup.unshard`); the norm is.
    """
    if workload.strategy.of_family.replicates_alone:
        return _replicated(workload)
    reshards = workload.strategy.facts.reshards
    resharded_root = reshards_root(workload)
    units = _units(workload, reshards=reshards, reshards_root=resharded_root)
    irregular = bool(workload.layout.unit_calls) and _order_unknown(workload) is None
    names = sorted((name for name, _ in workload.layout.units()), key=lambda name: not name)
    named = dict(zip(names, units, strict=False)) if irregular else {}

    def step(workload: Workload, index: int) -> list[terms.Collective]:
        # The flag by the operator's DTensor rule (`torch/distributed/tensor/_ops`): not in a group of one.
        flag = overflow(workload, shard_role(workload)) if workload.shards > 1 else []
        found = [norm(workload), *flag]
        if workload.world_size == 1:
            return found
        if irregular:
            reduced = [*units, *_reduced_again(workload, named)]
            return [*in_order(workload, named, index), *reductions(workload, reduced), *found]
        return gathers_and_reductions(workload, units, index, kept_within_step=False) + found

    found = terms.over_steps(workload, step)
    remarks = reduction_remarks(workload)
    if reshards and not resharded_root:
        remarks.append((terms.BACKWARD, ROOT_KEPT))
    if workload.evaluation_every and not resharded_root:
        remarks.append((terms.FORWARD, KEPT_BY_EVALUATION))
    unknown = _order_unknown(workload)
    return terms.Volume(collectives=tuple(found), remarks=tuple(remarks), unknown=unknown)


def host_reads(workload: Workload) -> int:
    """Bytes that offloaded weights, frozen ones too, take from the host in a step.

    `FSDPParam.all_gather_inputs` (_fsdp_param.py) copies the rank's rows to the device before each gather, on
    one rank too, and casts them there. What the forward pass left to a group of ranks lies on the device.
    """
    units = _units(workload, reshards=workload.strategy.facts.reshards, reshards_root=reshards_root(workload))
    again = 0 if workload.second_copy_ranks else sum(unit.held_bytes for unit in units if not unit.kept)
    read = workload.accumulation_steps * (sum(unit.held_bytes for unit in units) + again)
    # Further micro-steps find an astray unit gathered: the one before gathered it in its backward pass.
    further = workload.accumulation_steps - 1
    return read + sum(unit.held_bytes for unit in units if unit.astray and further)


def _reduced_again(workload: Workload, named: Mapping[str, GatherUnit]) -> list[GatherUnit]:
    """Units that run more than once, where micro-steps add up: in the last, the first `post_backward`
    reduces what was added up (`unsharded_accumulated_grad`), the last one the gradient that just came."""
    if workload.accumulation_steps == 1 or workload.reduces_each:
        return []
    calls = workload.layout.unit_calls or ()
    runs = Counter(name for name, use in calls if use == "inputs with gradient")
    return [unit for name, unit in named.items() if runs[name] > 1]


def _order_unknown(workload: Workload) -> str | None:
    """Why what is gathered when has no closed form; None: it has."""
    if not workload.layout.unit_calls:
        return irregular_units(workload) or blocks_without_gradient(workload)
    plain = workload.strategy.route == "native" and workload.strategy.family == "fsdp2"
    whole = workload.options.get("auto_wrap") == "none"
    if plain and not (whole or workload.second_copy_ranks or workload.activation_checkpointing):
        return None
    return irregular_units(workload)


def reshards_root(workload: Workload) -> bool:
    """Whether the root's weights are given back after the forward pass; Accelerate leaves that to torch."""
    native = workload.strategy.route == "native" and workload.like_for_like
    return workload.strategy.facts.reshards and bool(native or workload.options.get("reshards_root"))


def _units(workload: Workload, *, reshards: bool, reshards_root: bool) -> list[GatherUnit]:
    named = workload.layout.units()
    found = [(tensors, not reshards, False) for name, tensors in named if name]
    # Trainer, and a loop that reduces in each micro-step, leave `set_is_last_backward` alone: each backward
    # pass gives back what it gathered.
    tells_last = workload.strategy.route != "trainer" and not workload.reduces_each
    if found and len(found) == len(named) and tells_last:
        # No root that stays gathered to the end comes after the last block.
        found[-1] = (found[-1][0], not reshards, reshards)
    if workload.strategy.through_accelerate:
        around = units_around_blocks(workload.layout)
        found += [(tensors, kept, astray and tells_last) for tensors, kept, astray in around]
    else:
        found += [(tensors, not reshards_root, False) for name, tensors in named if not name]
    return [_unit(workload, tensors, kept=kept, astray=astray) for tensors, kept, astray in found]


def _unit(workload: Workload, tensors: list[Tensor], *, kept: bool, astray: bool) -> GatherUnit:
    """Weights of several dtypes are gathered as bytes (`foreach_all_gather`, _fsdp_collectives.py); at mixed
    precision the policy casts them all to one. Only what is trained is reduced."""
    reached = [tensor for tensor in tensors if workload.layout.is_reached(tensor)]
    reduced = elements(reached), _padded(reached, workload.shards)
    shards = workload.shards
    held = sum(_padded([t], shards) // shards * workload.held_bytes(t) for t in tensors)
    dtypes = {_gathered_dtype(workload, t) for t in tensors}
    widths = [1 if len(dtypes) == 1 else DTYPE_BYTES[_gathered_dtype(workload, t)] for t in tensors]
    return GatherUnit(
        elements=sum(t.numel * width for t, width in zip(tensors, widths, strict=True)),
        padded=sum(_padded([t], shards) * width for t, width in zip(tensors, widths, strict=True)),
        kept=kept, astray=astray, dtype=dtypes.pop() if len(dtypes) == 1 else "uint8", reduced=reduced,
        held_bytes=held,
    )  # fmt: skip


def _gathered_dtype(workload: Workload, tensor: Tensor) -> str:
    cast = workload.mixed and "float" in tensor.dtype
    return workload.compute_dtype if cast else workload.held_dtype(tensor)


def _own(workload: Workload, parameter: Tensor) -> int:
    """Elements of the rank's rows, without padding."""
    rows, row = parameter.rows
    most = -(-rows // workload.shards)
    return max(0, min(rows - most * workload.shard_rank, most)) * row


def _padded(tensors: Iterable[Tensor], shards: int) -> int:
    """Elements with every parameter padded along its first dimension to whole shards.

    `FSDPParam._init_sharded_param` (_fsdp_param.py) and `_get_dim0_padded_size` (_fsdp_common.py).
    """
    return sum(ceil_to(rows, shards) * row for rows, row in (tensor.rows for tensor in tensors))
