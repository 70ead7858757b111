"""What a prediction needs to know of a GPU and of the links between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.backends.base import Preset
from harness.errors import HarnessError
from harness.job.experiment import Experiment
from harness.plan.model import PlannedModel
from harness.tell.formats import gigabytes


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
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability; None: AMD's, or not known."""
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
    training, data, adapter = experiment.training, experiment.data, experiment.adapter
    if "precision" not in training.model_fields_set:
        precision = "bf16-mixed" if "bfloat16" in device.peak_flops else "fp16-mixed"
        training = training.model_copy(update={"precision": precision})
        remarks.append(f"training.precision={precision}, since none is given")
    if (
        adapter.is_present
        and training.precision == "bf16-mixed"
        and "base_dtype" not in adapter.model_fields_set
    ):
        adapter = adapter.model_copy(update={"base_dtype": "bf16"})
        wide, narrow = _sizes_of_base(model)
        remarks.append(
            "adapter.base_dtype=bf16, since none is given, as fine-tuning scripts load the frozen base: "
            f"{narrow} GB a copy (fp32: {wide})"
        )
    if data.is_tokenized and "sequence_length" not in data.model_fields_set:
        context = model.config.get("max_position_embeddings")
        length = (
            min(context, LONGEST_DEFAULT_SEQUENCE) if isinstance(context, int) else LONGEST_DEFAULT_SEQUENCE
        )
        data = data.model_copy(update={"sequence_length": length})
        remarks.append(f"data.sequence_length={length}, since none is given")
    runtime = experiment.runtime
    if "preset" not in runtime.model_fields_set:
        runtime = runtime.model_copy(update={"preset": PRESET})
        remarks.append(f"runtime.preset={PRESET}, since none is given")
    update = {"training": training, "adapter": adapter, "data": data, "runtime": runtime}
    found = experiment.model_copy(update=update)
    return found, (*remarks, *_of_base(model, found))


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
