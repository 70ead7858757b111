"""GPUs and networks by name: those that ship, and those that a user's YAML file adds or replaces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from harness.backends.refusals import TypedValues, did_you_mean, suggestion
from harness.errors import HarnessError
from harness.forms.flops import find_peak
from harness.job.yaml_files import read_yaml_file
from harness.plan.catalogue import read_file
from harness.plan.devices.device import Device, Fabric
from harness.tell.narrow import fitted

USER_FILE = Path(".config", "harness", "hardware.yaml")
"""In the home directory; read where it exists."""
SLOW_NETWORK = "HDR100"
"""Assumed between machines of which nothing is said: InfiniBand of 100 Gb/s per GPU."""
PEAK_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")


class DeviceEntry(TypedValues):
    """A GPU as a YAML file describes it."""

    aliases: list[str] = Field([], description="other names")
    torch_name: str | None = Field(None, description="what torch.cuda.get_device_name() says")
    memory_gib: PositiveFloat = Field(description="total memory as torch reports it, GiB")
    context_gib: float = Field(0.5, ge=0, description="what the driver takes before the first tensor, GiB")
    memory_gb_per_second: PositiveFloat = Field(description="memory bandwidth, 1e9 bytes per second")
    peak_teraflops: dict[str, PositiveFloat] = Field(
        {}, description="dense peak by dtype; default: by `torch_name`"
    )
    link: str = Field("not said", description="what joins the GPUs of a node")
    link_gb_per_second: PositiveFloat = Field(
        description="one direction, to all GPUs of the node, 1e9 bytes/s"
    )
    host_link: str | None = Field(
        None, description="what joins a GPU and host memory; default: `link` if that is PCIe, else PCIe 4"
    )
    host_link_gb_per_second: PositiveFloat | None = Field(
        None, description="one direction for each GPU, 1e9 bytes/s; default: by `link`, likewise"
    )
    gpus_per_node: PositiveInt = Field(Device.gpus_per_node, description="of a machine in which it is sold")
    watts: PositiveFloat | None = Field(None, description="board power limit")
    capability: str | None = Field(
        None, pattern=r"^\d+\.\d$", description="NVIDIA's compute capability, such as '8.0'"
    )
    networks: list[str] = Field(
        [SLOW_NETWORK], description="fabrics that join machines in which it is sold, the one to take first"
    )
    source: str = Field("the user's file", description="where the numbers come from")

    @model_validator(mode="after")
    def _peaks_are_known(self) -> DeviceEntry:
        for dtype in self.peak_teraflops:
            if dtype not in PEAK_DTYPES:
                raise ValueError(
                    f"`peak_teraflops` has no dtype '{dtype}'; allowed: {', '.join(PEAK_DTYPES)}"
                )
        if (self.host_link is None) != (self.host_link_gb_per_second is None):
            raise ValueError("give `host_link` and `host_link_gb_per_second` both, or neither")
        if not self.peaks():
            raise ValueError("give `peak_teraflops`, or a `torch_name` whose peak rates are known")
        return self

    def peaks(self) -> dict[str, float]:
        """FLOP/s by dtype."""
        known = {dtype: find_peak(self.torch_name or "", dtype) for dtype in PEAK_DTYPES}
        of_sheet = {dtype: peak[0] for dtype, peak in known.items() if peak is not None}
        return of_sheet | {dtype: rate * 1e12 for dtype, rate in self.peak_teraflops.items()}

    @property
    def to_host(self) -> tuple[str, float]:
        """The link to host memory, and its bytes per second in one direction."""
        if self.host_link is not None and self.host_link_gb_per_second is not None:
            return self.host_link, self.host_link_gb_per_second * 1e9
        if self.link.startswith("PCIe"):
            return self.link.partition(",")[0], self.link_gb_per_second * 1e9
        return Device.host_link, Device.host_link_bandwidth


class FabricEntry(TypedValues):
    """A network between nodes as a YAML file describes it."""

    aliases: list[str] = Field([], description="other names")
    gb_per_second: PositiveFloat = Field(description="one direction for each GPU, 1e9 bytes per second")
    latency_microseconds: PositiveFloat = Field(description="of one step of a ring")
    most_gpus: PositiveInt | None = Field(None, description="that it joins; default: any number")
    source: str = Field("the user's file", description="where the numbers come from")


class HardwareFile(TypedValues):
    """A file of the user; its entries replace shipped ones of the same name."""

    devices: dict[str, DeviceEntry] = Field({}, description="GPUs by name")
    fabrics: dict[str, FabricEntry] = Field({}, description="networks between nodes by name")


class Hardware:
    """The known GPUs and networks."""

    def __init__(self, devices: Mapping[str, DeviceEntry], fabrics: Mapping[str, FabricEntry]) -> None:
        self.devices = devices
        self.fabrics = fabrics

    def lines(self) -> list[str]:
        """Both as tables."""
        devices = [
            [
                device.name, f"{device.memory_bytes / 2**30:.1f}", f"{device.memory_bandwidth / 1e9:,.0f}",
                *(_tera(device.peak_flops.get(dtype)) for dtype in PEAK_DTYPES[:4]),
                f"{device.link_bandwidth / 1e9:,.0f}", device.link,
                f"{device.host_link_bandwidth / 1e9:,.0f}", str(device.gpus_per_node),
                f"{device.watts:g}" if device.watts else "n/a",
            ]
            for device in map(self.device, self.devices)
        ]  # fmt: skip
        fabrics = [
            [
                fabric.name,
                f"{fabric.bandwidth_per_gpu / 1e9:g}",
                f"{fabric.latency_seconds * 1e6:g}",
                fabric.source,
            ]
            for fabric in map(self.fabric, self.fabrics)
        ]
        headers = ["GPU", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16 TF/s", "link GB/s", "link"]
        headers += ["to host", "a node", "watts"]
        return [
            *fitted(devices, headers).splitlines(),
            "",
            *fitted(fabrics, ["fabric", "GB/s/GPU", "us", "source"]).splitlines(),
        ]

    def device(self, name: str) -> Device:
        """A GPU by name, alias or torch's name of it, in any case. Raises HarnessError with the closest."""
        key = _find("GPU", name, self.devices, lambda entry: [*entry.aliases, entry.torch_name or ""])
        entry = self.devices[key]
        return Device(
            name=key,
            memory_bytes=int(entry.memory_gib * 2**30),
            context_bytes=int(entry.context_gib * 2**30),
            memory_bandwidth=entry.memory_gb_per_second * 1e9,
            peak_flops=entry.peaks(),
            link_bandwidth=entry.link_gb_per_second * 1e9,
            link=entry.link,
            host_link=entry.to_host[0],
            host_link_bandwidth=entry.to_host[1],
            gpus_per_node=entry.gpus_per_node,
            watts=entry.watts,
            capability=_capability(entry.capability),
            networks=tuple(map(self.fabric, entry.networks)),
            source=entry.source,
        )

    def fabric(self, name: str) -> Fabric:
        """A network by name or alias, in any case. Raises HarnessError with the closest."""
        key = _find("fabric", name, self.fabrics, lambda entry: entry.aliases)
        entry = self.fabrics[key]
        return Fabric(
            name=key,
            bandwidth_per_gpu=entry.gb_per_second * 1e9,
            latency_seconds=entry.latency_microseconds * 1e-6,
            most_gpus=entry.most_gpus,
            source=entry.source,
        )


