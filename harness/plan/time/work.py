"""What a step of a scenario does, before any constant turns it into seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from harness.errors import HarnessError
from harness.forms.families import collectives, model_states
from harness.forms.fsdp import units as fsdp
from harness.forms.host_link import host_elements
from harness.forms.part import local_workload, samples_at_once
from harness.forms.sequence import with_attention
from harness.forms.terms import (
    BACKWARD,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    FURTHER_GRADIENTS,
    GRADIENTS,
    STEP_PHASES,
    Collective,
    ModelStates,
    Volume,
)
from harness.forms.textbook import textbook_collectives
from harness.forms.workload import Workload
from harness.forms.zero import stages as zero
from harness.plan.model import Decoder, PlannedModel, Weight, decoder
from harness.plan.model_part import part_of
from harness.plan.scenario import Scenario

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
    def parameters(self) -> int:
        """Of that part."""
        return self.part.parameters

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
        return (
            self.scenario.accumulation_steps
            * self.scenario.micro_batch_size
            // samples_at_once(self.workload)
        )

    @cached_property
    def tokens_per_gpu(self) -> float:
        """Of a step: those of ranks that share samples count once."""
        scenario = self.scenario
        samples = scenario.micro_batch_size * scenario.accumulation_steps * scenario.mesh.data_size
        return samples * scenario.job.data.sequence_length / scenario.world_size

    @cached_property
    def _adam_states(self) -> ModelStates:
        """Of AdamW, two moments for each element that is updated, whatever the job's optimizer keeps."""
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
        flat = local_workload(self.workload).strategy.family in ("zero12", "zero3")
        if flat:
            return len(layout.groups())
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
        library = fsdp if workload.strategy.zero_stage is None else zero
        textbook = textbook_collectives(
            workload, weight_dtype=workload.compute_dtype, reduce_dtype=library.reduce_dtype(workload)
        )
        textbook = list(with_attention(workload, Volume(collectives=tuple(textbook))).collectives)
        further = _further_micro_steps(textbook, workload) if workload.strategy.stage == 3 else []
        return (*textbook, *further), f"harness.forms.textbook: {volume.unknown}"

    @cached_property
    def unit_shares(self) -> tuple[float, tuple[float, ...], float]:
        """Shares of the parameters: the root unit, each block, and what of the root follows the blocks."""
        layout = self.workload.layout
        units = dict(layout.units())
        total = layout.parameter_count
        blocks = tuple(sum(t.numel for t in units[name]) / total for name in layout.blocks if name in units)
        root = sum(t.numel for t in units.get("", ())) / total
        return root, blocks, self._after_blocks() / total

    def _after_blocks(self) -> int:
        """Elements behind the last block: an output projection of its own, the last norm."""
        layout = self.workload.layout
        names = tuple(f"{name}." for name in layout.blocks)
        elements = 0
        for tensor in reversed(layout.parameters):
            if names and tensor.name.startswith(names):
                break
            elements += tensor.numel
        return elements if names else 0

    @cached_property
    def module_sizes(self) -> tuple[int, ...]:
        """Elements that modules own, which ZeRO-3 gathers at once."""
        sizes: dict[str, int] = {}
        for tensor in self.workload.layout.parameters:
            module = tensor.name.rpartition(".")[0]
            sizes[module] = sizes.get(module, 0) + tensor.numel
        return tuple(sizes.values())

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """Elements of the units that FSDP gathers at once."""
        if self.scenario.other.wraps_layers:
            return self.module_sizes
        units = self.workload.layout.units()
        return tuple(sum(t.numel for t in tensors) for _, tensors in units)


def _further_micro_steps(one: Iterable[Collective], workload: Workload) -> list[Collective]:
    """The collectives of one micro-step again, for each micro-step after the first."""
    count = workload.accumulation_steps - 1
    return [
        replace(c, term=FURTHER[c.term], payload_bytes=count * c.payload_bytes, calls=count)
        for c in one
        if count and c.term in FURTHER
    ]
