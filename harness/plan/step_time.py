"""What one rank does in a step, and its predicted seconds: computing, each collective, what stays exposed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile

from harness.backends.optimizer.kinds import LOW_BIT
from harness.errors import HarnessError
from harness.forms import zero0
from harness.forms.activations import SELECTIVE, recomputed_share
from harness.forms.ddp import bucket_count, views_buckets
from harness.forms.families import collectives, gathers_weights, model_states, reduces_gradients
from harness.forms.fsdp import units as fsdp
from harness.forms.layout import DTYPE_BYTES, elements
from harness.forms.network import EMULATED, host_elements, host_link_bytes, transport_sent_bytes
from harness.forms.optimizers import implementation
from harness.forms.pipeline import bubble_of, samples_at_once
from harness.forms.tensor import local_workload, with_attention
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    PADDING,
    RING_PASSES,
    STEP_PHASES,
    Collective,
    ModelStates,
    Volume,
    ring_sent_bytes,
)
from harness.forms.textbook import (
    ModelGeometry,
    gpu_hours,
    kilowatt_hours,
    model_flops_per_token,
    textbook_collectives,
)
from harness.forms.workload import Workload
from harness.forms.zero3 import fetching
from harness.job.job import ModelSection
from harness.plan.hardware import Device, TimeConstants, TimeTerm, default_constants, is_sustained_rate_known
from harness.plan.model import Decoder, PlannedModel, Traffic, Weight, decoder, part_of
from harness.plan.scenario import COMPILED, OPTIMIZER, Scenario, require_speed

FURTHER = {FORWARD: FURTHER_FORWARD, BACKWARD: FURTHER_BACKWARD, GRADIENTS: FURTHER_GRADIENTS}


@dataclass(frozen=True)
class Work:
    """Closed forms of one rank's step, each evaluated once, so that constants can be fitted quickly."""

    scenario: Scenario
    rank: int | None = None
    """None: the one that holds most."""

    @cached_property
    def workload(self) -> Workload:
        return self.scenario.workload(self.rank)

    @cached_property
    def part(self) -> PlannedModel:
        """What of the model the rank computes."""
        return part_of(self.scenario.model, self.workload)

    @cached_property
    def decoder(self) -> Decoder:
        """Geometry of that part."""
        return decoder(self.part)

    @property
    def traffic(self) -> Traffic:
        """Of elementwise kernels, which compilation fuses."""
        is_eager = self.scenario.job.model.compile == "none"
        return self.decoder.traffic if is_eager else self.decoder.compiled_traffic

    @property
    def is_adapted(self) -> bool:
        """Whether adapters alone are trained."""
        return bool(self.workload.layout.frozen)

    @cached_property
    def adapter_matrices(self) -> tuple[Weight, ...]:
        """A and B of each adapter, in turn; empty without."""
        shapes = [tensor.shape for tensor in self.workload.layout.trained] if self.is_adapted else []
        return tuple(Weight(rows=rows, columns=columns, count=1) for rows, columns in shapes)

    @cached_property
    def logit_rows(self) -> int:
        """Logits of a token whose loss the rank computes; 0 on stages without the output projection.

        All of the vocabulary, also where ranks divide that projection: they gather what it puts out
        (`harness.forms.tensor.LOGITS`), and each computes the loss of all of it.
        """
        return decoder(self.scenario.model).head_rows if self.decoder.head_rows else 0

    @cached_property
    def rate_name(self) -> str:
        """Name of the compute dtype's rate in a device's data sheet: 'tf32' where the job asks for it."""
        dtype = self.workload.compute_dtype
        return "tf32" if dtype == "float32" and self.scenario.job.training.tf32 else dtype

    @cached_property
    def tokens(self) -> int:
        """That a rank computes at once: of a micro-step, or of a micro-batch of a pipeline."""
        return samples_at_once(self.workload) * (self.workload.part_length or 0)

    @cached_property
    def passes(self) -> int:
        """Forward passes of a step."""
        return self.scenario.samples // samples_at_once(self.workload)

    @cached_property
    def tokens_per_gpu(self) -> float:
        """Tokens of a step per GPU: those of ranks that share samples count once."""
        scenario = self.scenario
        samples = scenario.samples * scenario.mesh.data_size
        return samples * scenario.job.data.sequence_length / scenario.world_size

    @cached_property
    def _adam_states(self) -> ModelStates:
        """Model states under AdamW, two moments for each updated element, whatever the job's optimizer."""
        workload = self.scenario.workload()
        if workload.optimizer in ("adamw", "adam"):
            return self.scenario.states
        return model_states(replace(workload, optimizer="adamw"))

    @cached_property
    def device_elements(self) -> float:
        """Elements that a rank updates on its device."""
        terms = self._adam_states.terms
        moments = sum(t.bytes for t in terms if t.kind == "optimizer" and not (t.host or t.extra))
        on_device = moments / (2 * self.workload.master_bytes)
        return on_device + (self.host_elements if self.workload.device == "cpu" else 0)

    @cached_property
    def host_elements(self) -> float:
        """Elements that a rank updates on the host."""
        return host_elements(self.workload, self._adam_states)

    @cached_property
    def updated_tensors(self) -> int:
        """Tensors that the optimizer of a rank updates one by one: ZeRO lays each group into a flat one."""
        layout = self.part.layout
        if local_workload(self.workload).strategy.of_family.flat_states:
            return len(layout.update_groups())
        return len(self.workload.layout.trained if self.is_adapted else layout.parameters)

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], str]:
        """Collectives of an ordinary step, and where they come from.

        Where the closed form of the implementation is not known, the textbook's; ZeRO-3 has no `no_sync`,
        so in every micro-step.
        """
        workload = self.workload
        if workload.world_size == 1:
            return (), "one rank"
        volume = collectives(workload)
        if volume.unknown is None:
            found = tuple(c for c in volume.collectives if c.phase in STEP_PHASES and c.payload_bytes)
            return found, f"harness.forms.{workload.strategy.family}"
        if self.scenario.mesh.cuts_model:
            raise HarnessError(f"traffic is not known: {volume.unknown}")
        library = fsdp if workload.strategy.zero_stage is None else zero0
        textbook = textbook_collectives(
            workload, weight_dtype=workload.compute_dtype, reduce_dtype=library.reduce_dtype(workload)
        )
        textbook = list(with_attention(workload, Volume(collectives=tuple(textbook))).collectives)
        count = workload.accumulation_steps - 1 if workload.strategy.stage == 3 else 0
        further = (
            replace(c, term=FURTHER[c.term], payload_bytes=count * c.payload_bytes, calls=count)
            for c in textbook
            if count and c.term in FURTHER
        )
        return (*textbook, *further), f"harness.forms.textbook: {volume.unknown}"

    @cached_property
    def unit_shares(self) -> tuple[float, tuple[float, ...], float]:
        """Shares of the parameters: the root unit, each block, and what of the root follows the blocks."""
        layout = self.workload.layout
        units = dict(layout.units())
        total = layout.parameter_count
        blocks = tuple(elements(units[name]) / total for name in layout.blocks if name in units)
        names = tuple(f"{name}." for name in layout.blocks)
        # An output projection of its own, the last norm.
        behind = takewhile(lambda tensor: not tensor.name.startswith(names), reversed(layout.parameters))
        return elements(units.get("", ())) / total, blocks, (elements(behind) if names else 0) / total

    @cached_property
    def module_sizes(self) -> tuple[int, ...]:
        """Elements that modules own, which ZeRO-3 gathers at once."""
        sizes: Counter[str] = Counter()
        for tensor in self.workload.layout.parameters:
            sizes[tensor.name.rpartition(".")[0]] += tensor.numel
        return tuple(sizes.values())

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """Elements of the units that FSDP gathers at once."""
        if self.workload.options.get("wraps_layers"):
            return self.module_sizes
        return tuple(elements(tensors) for _, tensors in self.workload.layout.units())