def load_hardware(file: Path | None = None) -> Hardware:
    """What ships, then the user's file in the home directory, then `file`, each replacing the ones before.

    Raises HarnessError for a file that cannot be read or has unknown or missing values.
    """
    shipped = HardwareFile(
        devices=read_file("hardware/devices.yaml"),  # type: ignore[arg-type]
        fabrics=read_file("hardware/fabrics.yaml"),  # type: ignore[arg-type]
    )
    of_home = Path.home() / USER_FILE
    own = [_read(path) for path in (of_home if of_home.is_file() else None, file) if path is not None]
    devices, fabrics = dict(shipped.devices), dict(shipped.fabrics)
    for document in own:
        devices |= document.devices
        fabrics |= document.fabrics
    return Hardware(devices, fabrics)


def _read(path: Path) -> HardwareFile:
    return read_yaml_file(path, "hardware file", HardwareFile, "a mapping with 'devices' or 'fabrics'")


def _find(kind: str, given: str, entries: Mapping[str, Any], others: Any) -> str:
    """The name of the entry that is meant. Later entries come first, as they are the user's."""
    spellings: dict[str, str] = {}
    for name in reversed(list(entries)):
        for spelling in (name, *others(entries[name])):
            spellings.setdefault(_plain(spelling), name)
    wanted = _plain(given)
    if wanted not in spellings or not wanted:
        described = {name: " ".join([name, *others(entry), entry.source]) for name, entry in entries.items()}
        meant = _described(given, described)
        if kind == "fabric" and len(meant) == 1 and meant[0][1]:
            return meant[0][0]
        if kind == "GPU" and _SIZE.fullmatch(given.strip()):
            raise HarnessError(
                f"GPU '{given}' is a size: give a name such as H100-80 (`harness estimate --list-hardware`) "
                "or add a GPU with --hardware FILE"
            )
        raise HarnessError(f"{kind} '{given}' is unknown. {_closest(given, described)}")
    return spellings[wanted]


SYNONYMS = {"ib": "infiniband"}
_SIZE = re.compile(r"[\d.,]+\s*([kmgt]i?b)?", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]+|\d+")


def _closest(given: str, described: Mapping[str, str]) -> str:
    """The names that are meant, by their beginning, their spelling, or what is `described` of them."""
    known = {name.lower(): name for name in described}
    begun = [name for name in known if _plain(given) and _plain(name).startswith(_plain(given))]
    # Of 'A100' the kinds of it are meant, not the A10, which is spelled more like it.
    close = did_you_mean(begun[:4]) if begun else suggestion(given.lower(), list(known), most=3)
    if not close:
        meant = [name.lower() for name, _ in _described(given, described)]
        close = did_you_mean(meant) if meant else ""
    for lower, name in known.items():
        close = close.replace(f"'{lower}'", f"'{name}'")
    listed = f"Known: {', '.join(known.values())}; add yours with --hardware FILE"
    return f"{close} {listed}".strip()


def _described(given: str, described: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Names whose description has the words of what was given that any has, and whether those are all."""
    said = {name: set(_WORDS.findall(text.lower())) for name, text in described.items()}
    typed = {SYNONYMS.get(word, word) for word in _WORDS.findall(given.lower())}
    words = typed & set().union(*said.values())
    return [(name, words == typed) for name in described if words and words <= said[name]]


def _tera(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate / 1e12:g}"


def _plain(text: str) -> str:
    """Without case, separators and a trailing GB: 'H100-80GB' is 'H100 80'."""
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    return letters.removesuffix("gb")


def _capability(text: str | None) -> tuple[int, int] | None:
    """(8, 0) of '8.0'."""
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)
