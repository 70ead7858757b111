"""GPUs and networks by name, and what measurements show of them: reached shares of data sheets, latencies.

Every default names its source. `harness estimate --calibrate RUNS` replaces them by what your records show.
Also how much memory the ranks of this machine may use as it is now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from harness.backends.base import Preset
from harness.backends.refusals import TypedValues, did_you_mean, suggestion
from harness.errors import HarnessError
from harness.forms.textbook import find_peak
from harness.gpus.found import find_gpus
from harness.job.config import read_yaml_file
from harness.job.experiment import Experiment
from harness.plan.catalogue import read_file
from harness.plan.model import PlannedModel
from harness.tell.formats import fitted, gigabytes


@dataclass(frozen=True, kw_only=True)
class TimeConstants:
    """All constants of the time model for one kind of device and network."""

    matrix_share: float
    """Of the dense peak, that large matrix products reach; what a shape costs beyond comes from its bytes."""
    matrix_source: str
    attention_share: float
    """Of the dense peak, that a fused attention kernel reaches on long sequences."""
    attention_source: str
    sustained_share: float
    """Of that matrix rate, that training keeps up."""
    attention_half_length: float = 512.0
    """Sequence length at which it reaches half of that: FlashAttention-2's paper, figures 4 to 6."""
    memory_share: float = 0.85
    """Of the memory bandwidth, that elementwise kernels reach: BabelStream, A100-80 1.73 of 2.04 TB/s."""
    kernel_seconds: float = 4e-6
    """That a kernel takes beyond its work: launch, ramp and tail."""
    dispatch_seconds: float = 8e-6
    """Of the host, per operator: a lower bound of small models' steps."""
    link_share: float = 0.78
    """Of a node's link bandwidth: NCCL takes at most 235 of 300 GB/s for A100 (src/graph/tuning.cc)."""
    fabric_share: float = 0.90
    """Of the network's line rate."""
    call_seconds: float = 8.4e-6
    """Per collective: NCCL, src/graph/tuning.cc, baseLat, ring, simple protocol."""
    link_step_seconds: float = 3.4e-6
    """Per step of a ring within a node: the same file, hwLat, NVLink."""
    contention: float = 0.189
    """Of hidden communication, that computing takes longer for it: S. Lee et al., arXiv 2507.03114: average
    slowdown of computing on A100, H100, MI250 and MI210."""
    host_factor: float = 1.0
    """Of what the host takes to start operators, over the processors that the defaults were measured on."""
    host_link_share: float = 0.78
    """Of the link between a device and host memory: 25 of the 32 GB/s of PCIe 4.0 x16, less its protocol."""
    host_bytes_per_second: float = 20e9
    """Of host memory that one rank's update reaches pass by pass, rounded: torch's Adam took 56 s for 11.6e9
    parameters (DeepSpeed, pull request 735), 17 GB/s of the passes that are counted here."""
    fused_host_bytes_per_second: float = 40e9
    """The same in one vectorised kernel: DeepSpeed's CPUAdam took 8.2 s there."""
    node_host_bytes_per_second: float = 50e9
    """Of a node's memory, that the updates of all its ranks reach together: 10 s for 72e9 parameters on four
    nodes of 8 A100 (DeepSpeed, issue 6834). 7.65 s for 7.2e9 on one node (issue 3901) would be half of it."""
    step_overhead_seconds: float = 0.0
    """Per step, whatever its work."""
    origin: str = "published measurements"
    fitted: tuple[str, ...] = field(default=())
    """Names of constants that a calibration has replaced."""


SHARES = "hardware/shares.yaml"