EAGER_ONLY = frozenset({"BloomForCausalLM", "Gemma2ForCausalLM", "MptForCausalLM"})
"""Classes of transformers 5 that do not support sdpa (`_supports_sdpa`); a test compares."""
CAUSAL_TILE = 128
"""Rows and columns that a fused attention kernel takes at once: it skips whole tiles above the diagonal."""
ATTENTION_BACKWARD = 2.5
"""Products in the backward pass of fused attention over those in the forward pass: five to two."""
FUSED_FORMULA = "causal share of 4 T s a L, forward 1, backward 2.5"
EAGER_FORMULA = "4 T s a L / R, backward twice, + scores written and read / M"
EAGER_SOURCE = "eager attention of transformers 5, counted"

FP32_BYTES = 4
FULL_ACCESSES = (8, 9)
"""Reads and writes of a score in fp32, forward and backward. Forward: product 1, scaled 2, masked 2, softmax
2, product with the values 1. Backward: its gradient 1, read with the values' 1, softmax 3, scaled 2, two
products 2."""
LOW_ACCESSES = (8, 8)
"""The same in low precision: softmax's stand below, its input is widened and its output narrowed, 1 each."""
WIDE_BYTES = (16, 20)
"""Bytes of fp32 that softmax adds then: widened 4, softmax 4 + 4, narrowed 4; backward one more read of 4."""


def attention_kernel(model: PlannedModel, section: ModelSection) -> str:
    """'sdpa', 'eager' or 'flash_attention_2': what the job asks for, else what transformers chooses.

    Classes without a closed form here count as sdpa.
    """
    return section.attention_kernel or ("eager" if model.architecture in EAGER_ONLY else "sdpa")


def eager_attention(
    *, width: int, heads: int, layers: int, flops: float, bytes_per_second: float, element_bytes: int
) -> tuple[float, float]:
    """Seconds forward and backward, per token and token of its sequence, of products, masks and softmax as
    operators of their own, which write all scores to memory. `width`: heads times head size."""
    products = 4 * width * layers / flops
    scores = heads * layers / bytes_per_second
    full = element_bytes == FP32_BYTES
    accesses, wide = (FULL_ACCESSES, (0, 0)) if full else (LOW_ACCESSES, WIDE_BYTES)
    forward, backward = (count * element_bytes + more for count, more in zip(accesses, wide, strict=True))
    return products + scores * forward, 2 * products + scores * backward


def is_eager(scenario: Scenario) -> bool:
    return attention_kernel(scenario.model, scenario.job.model) == "eager"


def attention_seconds(work: Work, rates: Rates, constants: TimeConstants) -> tuple[float, float]:
    """Seconds forward and backward of a micro-step, over all layers.

    Fused kernels keep scores on the chip. Of s ranks of a ring the last takes (2 s - 1) / s of the mean: it
    meets all keys. Parts are consecutive and torch's load balancing is off
    (`backends/sequence/context_parallel.py`), so all wait for it.
    """
    model, tokens, length = work.decoder, work.tokens, work.scenario.job.data.sequence_length
    ranks, is_ring = work.workload.ranks_per_sample, work.workload.strategy.sequence == "ring"
    most = (2 * ranks - 1) / ranks if is_ring else 1.0
    if is_eager(work.scenario):
        forward, backward = eager_attention(
            width=model.attention_width, heads=model.heads, layers=model.layers, flops=rates.flops,
            bytes_per_second=rates.bytes, element_bytes=rates.width,
        )  # fmt: skip
        return most * (forward * tokens * length), most * (backward * tokens * length)
    causal = min(1.0, (1 + CAUSAL_TILE / length) / 2)
    each = 4 * model.attention_width * model.layers / rates.attention_flops
    fused = each * tokens * causal * (length + constants.attention_half_length)
    return most * fused, most * (ATTENTION_BACKWARD * fused)


ADAM_BYTES = {"foreach": 80, "for-loop": 80, "fused": 28}
"""Per fp32 element that AdamW reads and writes: fused 4 reads and 3 writes; else a pass per operation:
decay 8, first moment 12, second 8 + 12, root 8, correction 8, epsilon 8, update 16 (torch/optim/adamw.py)."""
SGD_BYTES = {"foreach": 24, "for-loop": 24, "fused": 12}
"""Decay added to gradients 12, update 12 (torch/optim/sgd.py); fused 2 reads, 1 write."""
MOMENTUM_BYTES = {"foreach": 20, "for-loop": 20, "fused": 8}
"""Of SGD besides: shrunk 8, gradients added 12; fused a read and a write."""
LOW_BIT_BYTES = 16
"""Weight read and written 8, gradient 4, two moments of a byte read and written 4, in one kernel."""
UPDATE_BYTES = ("adamw", "adam", "sgd", *LOW_BIT)
"""Kinds of optimizers whose reads and writes are counted."""


def update_bytes(workload: Workload) -> int:
    """Per fp32 element that an update reads and writes. Adam adds decay to gradients: 12 rather than 8."""
    kind = implementation(workload)
    if workload.optimizer in LOW_BIT:
        return LOW_BIT_BYTES
    if workload.optimizer == "sgd":
        return SGD_BYTES[kind] + (MOMENTUM_BYTES[kind] if workload.momentum else 0)
    return ADAM_BYTES[kind] + (4 if workload.optimizer == "adam" and kind != "fused" else 0)


