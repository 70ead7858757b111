"""What crosses links: transports, nodes and hosts of offloaded states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.forms import zero3
from harness.forms.fsdp import fsdp1, fsdp2
from harness.forms.single import ADAM_MOMENTS
from harness.forms.tensor import local_workload
from harness.forms.terms import STEP_PHASES, ModelStates, ring_sent_bytes
from harness.forms.workload import ORDINARY_STEP, Workload
from harness.forms.zero0 import gradient_accumulation_bytes
from harness.forms.zero12 import ACCUMULATED_ON_HOST

EMULATED = {"gloo": {"reduce_scatter": "all_reduce"}}
"""Transport -> collective -> what runs in its place."""


def transport_sent_bytes(transport: str, op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes of payload that a rank hands to the network, averaged over the ranks of the group.

    Without an entry in EMULATED a collective moves what a ring does; NCCL may choose trees or other
    algorithms, which was not measured. Raises KeyError for a collective without a factor.
    """
    runs = EMULATED.get(transport, {}).get(op, op)
    return ring_sent_bytes(runs, payload_bytes, group_size)


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that one rank sends."""

    inside: float = 0.0
    """To ranks of its own node."""
    between: float = 0.0
    """To ranks of other nodes."""

    def __add__(self, other: NodeTraffic) -> NodeTraffic:
        return NodeTraffic(self.inside + other.inside, self.between + other.between)


def node_traffic(
    transport: str,
    op: str,
    payload_bytes: int,
    group_ranks: Sequence[int],
    rank: int,
    hosts: Mapping[int, str],
    *,
    phase: str = "",
) -> NodeTraffic:
    """What `rank` sends for a collective of its group on a ring in the order of the ranks.

    A ring sends everything to the next rank, so the host of that neighbour decides. Trees, which NCCL may
    choose on many nodes and gloo uses to broadcast, spread differently; their sum is the same. An all-to-all
    sends each peer as much. A message of a pipeline goes to the next rank, of the backward phase to the one
    before; of a tied weight's gradient, that the ends swap, one of two is taken to stay with a neighbour.
    Raises KeyError for a collective without a factor or a rank without a host.
    """
    size = len(group_ranks)
    if size == 1:
        return NodeTraffic()
    sent = transport_sent_bytes(transport, op, payload_bytes, size)
    if op == "all_to_all":
        inside = sum(hosts[peer] == hosts[rank] for peer in group_ranks) - 1
        return NodeTraffic(inside=sent * inside / (size - 1), between=sent * (size - 1 - inside) / (size - 1))
    direction = -1 if (op, phase) == ("send", "backward") else 1
    neighbour = group_ranks[(group_ranks.index(rank) + direction) % size]
    if hosts[neighbour] == hosts[rank]:
        return NodeTraffic(inside=sent)
    return NodeTraffic(between=sent)


def host_elements(workload: Workload, expected: ModelStates) -> float:
    """Elements that a rank updates in host memory: those of its moments there, without padding."""
    on_host = [term for term in expected.terms if term.host and not term.extra]
    moments = sum(term.bytes for term in on_host if term.kind == "optimizer")
    return moments / (ADAM_MOMENTS * workload.master_bytes)


def host_link_bytes(workload: Workload, expected: ModelStates) -> float:
    """Bytes that cross the link of a rank in a step, in both directions; 0 without offload.

    FSDP: weights up at each gather, frozen ones too, in the dtype in which they are held; reduced gradients
    down as often as they are reduced. DeepSpeed: gradients down and, where micro-steps add them up on the
    host, up again; updated weights up in the compute dtype, or, where weights too are offloaded, at each
    gather instead.
    """
    if workload.offload == "none":
        return 0.0
    inner = replace(local_workload(workload), steps=(ORDINARY_STEP,), evaluation_every=None)
    if inner.strategy.zero_stage is None:
        reads = fsdp1.host_reads if inner.strategy.family == "fsdp1" else fsdp2.host_reads
        gradients = sum(term.bytes for term in expected.terms if term.host and term.kind == "gradients")
        return reads(inner) + inner.reductions * gradients
    elements = host_elements(workload, expected)
    moved = elements * workload.master_bytes + _added_up(inner, expected, elements)
    return moved + (
        _gathered(inner, expected) if workload.offloads_weights else elements * workload.compute_bytes
    )


def _added_up(workload: Workload, expected: ModelStates, elements: float) -> float:
    """Bytes of gradients beside those that DeepSpeed hands to the optimizer in the dtype of the masters.

    Stage 3 writes each micro-step's to the host and reads them back, to widen them or to add the next
    (`partition_grads`, stage3.py). Stage 2 does where micro-steps add up on the host
    (`async_accumulate_grad_in_cpu_via_gpu`, stage_1_and_2.py): in the first it reads nothing.
    """
    micro_steps = workload.accumulation_steps
    if workload.strategy.stage == 3:
        return 2 * micro_steps * elements * gradient_accumulation_bytes(workload)
    held = sum(term.bytes for term in expected.terms if term.name == ACCUMULATED_ON_HOST)
    return held * (2 * micro_steps - 1)


def _gathered(workload: Workload, expected: ModelStates) -> float:
    """Bytes of weights that ZeRO-3 reads from the host: a rank's pieces, at each gather of them.

    One rank reads what each of two would gather (`_no_gather_coalesced`, partition_parameters.py). Where
    gathers have no closed form: all weights there in each pass, and once more to recompute.
    """
    several = replace(workload, world_size=2) if workload.world_size == 1 else workload
    volume = zero3.collectives(several)
    if volume.unknown is None:
        return sum(
            c.payload_bytes / (workload.world_size if c.role == "world" else workload.group_size(c.role))
            for c in volume.collectives
            if c.phase in STEP_PHASES and c.op == "all_gather"
        )
    weights = sum(t.bytes for t in expected.terms if t.kind == "weights" and t.host)
    return weights * workload.accumulation_steps * (3 if workload.activation_checkpointing else 2)