def default_constants(device: Device) -> TimeConstants:
    """Constants for a device by its name, before any calibration."""
    shares = read_file(SHARES)

    def of(*tables: str) -> tuple[float, str]:
        known = {name: entry for table in tables for name, entry in shares[table].items()}
        found = next((one for name, one in known.items() if device.name.startswith(name)), known["other"])
        return found["share"], found["source"]

    (matrix, matrix_source), (attention, attention_source) = of("matrix"), of("attention")
    sustained, sustained_source = of("sustained", "compared")
    return TimeConstants(
        matrix_share=matrix,
        matrix_source=f"{matrix_source}; sustained {sustained:.0%}: {sustained_source}",
        attention_share=attention,
        attention_source=attention_source,
        sustained_share=sustained,
    )


def is_sustained_rate_known(device: Device) -> bool:
    """Whether training was measured on the device's kind, not on another or beside another."""
    return any(device.name.startswith(name) for name in read_file(SHARES)["sustained"] if name != "other")


@dataclass(frozen=True)
class TimeTerm:
    """A part of a step's time."""

    name: str
    seconds: float
    formula: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU (or die) as torch sees it."""

    name: str
    memory_bytes: int
    """What torch.cuda reports as total."""
    context_bytes: int
    """What the CUDA or ROCm context takes of it before the first tensor."""
    memory_bandwidth: float
    """Bytes per second."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype: 'float32', 'tf32', 'bfloat16', 'float16', 'float8'."""
    link_bandwidth: float
    """Bytes per second in one direction to the GPUs of the same node together (NVLink, xGMI, PCIe)."""
    link: str
    watts: float | None
    """Board power limit."""
    source: str
    host_link: str = "PCIe 4"
    """What joins it and host memory."""
    host_link_bandwidth: float = 32e9
    """Bytes per second in one direction for each GPU."""
    gpus_per_node: int = 8
    """Of a machine in which it is sold."""
    capability: str | None = None
    """NVIDIA's compute capability, such as '8.0'; None: AMD's, or not known."""
    networks: tuple[Fabric, ...] = ()
    """Those that join machines in which it is sold, the one to take first."""

    @property
    def usable_bytes(self) -> int:
        """What an allocator can serve."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between nodes."""

    name: str
    bandwidth_per_gpu: float
    """Bytes per second in one direction for each GPU, when all of a node send."""
    latency_seconds: float
    source: str
    most_gpus: int | None = None
    """That it joins; None: any number."""
    assumed: bool = False
    """Whether nobody named it."""


def joined_by(given: Fabric | None, device: Device | None, gpus: int) -> Fabric | None:
    """The network between nodes: the one that was named, else that of machines in which the GPU is sold.

    None: there is no GPU, or nothing is known of its machines.
    """
    if device is None or (given is not None and not given.assumed):
        return given
    large = (one for one in device.networks if one.most_gpus is None or gpus <= one.most_gpus)
    found = next(large, None)
    return None if found is None else replace(found, assumed=True)


def of_network(network: Fabric | None) -> list[str]:
    """The remark on one that nobody named."""
    if network is None or not network.assumed:
        return []
    return [f"--fabric={network.name}, since none is given: {network.source}"]


def ranks_per_node(device: Device | None, given: int | None) -> int:
    """GPUs of a node: what was given, else as the device is sold."""
    return given or (Device.gpus_per_node if device is None else device.gpus_per_node)


PRESET: Preset = "library-defaults"
"""What people run who set nothing of a library."""
LONGEST_DEFAULT_SEQUENCE = 4096
"""Of a question that names none: the model's context, but no more than this."""