UPDATE_SECONDS = {
    ("tensor", "for-loop"): 41e-6, ("tensor", "foreach"): 23e-6, ("tensor", "fused"): 2e-6,
    ("DTensor", "for-loop"): 157e-6, ("DTensor", "foreach"): 35e-6, ("DTensor", "fused"): 35e-6,
}  # fmt: skip
"""Per updated tensor, that the host takes in AdamW whatever its size: torch 2.13, 40 tensors of 16 x 16 on a
CPU, least of four runs; fused was not measured. FSDP2 holds its shards as DTensors."""
CLIPPING_BYTES = 12
"""Per fp32 gradient: read for the norm, read and written for the factor."""
COPY_BYTES = 12
"""Per element of a low-precision run of DeepSpeed: gradient widened (2 + 4), master narrowed (4 + 2)."""


def device_terms(work: Work, bytes_per_second: float, constants: TimeConstants) -> list[TimeTerm]:
    """Clipping and AdamW on the elements that a rank updates on its device.

    Bytes over memory bandwidth; on CUDA the host starts operators meanwhile, on a CPU it does so in between.
    """
    workload, count = work.workload, work.device_elements
    kind = implementation(workload)
    per_element = update_bytes(workload) + (CLIPPING_BYTES if workload.clips else 0)
    copies = COPY_BYTES if workload.strategy.zero_stage and workload.compute_bytes < 4 else 0
    width = per_element * workload.master_bytes / 4 + copies
    moving = count * width / bytes_per_second
    tensor = "DTensor" if workload.strategy.of_family.holds_dtensors else "tensor"
    starting = work.updated_tensors * UPDATE_SECONDS[tensor, kind] * constants.host_factor if count else 0.0
    together = max(moving, starting) if workload.device == "cuda" else moving + starting
    how = "or" if workload.device == "cuda" else "and"
    formula = (
        f"{width:g} bytes x elements that a rank updates / M, {how} {work.updated_tensors} {tensor}s x host"
    )
    return [TimeTerm("optimizer step", together, formula, "torch/optim/adamw.py, passes counted")]


def host_terms(work: Work, constants: TimeConstants) -> list[TimeTerm]:
    """The update of an offloaded optimizer, and what crosses the link between a rank and its host."""
    workload = work.workload
    if workload.offload == "none" or workload.device == "cpu":
        return []
    per_element = update_bytes(workload)
    update = work.host_elements * per_element / host_update_rate(work.scenario, constants)
    moved, device = host_link_bytes(workload, work.scenario.states), work.scenario.device
    assert device is not None
    return [
        TimeTerm(
            UPDATE_ON_HOST, update, f"{per_element} bytes x elements that a rank updates / host memory",
            "torch/optim/adamw.py, passes counted; their rate: DeepSpeed, pull request 735",
        ),
        TimeTerm(
            HOST_LINK, moved / (constants.host_link_share * device.host_link_bandwidth),
            "gradients down, updated weights up, or all offloaded weights at each gather / "
            f"{device.host_link}",
            "FSDPParam.all_gather_inputs, partition_grads and their like, counted",
        ),
    ]  # fmt: skip


def host_update_rate(scenario: Scenario, constants: TimeConstants) -> float:
    """Bytes per second of host memory that the update of each rank reaches."""
    is_fused = implementation(scenario.workload()) == "fused"
    alone = constants.fused_host_bytes_per_second if is_fused else constants.host_bytes_per_second
    return min(alone, constants.node_host_bytes_per_second / scenario.ranks_of_node)


UPDATE_ON_HOST, HOST_LINK = "optimizer step on the host", "between device and host"
"""Terms that only offload has."""
LOSS_BYTES = 44
"""Per logit: widened (2 + 4), log-softmax (4 + 4), its backward pass (4 + 4 + 4 + 4), narrowed (4 + 2), and
gradients of the shifted view (4 + 4), as `summed_cross_entropy` runs them."""


@dataclass(frozen=True, kw_only=True)
class ComputingTime:
    """Of one micro-step in seconds."""

    block_forward: float
    """All blocks together."""
    block_backward: float
    """With recomputation."""
    head_forward: float
    """Output projection and loss."""
    head_backward: float
    terms: tuple[TimeTerm, ...]
    """Of the whole step."""

    @property
    def micro_step(self) -> float:
        return self.block_forward + self.block_backward + self.head_forward + self.head_backward


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device sustains for a job."""

    flops: float
    """Of matrix products, FLOP/s."""
    attention_flops: float
    bytes: float
    """Per second."""
    width: int
    """Bytes of an element of the compute dtype."""


PACKED_BYTES = 0.5


def _block_products(work: Work, rates: Rates, constants: TimeConstants) -> tuple[float, float, float]:
    """Seconds of a micro-step's matrix products of all blocks, with A and B of each adapter and the unpacking
    of 4-bit weights: forward; backward, where a frozen weight's gradient is not computed: one product less;
    and again. Recomputation stops at the last saved tensor, the input of a block's last product."""
    job, model, tokens = work.scenario.job, work.decoder, work.tokens
    share = float(recomputed_share(job.training.activation_checkpointing, model.layers))
    plain = _products(model.matrices, tokens, rates, constants)
    adapters = _products(work.adapter_matrices, tokens, rates, constants)
    # Each weight of 4 bits is read, and written in the compute dtype.
    moved = work.scenario.other.unpacking_bytes or PACKED_BYTES + rates.width
    packed = sum(m.count * m.rows * m.columns for m in model.matrices) if job.adapter.is_quantised else 0
    unpacking = packed * moved / rates.bytes
    forward = plain + adapters + unpacking
    backward = (1 if work.is_adapted else 2) * plain + 2 * adapters + unpacking
    return forward, backward, share * (forward - _products(model.last, tokens, rates, constants))


