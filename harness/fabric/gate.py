"""Amounts that people type, and a threshold of bus bandwidth with the usual causes of missing it."""

from __future__ import annotations

import re

from harness.errors import HarnessError
from harness.fabric.result import FabricResult
from harness.judge.wording import counted

DECIMAL = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([KMGTkmgt]?)(i?)(B|[Bb]its?|bytes?|b)?(/s|ps)?\s*")


def parse_rate(text: str) -> float:
    """Bytes per second of '5GB/s', '400Gbps', '200 Mbit/s' or '1GiB/s': B is a byte, b a bit.

    Raises HarnessError for anything else, such as 'gb/s', which people write for both.
    """
    match = PATTERN.fullmatch(text)
    if match is None or match[5] is None or match[4] is None:
        raise HarnessError(f"'{text}' is no rate; write 5GB/s, 1GiB/s (bytes), 400Gbps or 200Mbit/s (bits)")
    if match[4] == "b" and match[2].islower():
        given = text.strip()
        prefix = f"{match[1]}{match[2].upper()}"
        raise HarnessError(
            f"'{given}' may mean bits or bytes; write {prefix}B/s for bytes or {prefix}bit/s for bits"
        )
    value = float(match[1]) * (BINARY if match[3] else DECIMAL)[match[2].upper()]
    return value / 8 if match[4].lower().startswith("bit") or match[4] == "b" else value


def parse_size(text: str) -> int:
    """Bytes of '4GB' or '64MiB', both in powers of 1024 as in nccl-tests. Raises HarnessError."""
    match = PATTERN.fullmatch(text)
    if match is None or match[5] is not None or (match[4] or "B") not in ("B", "b"):
        raise HarnessError(f"'{text}' is no size; write 64MB or 4GB")
    size = int(float(match[1]) * BINARY[match[2].upper()])
    if size < 1024:
        raise HarnessError(f"size '{text}' is below the smallest that is tested, 1KB")
    return size


def shortfall(result: FabricResult, required: float) -> str | None:
    """Why the all-reduce of the whole group misses a bus bandwidth in bytes/s; None if it does not."""
    measured = result.bus_bandwidth()
    if result.on_stub:
        return f"the bus bandwidth of a {result.device_name} is not measured: no network takes part"
    if measured is None:
        return "the bus bandwidth of all_reduce was not measured: it needs two ranks and the operation"
    if measured >= required:
        return None
    nodes = len(set(result.hosts))
    return (
        f"bus bandwidth {measured / 1e9:.3g} GB/s is below the required {required / 1e9:.3g} GB/s "
        f"({result.transport}, {counted(nodes, 'node')}). "
        f"Usual causes: {'; '.join(usual_causes(result))}"
    )


def usual_causes(result: FabricResult) -> list[str]:
    """What to look at first, for this transport and number of nodes."""
    several_nodes = len(set(result.hosts)) > 1
    causes = []
    if result.transport == "gloo":
        causes.append("gloo copies through TCP and the CPU: on GPUs use NCCL")
    if several_nodes:
        named = f"'{result.interface}'" if result.interface else "none, so the first that resolves"
        causes.append(
            f"the wrong network interface (asked for: {named}; set `interface` of the site, or "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME)"
        )
    if result.transport == "nccl":
        if several_nodes:
            causes.append(
                "NCCL fell back to sockets (NCCL_DEBUG=INFO shows NET/Socket where NET/IB is expected; "
                "NCCL_IB_DISABLE, NCCL_IB_HCA, no GPUDirect RDMA)"
            )
        causes.append("GPUs without NVLink or peer access (`nvidia-smi topo -m`; NCCL_P2P_DISABLE)")
    causes.append("another job on the same nodes or links")
    causes.append("too small a largest size: the bandwidth had not levelled off")
    return causes
