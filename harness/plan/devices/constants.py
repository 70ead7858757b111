"""What the time model takes from measurements: reached shares of a device's data sheet, and latencies.

Every default names its source. `harness estimate --calibrate RUNS` replaces them by what your records show.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.plan.devices.device import Device


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number and where it comes from."""

    value: float
    source: str


MAMF = "maximum achievable matmul FLOPS, S. Bekman, 'Machine Learning Engineering', compute/accelerator"
MM = "torch.mm in bf16, best of 1,024 to 10,240 columns, github.com/zzc0721/torch-performance-test-data"
BOOST = "clocks rise above the data sheet's"
TRAINED = "alpharomercoma/MI300X-vs-H200: H200 trains an 8B model in bf16 1.32 to 1.40 times as fast"
MATRIX_SHARES: dict[str, Constant] = {
    "A100": Constant(value=0.859, source=f"{MAMF}: 267.9 of 312 TFLOP/s"),
    "H100": Constant(value=0.801, source=f"{MAMF}: 792.1 of 989 TFLOP/s"),
    "H200": Constant(value=0.801, source=f"{MAMF}: as H100, the same chip"),
    "GH200": Constant(value=0.830, source=f"{MAMF}: 821.0 of 989 TFLOP/s"),
    "MI300X": Constant(value=0.601, source=f"{MAMF}: 781.9 of 1300 TFLOP/s"),
    "MI325X": Constant(value=0.601, source=f"{MAMF}: as MI300X, the same chip"),
    "MI355X": Constant(value=0.601, source=f"{MAMF}: as MI300X, an estimate"),
    "MI250X": Constant(value=0.767, source=f"{MAMF}: 147.0 of 191.5 TFLOP/s per die"),
    "H20": Constant(value=0.958, source=f"{MM}: 141.9 of 148 TFLOP/s"),
    "B200": Constant(value=0.754, source=f"{MM}: 1,696 of 2,250 TFLOP/s"),
    "GB200": Constant(value=0.754, source=f"{MM}: as B200, the same chip"),
    "L40S": Constant(value=0.744, source=f"{MM}: 269.2 of 362 TFLOP/s"),
    "RTX-6000-Ada": Constant(value=0.744, source=f"{MM}: as L40S, the same chip"),
    "A6000": Constant(value=0.797, source=f"{MM}: 123.3 of 154.8 TFLOP/s"),
    "RTX-3090": Constant(value=1.08, source=f"{MM}: 76.6 of 71 TFLOP/s, median of 3: {BOOST}"),
    "RTX-4090": Constant(value=1.00, source=f"{MM}: 165 of 165.2 TFLOP/s, median of 5: {BOOST}"),
    "RTX-5090": Constant(value=1.13, source=f"{MM}: 237 of 209.5 TFLOP/s, median of 5: {BOOST}"),
}
"""Best of many shapes, by the beginning of the device's name."""
OTHER_MATRIX_SHARE = Constant(value=0.80, source=f"{MAMF}: middle of the devices listed there")
ATTENTION_SHARES: dict[str, Constant] = {
    "A100": Constant(value=0.60, source="FlashAttention-2, T. Dao, arXiv 2307.08691: 50 to 73 % of the peak"),
    "H100": Constant(value=0.34, source="the same, section 4.1: 335 TFLOP/s of 989 on H100"),
    "H200": Constant(value=0.34, source="as H100, the same chip"),
    "MI300X": Constant(value=0.19, source=f"H200's 336 TFLOP/s over 1.36: {TRAINED}"),
    "MI325X": Constant(value=0.19, source="as MI300X, the same chip"),
    "MI355X": Constant(value=0.19, source="as MI300X, an estimate"),
    "RTX-4090": Constant(
        value=0.80,
        source="FlashAttention-2 at 162 TFLOP/s forward (arXiv 2410.02367: 340, 2.1 times as fast), 0.98 of "
        "the peak; of that 0.82 with the backward pass, as on A100",
    ),
}
SUSTAINED_SHARES: dict[str, Constant] = {
    "A100": Constant(value=0.90, source="mosaicml/llm-foundry, throughput table, mpt-3b and mpt-7b"),
    "H100": Constant(
        value=0.80,
        source="foundation-model-stack/fms-fsdp, llama2-7b compiled; Ultra-Scale Playbook, 1B",
    ),
    "H200": Constant(value=0.80, source="as H100, the same chip"),
}
"""Of the best matrix rate, that training keeps up: clocks fall under lasting load, and most shapes are not
the best one. Estimated once from the rows named here; no accuracy is claimed for these rows."""
COMPARED_SHARES: dict[str, Constant] = {
    "MI300X": Constant(value=0.60, source=f"H200's 634 TFLOP/s over 1.36: {TRAINED}"),
    "MI325X": Constant(value=0.60, source="as MI300X, the same chip"),
    "MI355X": Constant(value=0.60, source="as MI300X, an estimate"),
}
"""The same, by how much faster another GPU trained."""
OTHER_SUSTAINED_SHARE = Constant(value=0.85, source="between A100 and H100")
OTHER_ATTENTION_SHARE = Constant(value=0.50, source="between the devices of FlashAttention-2's paper")


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


def default_constants(device: Device) -> TimeConstants:
    """Constants for a device by its name, before any calibration."""
    matrix = _of(device, MATRIX_SHARES, OTHER_MATRIX_SHARE)
    sustained = _of(device, SUSTAINED_SHARES | COMPARED_SHARES, OTHER_SUSTAINED_SHARE)
    attention = _of(device, ATTENTION_SHARES, OTHER_ATTENTION_SHARE)
    return TimeConstants(
        matrix_share=matrix.value,
        matrix_source=f"{matrix.source}; sustained {sustained.value:.0%}: {sustained.source}",
        attention_share=attention.value,
        attention_source=attention.source,
        sustained_share=sustained.value,
    )


def _of(device: Device, table: dict[str, Constant], otherwise: Constant) -> Constant:
    return next((value for name, value in table.items() if device.name.startswith(name)), otherwise)


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """A part of a step's time."""

    name: str
    seconds: float
    formula: str
    source: str
