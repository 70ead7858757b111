"""The machines and the versions that ran the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compare.rows import Row
from harness.report.document import Items, Section
from harness.report.formats import number


def machine_section(rows: Sequence[Row]) -> Section:
    """Each distinct machine once."""
    seen: list[list[tuple[str, str]]] = []
    for row in rows:
        e = row.record.environment
        world = row.record.world
        facts = [
            ("CPU", f"{e['cpu']}, {e['cores']} cores, {e['memory_bytes'] / 2**30:.1f} GiB"),
            ("accelerators", "; ".join(e["gpus"]) or "none"),
            ("system", f"{e['platform']}, Python {e['python']}"),
            ("packages", ", ".join(f"{name} {v}" for name, v in sorted(e["packages"].items()))),
            ("harness code", e["code"] + _commit(e)),
            ("device", f"{world.device}, collectives over {world.collectives}"),
            ("preset", world.preset),
        ]
        facts += _network(e)
        if facts not in seen:
            seen.append(facts)
    return Section("machine", "Machine and versions", [Items(facts) for facts in seen])


def _network(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What a self-test before the run measured, where there was one."""
    fabric = environment.get("fabric")
    if not fabric or fabric["all_reduce_bus_bytes_per_second"] is None:
        return []
    bandwidth = number(fabric["all_reduce_bus_bytes_per_second"] / 1e9)
    text = (
        f"{fabric['transport']} on {fabric['world_size']} ranks, {fabric['nodes']} nodes: all-reduce bus "
        f"bandwidth {bandwidth} GB/s at {fabric['all_reduce_bytes']:,} bytes, "
        f"latency {number(fabric['all_reduce_latency_seconds'] * 1e6)} us"
    )
    return [("network", text)]


def _commit(environment: dict[str, Any]) -> str:
    git = environment.get("git")
    if not git:
        return ""
    return f", commit {git['commit'][:12]}" + (" with local changes" if git["modified"] else "")