def with_training_defaults(
    model: PlannedModel, experiment: Experiment, device: Device | None
) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment with the precision, frozen base, sequence and preset of ordinary training where it names
    none, and a remark on each; unchanged without a device."""
    if device is None:
        return experiment, _of_base(model, experiment)
    remarks = []

    def choose(section: str, name: str, value: object, why: str = "since none is given") -> None:
        nonlocal experiment
        if name not in getattr(experiment, section).model_fields_set:
            chosen = getattr(experiment, section).model_copy(update={name: value})
            experiment = experiment.model_copy(update={section: chosen})
            remarks.append(f"{section}.{name}={value}, {why}")

    choose("training", "precision", "bf16-mixed" if "bfloat16" in device.peak_flops else "fp16-mixed")
    if experiment.adapter.is_present and experiment.training.precision == "bf16-mixed":
        wide, narrow = _sizes_of_base(model)
        base = f"since none is given, as fine-tuning scripts load the frozen base: {narrow} GB a copy"
        choose("adapter", "base_dtype", "bf16", f"{base} (fp32: {wide})")
    if experiment.data.is_tokenized:
        context = model.config.get("max_position_embeddings")
        most = LONGEST_DEFAULT_SEQUENCE
        choose("data", "sequence_length", min(context, most) if isinstance(context, int) else most)
    choose("runtime", "preset", PRESET)
    return experiment, (*remarks, *_of_base(model, experiment))


def _sizes_of_base(model: PlannedModel) -> tuple[str, str]:
    """In GB, in fp32 and in bf16."""
    wide, narrow = (gigabytes(size * model.parameters) for size in (4, 2))
    return wide, narrow


def _of_base(model: PlannedModel, experiment: Experiment) -> tuple[str, ...]:
    """That a frozen base lies in fp32 because the job names no dtype, and what one would save; how its 4 bits
    are counted."""
    adapter = experiment.adapter
    if adapter.is_present and adapter.is_quantised:
        return (
            "adapter.base_dtype=nf4 is planned with double quantisation, as it runs: 4.13 bits a value of "
            "linear layers (4.5 without)",
        )
    if not adapter.is_present or adapter.base_dtype is not None or experiment.training.precision == "bf16":
        return ()
    wide, narrow = _sizes_of_base(model)
    return (
        f"adapter.base_dtype is not given, so all but DeepSpeed keep the frozen base in fp32: {wide} GB a "
        f"copy; adapter.base_dtype=bf16 makes it {narrow}",
    )


def require_context(model: PlannedModel, experiment: Experiment) -> None:
    context = model.config.get("max_position_embeddings")
    length = experiment.data.sequence_length
    if isinstance(context, int) and length > context:
        raise HarnessError(
            f"data.sequence_length {length} is longer than {model.name}'s context of {context} positions; "
            "shorten it or choose a model with a longer context"
        )


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


@dataclass(frozen=True)
class Hardware:
    """The known GPUs and networks."""

    devices: Mapping[str, DeviceEntry]
    fabrics: Mapping[str, FabricEntry]

    def lines(self) -> list[str]:
        """Both as tables."""
        devices = [
            [
                device.name, f"{device.memory_bytes / 2**30:.1f}", f"{device.memory_bandwidth / 1e9:,.0f}",
                *(f"{r / 1e12:g}" if r else "n/a" for r in map(device.peak_flops.get, PEAK_DTYPES[:4])),
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
            capability=entry.capability,
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
    devices, fabrics = dict(shipped.devices), dict(shipped.fabrics)
    for path in (of_home if of_home.is_file() else None, file):
        if path is not None:
            expected = "a mapping with 'devices' or 'fabrics'"
            document = read_yaml_file(path, "hardware file", HardwareFile, expected)
            devices |= document.devices
            fabrics |= document.fabrics
    return Hardware(devices, fabrics)


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
                f"GPU '{given}' is a size: give a name such as H100-80 (`harness estimate --list hardware`) "
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


def _plain(text: str) -> str:
    """Without case, separators and a trailing GB: 'H100-80GB' is 'H100 80'."""
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    return letters.removesuffix("gb")


CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 2**60
"""Version 1 of control groups writes a number above this where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory of a node and its devices."""

    device_bytes: int | None = None
    """Of each rank's device; None: not known, or the ranks compute on the CPU."""
    device: Device | None = None
    """What is known of the device besides."""
    host_bytes: int | None = None
    """Of a node, for all of its ranks together; None: not known."""
    imposed_bytes: int | None = None
    """What `runtime.memory_limit` lets torch's allocator serve each rank."""


