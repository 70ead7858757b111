"""The machines and the versions that ran the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compare.rows import Row
from harness.report.document import Items, Section


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
        if facts not in seen:
            seen.append(facts)
    return Section("machine", "Machine and versions", [Items(facts) for facts in seen])


def _commit(environment: dict[str, Any]) -> str:
    git = environment.get("git")
    if not git:
        return ""
    return f", commit {git['commit'][:12]}" + (" with local changes" if git["modified"] else "")
