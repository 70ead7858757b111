"""Where a rank may run on its machine: logical processors, their NUMA nodes, and its GPU's."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.rank.probes.process_memory import status_value
from harness.record import PlacementPart

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


def placement(device: str) -> PlacementPart | None:
    """Of this process; None where the system does not tell (not Linux)."""
    processors = status_value("Cpus_allowed_list")
    return None if processors is None else placed(processors, _address() if device == "cuda" else None)


def placed(
    processors: str, pci_address: str | None, nodes: Path = NODES, devices: Path = PCI_DEVICES
) -> PlacementPart:
    """processors: '0-3,8', those that the process may use. pci_address: '0000:3b:00.0', of its GPU."""
    own = read_list(processors)
    of_nodes = {
        int(folder.name[len("node") :]): read_list(_text(folder / "cpulist"))
        for folder in sorted(nodes.glob("node[0-9]*"))
    }
    gpu_node = _text(devices / pci_address / "numa_node") if pci_address else ""
    known = gpu_node.isdecimal()  # -1: the firmware does not say
    return PlacementPart(
        processors=processors,
        processor_count=len(own),
        numa_nodes=sorted(node for node, theirs in of_nodes.items() if own & theirs),
        device_numa_node=int(gpu_node) if known else None,
    )


def read_list(text: str) -> set[int]:
    """The numbers of '0-3,8', as the kernel writes sets of processors."""
    pieces = (piece.partition("-") for piece in text.split(",") if piece)
    return {number for first, _, last in pieces for number in range(int(first), int(last or first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _address() -> str | None:
    """PCI address of the current device; None before torch 2.6, which does not tell it."""
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(own, "pci_bus_id"):
        return None
    domain, bus, slot = (getattr(own, f"pci_{name}_id") for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
