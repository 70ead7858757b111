"""Checks of speed: matrix products against the data sheet, utilisation, and the network."""

from __future__ import annotations

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import FABRIC, SHARDED, Evidence
from harness.forms.flops import find_peak
from harness.judge.run import Run
from harness.judge.speed import compute_dtype, model_flops_per_second, share_of, sheet_peak

LEAST_SHARE, MOST_SHARE = 0.40, 1.05
"""Of the data sheet: large products reach 60 to 90 %; a sheet's clock may be exceeded a little."""
LEAST_BUS, MOST_BUS = 1e9, 1e12
"""Bytes per second between two GPUs of a machine: below, even PCIe 3.0 x1 is faster; above, no link."""
MOST_LATENCY_SECONDS = 1e-3
NO_SPEED = "its speed is that of the host"


def products_reach_the_sheet(evidence: Evidence) -> Finding:
    """Matrix products alone on each rank."""
    record = evidence.records[SHARDED]
    dtype = compute_dtype(record) or ""
    shares = []
    for rank in record.ranks:
        rate, sheet = rank.matmul_flops_per_second.get(dtype), find_peak(rank.device_name, dtype)
        if sheet is None:
            return "n/a", f"no data sheet is known for {rank.device_name} in {dtype}"
        if rate is None:
            return "failed", f"rank {rank.rank} measured no matrix products in {dtype}"
        shares.append(rate / sheet[0])
    detail = f"{min(shares):.0%} to {max(shares):.0%} in {dtype}"
    return held(min(shares) >= LEAST_SHARE and max(shares) <= MOST_SHARE, detail)


def utilisation_is_possible(evidence: Evidence) -> Finding:
    """Model FLOPs of the timed steps over the data sheet."""
    record = evidence.records[SHARDED]
    share = share_of(model_flops_per_second(Run.of(record)), sheet_peak(record))
    if share is None:
        return "n/a", f"no data sheet is known for {record.ranks[0].device_name}, or no step was timed"
    return held(share < 1.0, f"{share:.2%} of a tiny model")


def network_is_plausible(evidence: Evidence) -> Finding:
    """All-reduce over all ranks."""
    result = evidence.fabric
    if result is None:
        return "skipped", evidence.missing.get(FABRIC, "the network was not measured")
    bus, latency = result.bus_bandwidth(), result.latency_seconds()
    if bus is None or latency is None:
        return "failed", "all-reduce was not measured"
    detail = f"{bus / 1e9:.1f} GB/s, {latency * 1e6:.0f} us over {result.transport}"
    return held(LEAST_BUS <= bus <= MOST_BUS and latency <= MOST_LATENCY_SECONDS, detail)


CHECKS = (
    Check(
        id="products", question="Do matrix products reach the data sheet?",
        tolerance=f"{LEAST_SHARE:.0%} to {MOST_SHARE:.0%}", judge=products_reach_the_sheet, runs=(SHARDED,),
        not_on_stub=NO_SPEED,
    ),
    Check(
        id="utilisation", question="Is the model FLOPs utilisation possible?", tolerance="below 100%",
        judge=utilisation_is_possible, runs=(SHARDED,), not_on_stub=NO_SPEED,
    ),
    Check(
        id="fabric", question="Is the speed of the network plausible?",
        tolerance="1 to 1,000 GB/s, at most 1 ms", judge=network_is_plausible, least_ranks=2,
        not_on_stub=NO_SPEED,
    ),
)  # fmt: skip