def limits_here(torch_device: str, imposed_bytes: int | None = None) -> MemoryLimits:
    """Memory limits of this machine: its smallest GPU, and what the host has left."""
    host = available_host_bytes()
    if torch_device != "cuda":
        return MemoryLimits(host_bytes=host, imposed_bytes=imposed_bytes)
    gpus = find_gpus()
    device: Device | None = None
    names = {gpu.name for gpu in gpus.devices}
    if len(names) == 1:
        with suppress(HarnessError):  # a GPU that no table knows
            device = load_hardware().device(names.pop())
    return MemoryLimits(
        device_bytes=gpus.smallest_bytes, device=device, host_bytes=host, imposed_bytes=imposed_bytes
    )


def available_host_bytes() -> int:
    """Memory that new processes can take: what the machine has left, or less in a control group."""
    left = int(psutil.virtual_memory().available)
    in_group = control_group_headroom()
    return left if in_group is None else min(left, in_group)


def control_group_headroom(root: Path = CONTROL_GROUPS, membership: Path = OWN_GROUPS) -> int | None:
    """What containers and batch systems leave this process, caches of files not counted; None: no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None  # not Linux
    found: list[int] = []
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            names, top = ("memory.max", "memory.current"), root
        elif "memory" in controllers.split(","):
            names, top = ("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "memory"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (left := _headroom(folder, *names)) is not None:
                found.append(left)
    return min(found, default=None)


def _headroom(folder: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit, used = (folder / limit_name).read_text().strip(), (folder / used_name).read_text()
        if limit == "max" or int(limit) >= UNLIMITED_BYTES:
            return None
        cached = 0
        with suppress(OSError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(statistics.get("inactive_file", statistics.get("total_inactive_file", 0)))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return None  # the group of another mount, or without a limit of its own


Answer = Literal["fits", "close", "does not fit"]
TIGHT_SHARE = 0.9
"""Of a device's memory: above it fragmentation and the error of a prediction may decide."""
BARELY_SHARE = 0.98
"""Of a device's memory: above it the next allocation of another size may fail."""
STATES_SHARE = 0.7
"""Of a device's memory: model states that leave room for activations that are not predicted."""


VERDICT_LEGEND = (
    f"fits: {1 - TIGHT_SHARE:.0%} of the memory or more is left; close: {1 - BARELY_SHARE:.0%} or more; "
    "barely: less"
).replace("%", " %")
"""What `MemoryVerdict.word` means."""


@dataclass(frozen=True, kw_only=True)
class MemoryVerdict:
    """What a rank needs of its device, beside what the device has."""

    needed_bytes: int
    """As nvidia-smi would show it: the allocator's peak, context and NCCL's buffers."""
    device_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Negative: so much is missing."""
        return self.device_bytes - self.needed_bytes

    @property
    def answer(self) -> Answer:
        if self.margin_bytes < 0:
            return "does not fit"
        return "close" if self.needed_bytes > TIGHT_SHARE * self.device_bytes else "fits"

    @property
    def fits(self) -> bool:
        """Whether it fits at all, if only tightly."""
        return self.margin_bytes >= 0

    @property
    def leaves_room(self) -> bool:
        """Whether it fits with enough left for fragmentation and the error of a prediction."""
        return self.answer == "fits"

    @property
    def barely_fits(self) -> bool:
        """Whether it fits with so little left that it is no recommendation."""
        return self.fits and self.needed_bytes > BARELY_SHARE * self.device_bytes

    @property
    def said(self) -> str:
        """The answer for people."""
        return "barely fits" if self.barely_fits else self.answer

    @property
    def word(self) -> str:
        """The answer for a table: 'fits', 'close', 'barely' or 'no'."""
        return {"does not fit": "no", "barely fits": "barely"}.get(self.said, self.said)