def computing_time(work: Work, device: Device, constants: TimeConstants) -> ComputingTime:
    """Predict what one rank computes in a step."""
    scenario, model = work.scenario, work.decoder
    rates = _rates(work, device, constants)
    tokens = work.tokens
    checkpointing = scenario.job.training.activation_checkpointing
    recomputed = float(recomputed_share(checkpointing, model.layers))
    multiplied, multiplied_back, again = _block_products(work, rates, constants)
    beside = _beside_adapters(work, rates)
    # Of the output projection; a loss in chunks computes logits once more.
    head_passes = (2 if work.is_adapted else 3) + (scenario.job.loss.chunk_tokens is not None)
    attended, returned = attention_seconds(work, rates, constants)
    elementwise = tokens * model.layers * rates.width / rates.bytes
    between = elementwise * work.traffic.forward + beside[0]
    forward = multiplied + attended + between
    backward = multiplied_back + returned + elementwise * work.traffic.backward + beside[1]
    launch = constants.dispatch_seconds * constants.host_factor
    launches = host_launches(work)
    waited = max(0.0, launches[0] * launch - forward), max(0.0, launches[1] * launch - backward)
    ahead = max(0.0, forward - launches[0] * launch) + max(0.0, backward - launches[1] * launch)
    forward, backward = forward + waited[0], backward + waited[1]
    backward += again + recomputed * (forward - multiplied)
    waiting = (1 + recomputed) * waited[0] + waited[1]
    backward += between if checkpointing == SELECTIVE else 0.0
    head = _product(tokens, model.hidden, model.head_rows, rates, constants) if model.head_rows else 0.0
    loss = tokens * work.logit_rows * LOSS_BYTES / rates.bytes
    kept = _gradients_and_casts(work, rates)
    copied = {phase: seconds / work.passes for phase, seconds in _copies(work, rates).items()}
    steps, products = work.passes, multiplied + multiplied_back + again
    updating = device_terms(work, rates.bytes, constants)
    by_tensor = work.workload.device != "cpu" and not work.is_adapted  # else calibrated as a whole
    of_tensors = len(work.workload.layout.trained) * ONCE_SECONDS * constants.host_factor * by_tensor
    once = max(0.0, of_tensors - ahead - sum(term.seconds for term in updating))
    terms = (
        TimeTerm("matrix products", steps * (products + head_passes * head),
              f"{'2 passes and adapters' if work.is_adapted else '3 passes'}, and recomputation, of "
              "2 T in out / R + bytes / M + k per weight",
              constants.matrix_source),
        TimeTerm("attention", steps * ((1 + recomputed) * attended + returned),
              *((EAGER_FORMULA, EAGER_SOURCE) if is_eager(scenario)
                else (FUSED_FORMULA, constants.attention_source))),
        TimeTerm("elementwise kernels", steps * (forward + backward - products - waiting
              - (1 + recomputed) * attended - returned),
              "reads and writes of norms, residuals, activations / M", "kernels of transformers 5, counted"),
        TimeTerm(HOST_TERM, steps * waiting + once,
              f"{launches[0]:,.0f} and {launches[1]:,.0f} launches of {launch * 1e6:.3g} us, and once a step "
              f"{1e6 * ONCE_SECONDS:.0f} us a trained tensor, less the device",
              "kernels of transformers 5, counted; benchmarks/host_cost.py"),
        TimeTerm("logits and loss", steps * loss, f"{LOSS_BYTES} T V / M",
              "harness.rank.models.model, counted"),
        TimeTerm("gradients and casts", steps * kept, "bytes of weights cast and gradients added / M",
              "torch autocast, accumulate_grad"),
        TimeTerm("copies beside collectives", steps * sum(copied.values()),
              "bytes gathered and reduced x reads and writes / M", COPIES_SOURCE),
        *bubble_terms(work, forward + backward + kept + head_passes * head + loss),
        *updating,
        *host_terms(work, constants),
    )  # fmt: skip
    return ComputingTime(
        block_forward=forward + copied["forward"],
        block_backward=backward + kept + copied["backward"],
        head_forward=head + loss / 3,
        head_backward=(head_passes - 1) * head + 2 * loss / 3,
        terms=tuple(term for term in terms if term.seconds > 0),
    )


HOST_TERM = "waiting for the host"
ONCE_SECONDS = 280e-6
"""Of the host per trained tensor and step, beside its launches: the least of what half of the short steps of
three sources leave unexplained (280, 410 and 570 us). Those of adapters leave nothing (qwen)."""


ADAPTER_LAUNCHES = (27, 33)
HOOKS = {
    "fsdp2": ("units", 55, 65), "fsdp1": ("units", 108, 196), "zero12": ("tensors", 2, 6),
    "zero3": ("modules", 47, 28),
}  # fmt: skip
"""What the host does forward and backward for each unit, trained tensor or module of a library, and for each
adapted layer, in launches of one elementwise kernel: `python -m benchmarks.host_cost`, torch 2.13, DeepSpeed
0.19.8, blocks of a Llama of width 16 on a CPU, where that launch takes 11.7 us."""


def host_launches(work: Work) -> tuple[float, float]:
    """What the host starts in one pass forward and backward, in launches of a kernel."""
    traffic, workload = work.traffic, work.workload
    forward = float(work.decoder.layers * traffic.forward_kernels)
    backward = float(work.decoder.layers * traffic.backward_kernels)
    if workload.device == "cpu":  # a host that computes itself: calibrated as a whole
        return forward, backward
    adapted = len(work.adapter_matrices) / 2
    what, *hooks = HOOKS.get(local_workload(workload).strategy.family, ("units", 0, 0))
    counts = {
        "units": len(work.unit_sizes), "modules": len(work.module_sizes),
        "tensors": len(workload.layout.trained),
    }  # fmt: skip
    return tuple(
        bare + adapted * of_adapter + counts[what] * hook
        for bare, of_adapter, hook in zip((forward, backward), ADAPTER_LAUNCHES, hooks, strict=True)
    )  # type: ignore[return-value]


def bubble_terms(work: Work, one_pass: float) -> list[TimeTerm]:
    """Seconds of a step that a rank of a pipeline waits; one_pass: both passes of one micro-batch."""
    if not work.workload.strategy.facts.cuts_layers:
        return []
    share = bubble_of(work.workload)
    seconds = work.passes * one_pass * share / (1 - share)
    return [TimeTerm("bubble", seconds, "passes x (p - 1) / (v m)", "harness.forms.pipeline")]


OUTPUT_ACCESSES = (5, 2)
"""Reads and writes per output of an adapted layer, forward: scaled 2, added to the layer's own 3; backward:
scaled 2 (peft 0.21, tuners/lora/layer.py)."""
INPUT_ACCESSES = (0, 3)
"""Per input: the sum of the layer's gradient and the adapter's."""
DROPOUT_ACCESSES, MASK_BYTES = 2, 1
"""Per input and direction, where a part of it is dropped."""


def _beside_adapters(work: Work, rates: Rates) -> tuple[float, float]:
    """Seconds forward and backward of what peft does around the products of its adapters.

    Where adapters are fp32 under autocast, it widens what they take in, and autocast narrows it again.
    """
    workload, matrices = work.workload, work.adapter_matrices
    inputs = sum(m.count * m.columns for m in matrices[::2])
    outputs = sum(m.count * m.rows for m in matrices[1::2])
    own, casts, wide = rates.width, 0, workload.master_bytes
    if local_workload(workload).strategy.of_family.autocasts and workload.compute_bytes < wide:
        own, casts = wide, 2 * (rates.width + wide)
    dropped = DROPOUT_ACCESSES * own + MASK_BYTES if work.scenario.job.adapter.dropout else 0
    forward, backward = (
        rates.width * (of_output * outputs + of_input * inputs) + (casts + dropped) * inputs
        for of_output, of_input in zip(OUTPUT_ACCESSES, INPUT_ACCESSES, strict=True)
    )
    return work.tokens * forward / rates.bytes, work.tokens * backward / rates.bytes


