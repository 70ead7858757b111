"""Networks between nodes as the command line names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.options import notice

if TYPE_CHECKING:
    from harness.plan.device import Fabric
    from harness.plan.hardware import Hardware


def named_fabric(known: Hardware, name: str | None) -> Fabric | None:
    """The network of `--fabric`, with a notice where another name than its own was given."""
    if name is None:
        return None
    fabric = known.fabric(name)
    if name.strip().lower() != fabric.name.lower():
        rate = f"{fabric.bandwidth_per_gpu / 1e9:g} GB/s per GPU"
        notice(f"fabric '{name}' is taken as {fabric.name}, {rate}; --list-hardware of estimate lists others")
    return fabric
