"""What a transport really sends for a collective, where it emulates one by others.

gloo, read in its sources and confirmed by the byte counters of the loopback interface
(`tests/wire/test_gloo.py`): all-reduce runs a ring in two passes, all-gather a ring in one,
broadcast a binomial tree in which every rank but the root receives the tensor once. torch 2.13
implements reduce-scatter on gloo as an all-reduce of the whole tensor (`ProcessGroupGloo.cpp`).
"""

from __future__ import annotations

from harness.theory.ring import ring_sent_bytes

EMULATED = {"gloo": {"reduce_scatter": "all_reduce"}}
"""Transport -> collective -> what runs in its place."""


def transport_sent_bytes(transport: str, op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes of payload that a rank hands to the network, averaged over the ranks of the group.

    Without an entry in EMULATED a collective moves what a ring does; NCCL may choose trees or other
    algorithms, which was not measured. Raises KeyError for a collective without a factor.
    """
    runs = EMULATED.get(transport, {}).get(op, op)
    return ring_sent_bytes(runs, payload_bytes, group_size)