def _rates(work: Work, device: Device, constants: TimeConstants) -> Rates:
    workload = work.workload
    # A device without units for a dtype computes it at its fp32 rate.
    peak = device.peak_flops.get(work.rate_name) or device.peak_flops["float32"]
    matrix = peak * constants.matrix_share * constants.sustained_share
    fused = workload.compute_dtype != "float32"
    return Rates(
        flops=matrix,
        attention_flops=peak * constants.attention_share if fused else matrix,
        bytes=device.memory_bandwidth * constants.memory_share,
        width=workload.compute_bytes,
    )


def _product(tokens: int, inputs: int, outputs: int, rates: Rates, constants: TimeConstants) -> float:
    """Seconds of one product: arithmetic plus reading and writing, so that thin ones are slower."""
    moved = rates.width * (tokens * (inputs + outputs) + inputs * outputs)
    return 2 * tokens * inputs * outputs / rates.flops + moved / rates.bytes + constants.kernel_seconds


def _products(matrices: tuple[Weight, ...], tokens: int, rates: Rates, constants: TimeConstants) -> float:
    return sum(m.count * _product(tokens, m.columns, m.rows, rates, constants) for m in matrices)


COPIES_SOURCE = "torch's DDP and FSDP and DeepSpeed, passes counted"
VIEWED = 2
"""Of DDP whose gradients are views of its buckets: they are divided in place."""


def _copies(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds of a step, by phase; a CPU's constants, which are calibrated as a whole, hold it."""
    workload = local_workload(work.workload)
    gathered, reduced = workload.strategy.of_family.copies
    found = {"forward": 0.0, "backward": 0.0}
    if workload.device == "cpu":
        return found
    if workload.strategy.family == "ddp" and views_buckets(workload):
        reduced = VIEWED
    for one in work.collectives[0]:
        if one.role != "replica" or workload.strategy.family == "ddp":  # a hybrid's replicas exchange shards
            if times := gathered * gathers_weights(one) + reduced * reduces_gradients(one):
                found[one.phase] += times * one.payload_bytes / rates.bytes
    return found


def _gradients_and_casts(work: Work, rates: Rates) -> float:
    """Seconds of a micro-step: weights that autocast narrows, gradients that it widens, and their sums."""
    workload = work.workload
    count = workload.layout.trained_count if work.is_adapted else work.part.parameters
    master = workload.master_bytes
    moved = 0
    if local_workload(workload).strategy.of_family.autocasts and workload.compute_bytes < master:
        moved += 2 * (workload.compute_bytes + master)
    if work.passes > 1:
        sums = 3 * master * (work.passes - 1) // work.passes
        sharded = workload.reduces_each and workload.strategy.stage >= 2  # then shards add up
        moved += sums // workload.shards if sharded else sums
    return count * moved / rates.bytes


LATENCY_HIDES = frozenset({"gloo"})
"""Transports whose latency is a wait for processors, which goes on while bytes move: only the longer
is felt. `harness fabric` over links of known speed: an all-reduce of 4 CPU ranks takes 6 ms for 1 KB, and for
1 MB at 1 Gbit/s 13.3 ms, of which the wire alone needs 13.4. NCCL adds them up (src/graph/tuning.cc)."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way that a collective's bytes take from each rank of a ring to the next."""

    ranks: int
    nodes: int
    members_per_node: int
    bandwidth: float
    """Bytes per second, of the slowest link."""
    inside: float
    """Of the links within a node."""
    between: float
    """Of all adapters of a node that the group uses; 0 on one node."""
    switched_share: float
    """Of the links within a node, that an all-reduce by their switches reaches; 0: they only pass on."""
    link_step_seconds: float
    fabric_step_seconds: float

    @property
    def name(self) -> str:
        return "between nodes" if self.nodes > 1 else "within nodes"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of the closed forms, in seconds per step."""

    collective: Collective
    path: Path
    seconds: float
    formula: str


def _transfer(collective: Collective, work: Work, device: Device, constants: TimeConstants) -> Transfer:
    workload, scenario = work.workload, work.scenario
    group = workload.group_ranks(collective.role, workload.rank)
    ranks = _pair(group, scenario.ranks_per_node) if collective.op in ("send", "recv") else group
    path = path_of(ranks, scenario, device, constants)
    calls = _calls(collective, workload)
    sent = transport_sent_bytes(scenario.transport, collective.op, collective.payload_bytes, path.ranks)
    op = EMULATED.get(scenario.transport, {}).get(collective.op, collective.op)
    if scenario.transport == "nccl":
        latency, wire = nccl_seconds(op, collective.payload_bytes, calls, path, constants)
    else:
        latency = call_latency(op, path, constants) if path.ranks > 1 else 0.0
        wire = sent / path.bandwidth
    if scenario.transport in LATENCY_HIDES and calls:
        shares = _shares(collective, work, calls)
        seconds, sign = sum(max(latency, share * wire) for share in shares), "or, if longer,"
    else:
        seconds, sign = calls * latency + wire, "+"
    return Transfer(
        collective=collective, path=path, seconds=seconds,
        formula=f"{calls} x {latency * 1e6:.0f} us {sign} {sent / 1e6:,.1f} MB / "
        f"{(sent / wire if wire else path.bandwidth) / 1e9:.2f} GB/s",
    )  # fmt: skip


def nccl_seconds(op: str, size: int, calls: int, path: Path, constants: TimeConstants) -> tuple[float, float]:
    """Seconds of each of `calls` and of their `size` bytes together, by the fastest of NCCL's ways."""
    if path.ranks == 1:
        return 0.0, 0.0
    ring = (sent := ring_sent_bytes(op, size, path.ranks)) / path.bandwidth
    within = min(ring, _wire_in_node(op, size, path)) if path.nodes == 1 else ring
    if constants.fitted:
        return call_latency(op, path, constants), min(within, _wire_of_tree(op, size, path))
    low = min(path.bandwidth * LOW_LATENCY_SHARE, LOW_LATENCY_MOST[min(path.nodes, 3) - 1])
    ways = [(_ring_latency(op, path, constants), ring), (low_latency(op, path), sent / low)]
    if path.nodes == 1:
        ways.append((call_latency(op, path, constants), within))
    elif op == "all_reduce" and calls:
        place = math.floor(math.log2(max(size / calls, 64) / 64))
        share = TREE_SHARES[place] if place < len(TREE_SHARES) else 1.0
        ways.append((_tree_latency(path, constants), _wire_of_tree(op, size, path) / share))
    return min(ways, key=lambda way: calls * way[0] + way[1])


def _wire_in_node(op: str, size: int, path: Path) -> float:
    """Seconds for the bytes of a collective within a node, `size` of result.

    An all-reduce is added up by its switches (NVLS), if that is faster than by a ring: src/graph/tuning.cc,
    nvlsEfficiency and the 5 / 6 of its algorithm.
    """
    ring = ring_sent_bytes(op, size, path.members_per_node) / path.inside
    if op != "all_reduce" or not path.switched_share or path.members_per_node <= 2:
        return ring
    return min(ring, size / (path.inside * path.switched_share))


def _wire_of_tree(op: str, size: int, path: Path) -> float:
    """Wire seconds of an all-reduce between nodes: up and down the tree; over two nodes each byte crosses
    once (the same file: bwIntra up to two nodes)."""
    if op != "all_reduce" or path.nodes == 1:
        return math.inf
    if path.nodes == 2:
        return max(_wire_in_node(op, size, path), size / path.between)
    return 2 * size / path.bandwidth


TREE_SHARES = (
    0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8,
    0.9, 0.9,
)  # fmt: skip
"""Of its bandwidth, that a tree reaches with messages of 64 B, 128 B and so on to 256 MiB: chunks are small
beside the way up and down (the same file, treeCorrectionFactor, protocol Simple)."""


SWITCHED = {"9": 0.85 * 5 / 6, "10": 0.74 * 5 / 6}
"""Major compute capability -> share, where each GPU of a node is linked to switches."""


def _pair(group: Sequence[int], ranks_per_node: int) -> list[int]:
    """Neighbours in a pipeline, on two nodes if any are: stages wait for the slowest message."""
    pairs = [list(pair) for pair in pairwise(group)]
    crossing = (pair for pair in pairs if len({rank // ranks_per_node for rank in pair}) > 1)
    return next(crossing, pairs[0] if pairs else list(group))


def path_of(ranks: Sequence[int], scenario: Scenario, device: Device, constants: TimeConstants) -> Path:
    """The links of a ring over a group; several rings share a node's adapters, one ring per rank of it."""
    nodes = {rank // scenario.ranks_per_node for rank in ranks}
    members = math.ceil(len(ranks) / len(nodes))
    inside = device.link_bandwidth * constants.link_share
    fabric = scenario.fabric
    if len(nodes) > 1 and fabric is None:
        raise HarnessError(
            f"{scenario.nodes} nodes need a network: name one with --fabric, or set --gpus-per-node so that "
            "one node holds all ranks"
        )
    across = inside if fabric is None else fabric.bandwidth_per_gpu * members * constants.fabric_share
    major = (device.capability or "").partition(".")[0]
    slowest = across if len(nodes) > 1 and members == 1 else min(inside, across)
    return Path(
        ranks=len(ranks),
        nodes=len(nodes),
        members_per_node=members,
        bandwidth=slowest if len(nodes) > 1 else inside,
        inside=inside,
        between=across if len(nodes) > 1 else 0.0,
        switched_share=SWITCHED.get(major, 0.0) if device.link in ("NVLink 4", "NVLink 5") else 0.0,
        link_step_seconds=constants.link_step_seconds,
        fabric_step_seconds=fabric.latency_seconds if fabric else 0.0,
    )


def call_latency(op: str, path: Path, constants: TimeConstants) -> float:
    """Seconds of a call without bytes: base + steps of the ring within and between nodes.

    NCCL, src/graph/tuning.cc, ncclTopoTuneModel: (n - 1) steps per pass, of which (nodes - 1) cross; small
    all-reduces go over a tree: 2 (log2 nodes + ranks of a node - 1) steps.
    """
    ring = _ring_latency(op, path, constants)
    return min(ring, _tree_latency(path, constants)) if op == "all_reduce" else ring


def _ring_latency(op: str, path: Path, constants: TimeConstants) -> float:
    passes = RING_PASSES.get(op, 1)
    between = passes * (path.nodes - 1)
    within = passes * (path.ranks - 1) - between
    return constants.call_seconds + within * path.link_step_seconds + between * path.fabric_step_seconds


def _tree_latency(path: Path, constants: TimeConstants) -> float:
    within = (path.members_per_node - 1) * path.link_step_seconds
    return constants.call_seconds + 2 * (within + math.ceil(math.log2(path.nodes)) * path.fabric_step_seconds)


LOW_LATENCY_SHARE = 1 / 4
"""Of a ring's bandwidth, that NCCL's protocol for small messages reaches (LL: every 4 bytes with a flag)."""
LOW_LATENCY_MOST = (87.7e9, 39e9, 20.4e9)
"""Bytes per second of it at most, on a node, two and more (the same file, llMaxBws)."""
NETWORK_SECONDS = 14e-6
"""Of a step between nodes by NCCL's own table; what a network takes more, it takes by every protocol
(src/graph/tuning.cc, latencyInter)."""


def low_latency(op: str, path: Path) -> float:
    """Seconds of a call without bytes by that protocol: src/graph/tuning.cc, baseLat and hwLat of LL."""
    more = max(0.0, path.fabric_step_seconds - NETWORK_SECONDS)
    passes, several = RING_PASSES.get(op, 1), path.nodes > 1
    between = several * (2 * path.nodes if op == "all_reduce" else path.nodes - 1)
    step = 1e-6 if several else 0.6e-6  # beside a network it posts, which takes longer
    ring = 6.6e-6 + (passes * (path.ranks - 1) - between) * step + between * (2.7e-6 + more)
    levels = math.ceil(math.log2(path.nodes))
    tree = 6.8e-6 + 2 * ((path.members_per_node - 1) * 0.6e-6 + levels * (5.0e-6 + more))
    return min(ring, tree) if op == "all_reduce" else ring


def _calls(collective: Collective, workload: Workload) -> int:
    """How many calls move the payload; where the closed form leaves it open, by buckets or units."""
    if collective.calls is not None:
        return collective.calls
    family = workload.strategy.family
    if family == "ddp":
        return bucket_count(workload)
    if workload.strategy.zero_stage and collective.op != "all_gather":
        workload = local_workload(workload)
        gradients = workload.layout.parameter_count * DTYPE_BYTES[collective.dtype]
        passes = max(1, round(collective.payload_bytes / gradients))
        return zero0.buckets_filled(workload) * passes
    return max(1, len(workload.layout.units()))


def _shares(collective: Collective, work: Work, calls: int) -> list[float]:
    """What part of the payload each call moves: units of FSDP, modules of ZeRO-3, else equal parts."""
    sizes: tuple[int, ...] = ()
    family = work.workload.strategy.family
    if collective.op in ("all_gather", "reduce_scatter", "all_reduce") and calls > 1:
        if family in ("fsdp1", "fsdp2", "replicate"):
            sizes = work.unit_sizes
        elif family == "zero3" and collective.op == "all_gather":
            sizes = work.module_sizes
    times, rest = divmod(calls, len(sizes)) if sizes else (0, 1)
    if rest:
        return [1 / calls] * calls
    total = sum(sizes) * times
    return [size / total for size in sizes] * times


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """What runs at the same time."""

    gathers_ahead: bool
    """Weights of the next unit are gathered while this one computes."""
    reduces_beside: bool
    """Gradients are reduced while the backward pass goes on."""
    source: str


@dataclass(frozen=True, kw_only=True)
class UnitPass:
    """One unit in one direction: its weights arrive, it computes, its gradients leave."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def overlap_rule(workload: Workload) -> OverlapRule:
    """What the library of a strategy overlaps with these options and this preset."""
    family, on_gpu = local_workload(workload).strategy.family, workload.device != "cpu"
    ahead = beside = False
    match family:
        case "ddp":
            beside, source = True, "DDP reduces a bucket once it is full (torch, reducer.cpp)"
        case "fsdp1" | "fsdp2" | "replicate":
            ahead = on_gpu and workload.options.get("backward_prefetch") != "none"
            beside = on_gpu
            source = "FSDP gathers the next unit and reduces the last one on streams of their own" + (
                "" if on_gpu else "; a CPU has no streams, so it waits for each collective"
            )
        case "zero3":
            how = fetching(workload)
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is true by default at stage 3" + (
                "; like for like sets stage3_max_live_parameters to 0: nothing is gathered ahead"
                if not how.live
                else ""
            )
            ahead = on_gpu and how.live > 0 and how.ahead > 0
            beside = on_gpu and workload.options.get("overlap_comm") is not False
        case "single" | "pipeline":
            source = "layers and stages wait for what they exchange; replicas are averaged after the passes"
        case _:
            beside = on_gpu and family == "zero12" and workload.options.get("overlap_comm") is True
            source = "DeepSpeed 0.19.8, zero/config.py: overlap_comm is false by default below stage 3" + (
                "; true reduces bucket by bucket on a stream of its own (stage_1_and_2.py)" if beside else ""
            )
    return OverlapRule(gathers_ahead=ahead, reduces_beside=beside, source=source)


def exposed_seconds(
    work: Work, computing: ComputingTime, found: Sequence[Transfer], rule: OverlapRule
) -> float:
    """Seconds per step in which a rank communicates and does not compute, if hiding costs nothing."""
    gathers = [t for t in found if gathers_weights(t.collective)]
    reductions = [t for t in found if reduces_gradients(t.collective)]
    hideable = {id(t) for t in (*gathers, *reductions)}
    always = sum(t.seconds for t in found if id(t) not in hideable)
    count = work.workload.accumulation_steps
    # Where weights stay gathered between micro-steps, only the first one gathers in its forward pass.
    gathers_each = any(t.collective.term == FURTHER_FORWARD for t in gathers)
    reduces_each = any(t.collective.term == FURTHER_GRADIENTS for t in reductions)
    forward = sum(t.seconds for t in gathers if t.collective.phase == "forward")
    backward = sum(t.seconds for t in gathers if t.collective.phase == "backward") / count
    reduced = sum(t.seconds for t in reductions) / (count if reduces_each else 1)
    forward /= count if gathers_each else 1

    def micro_step(*, first: bool, last: bool) -> float:
        stages = _stages(
            work,
            computing,
            forward=forward if first or gathers_each else 0.0,
            backward=backward,
            reduced=reduced if last or reduces_each else 0.0,
        )
        return max(0.0, run_time(stages, rule) - computing.micro_step)

    if count == 1:
        return always + micro_step(first=True, last=True)
    ends = micro_step(first=True, last=False) + micro_step(first=False, last=True)
    return always + ends + (count - 2) * (micro_step(first=False, last=False) if count > 2 else 0.0)


def run_time(stages: Sequence[UnitPass], rule: OverlapRule) -> float:
    """Seconds of stages in order on one device and one network, each of which does one thing at a time.

    Ahead: the gather of a stage begins when the stage before begins to compute, after the network is free.
    """
    computed = network = begun = 0.0
    waiting = 0.0
    for stage in stages:
        if stage.gather:
            start = max(network, begun if rule.gathers_ahead else computed)
            arrived = network = start + stage.gather
        else:
            arrived = 0.0
        if waiting:
            # The reduction of the stage before was started after this gather.
            network = max(network, computed) + waiting
            waiting = 0.0
            if not rule.reduces_beside:
                arrived = max(arrived, network)
        begun = max(computed, arrived)
        computed = begun + stage.compute
        waiting = stage.reduce
    return max(computed, (max(network, computed) + waiting) if waiting else network)


def _stages(
    work: Work, computing: ComputingTime, *, forward: float, backward: float, reduced: float
) -> list[UnitPass]:
    """A micro-step as stages; seconds of communication are divided by the units' elements.

    Buckets of DDP and DeepSpeed hold what is ready: the output projection first, the embedding last. A unit
    of FSDP and ZeRO-3 that holds both is reduced last.
    """
    root, blocks, behind = work.unit_shares
    early = behind if local_workload(work.workload).strategy.of_family.reduces_buckets else 0.0
    count = max(1, len(blocks))
    each = [UnitPass(compute=computing.block_forward / count, gather=share * forward) for share in blocks]
    found = [UnitPass(compute=0.0, gather=root * forward), *each, UnitPass(compute=computing.head_forward)]
    head = UnitPass(compute=computing.head_backward, gather=root * backward, reduce=early * reduced)
    back = [
        UnitPass(compute=computing.block_backward / count, gather=s * backward, reduce=s * reduced)
        for s in reversed(blocks)
    ]
    if not blocks:
        found.append(UnitPass(compute=computing.block_forward))
        back = [UnitPass(compute=computing.block_backward)]
    return [*found, head, *back, UnitPass(compute=0.0, reduce=(root - early) * reduced)]


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """One optimizer step of the slowest rank."""

    computing: tuple[TimeTerm, ...]
    communication: tuple[TimeTerm, ...]
    exposed_seconds: float
    """What of the communication does not hide behind computing, and what computing loses to the rest."""
    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_utilization: float | None
    """Of the device's dense peak for the compute dtype, 0 to 1."""
    joules_per_step: float | None
    """Of all devices at their power limit: an upper bound."""
    remarks: tuple[str, ...] = ()
    """What overlaps, and where the constants come from."""
    step_seconds_between: tuple[float, float] | None = None
    """Where the step is a range; None: it is a figure."""
    between_because: str | None = None
    is_at_scale: bool = False
    """Whether it may hide nothing of its communication on as many GPUs."""

    @property
    def tokens_per_second_between(self) -> tuple[float, float] | None:
        """The least and the most per GPU."""
        if self.step_seconds_between is None:
            return None
        tokens, (fast, slow) = self.tokens_per_second_per_gpu * self.step_seconds, self.step_seconds_between
        return tokens / slow, tokens / fast

    @property
    def loses_with_scale(self) -> bool:
        """Whether that alone makes the step a range."""
        return self.between_because == AT_SCALE

    @property
    def computing_seconds(self) -> float:
        return sum(term.seconds for term in self.computing)

    @property
    def host_share(self) -> float:
        """Share of the step in which the device waits for the host to start operators."""
        return sum(term.seconds for term in self.computing if term.name == HOST_TERM) / self.step_seconds

    @property
    def host_update_share(self) -> float:
        """Share of the step in which the host updates what is offloaded."""
        update = sum(term.seconds for term in self.computing if term.name == UPDATE_ON_HOST)
        return update / self.step_seconds

    @property
    def communication_seconds(self) -> float:
        return sum(term.seconds for term in self.communication)


def predict_speed(scenario: Scenario, constants: TimeConstants | None = None) -> SpeedPrediction | None:
    """Predict a step; None without a device. `constants`: in place of the scenario's.

    step = computing + exposed + c (communication - exposed) + o, with c the contention and o the overhead.
    Raises HarnessError for several nodes without a fabric.
    """
    device = scenario.device
    if device is None:
        return None
    counted = (OPTIMIZER,) if scenario.job.optimizer.kind in UPDATE_BYTES else ()
    require_speed(scenario, covered=(COMPILED, *counted))
    constants = constants or scenario.constants or default_constants(device)
    found = (predict_work(Work(scenario, rank), device, constants) for rank in scenario.unlike_ranks)
    return max(found, key=lambda speed: speed.step_seconds)


def predict_work(work: Work, device: Device, constants: TimeConstants) -> SpeedPrediction:
    """Predict a step whose closed forms are there already."""
    scenario = work.scenario
    computing, found, exposed = _parts(work, device, constants)
    terms = computing.terms
    if constants.step_overhead_seconds > 0:
        terms = (*terms, TimeTerm("overhead", constants.step_overhead_seconds, "o", constants.origin))
    step = _step(computing, exposed, constants)
    tokens, peak = work.tokens_per_gpu, device.peak_flops.get(work.rate_name)
    flops = model_flops_per_token(_geometry(work))
    because, between = _between(work, device, constants, step)
    return SpeedPrediction(
        step_seconds_between=between,
        between_because=because,
        is_at_scale=_is_at_scale(work, constants),
        computing=terms,
        # A line per collective; padding joins what it pads.
        communication=tuple(
            TimeTerm(
                f"{t.collective.term} ({f'{t.collective.phase}, ' if t.collective.term == PADDING else ''}"
                f"{t.collective.op}, {t.path.name})",
                t.seconds, t.formula, work.collectives[1],
            )
            for t in found
        ),
        exposed_seconds=exposed,
        step_seconds=step,
        tokens_per_second_per_gpu=tokens / step,
        model_flops_utilization=flops * (tokens / step) / peak if peak else None,
        joules_per_step=device.watts * step * scenario.world_size if device.watts else None,
        remarks=(*((overlap_rule(work.workload).source,) if found else ()), f"constants: {constants.origin}"),
    )  # fmt: skip


SUSTAINED_BETWEEN = (1.0, 0.3)
"""Of the best matrix rate; the least is that of any source on any GPU (B200, MI355X, RTX 6000 Ada: 0.3)."""
UNMEASURED = "too few sources ran on this GPU to show what of its rates training sustains"
MANY_GPUS = 64
AT_SCALE = f"from {MANY_GPUS} GPUs on full sharding over nodes hides its communication, or nothing of it"
"""Measured on 64 to 512: 0.92 to 1.21 of the predicted step in five sources, on Leonardo 1.28 to 1.37."""


def _between(
    work: Work, device: Device, constants: TimeConstants, step: float
) -> tuple[str | None, tuple[float, float] | None]:
    """Why a step is a range, and from how many seconds to how many."""
    if constants.fitted or work.workload.device == "cpu":
        return None, None
    at_scale = _is_at_scale(work, constants)
    least = replace(constants, contention=1.0) if at_scale else constants
    if not is_sustained_rate_known(device):
        ends = zip((constants, least), SUSTAINED_BETWEEN, strict=True)
        fast, slow = (seconds_of_step(work, device, replace(one, sustained_share=of)) for one, of in ends)
        return UNMEASURED, (min(fast, step), max(slow, step))
    return (AT_SCALE, (step, seconds_of_step(work, device, least))) if at_scale else (None, None)


def _is_at_scale(work: Work, constants: TimeConstants) -> bool:
    scenario, facts = work.scenario, work.workload.strategy.facts
    is_full = scenario.nodes > 1 and facts.reshards and not facts.has_replicas
    return is_full and scenario.world_size >= MANY_GPUS and not constants.fitted


def seconds_of_step(work: Work, device: Device, constants: TimeConstants) -> float:
    """The step alone, for fits that evaluate it often."""
    computing, _, exposed = _parts(work, device, constants)
    return _step(computing, exposed, constants)


def _step(computing: ComputingTime, exposed: float, constants: TimeConstants) -> float:
    return sum(term.seconds for term in computing.terms) + exposed + constants.step_overhead_seconds


def _parts(
    work: Work, device: Device, constants: TimeConstants
) -> tuple[ComputingTime, list[Transfer], float]:
    """Computing, transfers, and the seconds that communication adds to computing."""
    computing = computing_time(work, device, constants)
    found = [_transfer(collective, work, device, constants) for collective in work.collectives[0]]
    if not found:
        return computing, found, 0.0
    ideal = exposed_seconds(work, computing, found, overlap_rule(work.workload))
    hidden = max(0.0, sum(transfer.seconds for transfer in found) - ideal)
    return computing, found, ideal + constants.contention * hidden


def gpu_hours_per_billion_tokens(speed: SpeedPrediction) -> float:
    """Hours of one GPU for 1e9 tokens: what is paid for."""
    return gpu_hours(speed.tokens_per_second_per_gpu, 1)


def kilowatt_hours_per_billion_tokens(speed: SpeedPrediction, world_size: int) -> float | None:
    """Energy of the GPUs at their power limit for 1e9 tokens: an upper bound; None: power unknown."""
    if speed.joules_per_step is None:
        return None
    watts = speed.joules_per_step / speed.step_seconds
    return kilowatt_hours(speed.tokens_per_second_per_gpu * world_size, watts)


def _geometry(work: Work) -> ModelGeometry:
    """Geometry of the whole model, with adapters beside their frozen base."""
    scenario, model = work.scenario, work.scenario.model
    base = model.multiplying_parameters
    adapters = scenario.workload().layout.trained_count if work.is_adapted else 0
    prefixes = tuple(f"{name}." for name in model.layout.blocks)
    inside = sum(t.numel for t in model.layout.parameters if prefixes and t.name.startswith(prefixes))
    return ModelGeometry(
        multiplying_parameters=base + adapters,
        block_parameters=inside,
        layers=model.layers,
        attention_width=model.attention_width,
        sequence_length=scenario.job.data.sequence_length,
        frozen_parameters=base if work.is_adapted else 0,
    )
