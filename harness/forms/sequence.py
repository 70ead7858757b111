"""What attention communicates where ranks divide samples: torch 2.13's ring, DeepSpeed 0.19.8's Ulysses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.forms.model.activations import SELECTIVE, recomputed_share
from harness.forms.model.layout import DTYPE_BYTES, Attention
from harness.forms.terms import Collective, Volume
from harness.forms.workload import Role, Workload

KEYS = "keys and values gathered for attention"
ROTATED = "keys and values passed on around the ring"
GRADIENTS_OF_KEYS = "gradients of keys and values passed on around the ring"
EXCHANGED = "queries, keys, values and results exchanged"
POSITIONS = "positions gathered"
UNKNOWN_HEADS = "the model does not say its heads, so what attention exchanges is not known"
FROZEN = "which attention needs gradients where weights are frozen is not modelled"
KEPT = "what selective checkpointing keeps of attention that ranks divide is not modelled"
MESH_AXIS = "sequence"


def with_attention(workload: Workload, volume: Volume) -> Volume:
    """The volume of the strategy underneath, and what attention adds to it."""
    if workload.strategy.sequence is None or volume.unknown is not None:
        return volume
    attention = workload.layout.attention
    if (reason := _why_unknown(workload)) is not None or attention is None:
        return replace(volume, unknown=reason)
    exchange = _Exchange(workload, attention)
    share = recomputed_share(workload.activation_checkpointing, attention.layers)
    again = replace(exchange, attention=replace(attention, layers=int(share * attention.layers)))
    passes = len(workload.steps) * workload.accumulation_steps
    found = [
        *exchange.forward("forward", passes),
        *again.forward("backward", passes),
        *exchange.backward(passes),
    ]
    return replace(volume, collectives=(*volume.collectives, *found))


def _why_unknown(workload: Workload) -> str | None:
    if workload.layout.attention is None:
        return UNKNOWN_HEADS
    if workload.layout.frozen:
        return FROZEN
    return KEPT if workload.activation_checkpointing == SELECTIVE else None


@dataclass(frozen=True)
class _Exchange:
    """Attention of one rank's micro-batch, in all blocks."""

    workload: Workload
    attention: Attention

    @property
    def ranks(self) -> int:
        """Ranks that share samples."""
        return self.workload.ranks_per_sample

    @property
    def role(self) -> Role:
        return "world" if self.ranks == self.workload.world_size else MESH_AXIS

    def forward(self, phase: str, passes: int) -> list[Collective]:
        """`passes` forward passes."""
        if self.workload.strategy.sequence == "exchange":
            # `UlyssesSPAttentionHF.forward`: int64 positions of one sample, which all share, by block.
            size = DTYPE_BYTES["int64"] * self._tokens // self.workload.micro_batch_size * self.ranks
            gathered = self._calls(phase, "all_gather", "int64", POSITIONS, size, 1, passes)
            return [*gathered, *self._exchanged(phase, passes)]
        return self._around(phase, passes)

    def backward(self, passes: int) -> list[Collective]:
        """Keys and values come round once more; their gradients, in fp32, come round and go home
        (`_templated_ring_attention_backward`). An exchange is its own backward pass."""
        if self.workload.strategy.sequence == "exchange":
            return self._exchanged("backward", passes)
        size = self._keys_and_values * DTYPE_BYTES["float32"]
        home = self._calls(
            "backward", "permute", "float32", GRADIENTS_OF_KEYS, size * self.ranks, self.ranks, passes
        )
        return [*self._around("backward", passes), *home]

    @property
    def _tokens(self) -> int:
        """Of a micro-batch, on one rank."""
        assert self.workload.part_length is not None
        return self.workload.micro_batch_size * self.workload.part_length

    @property
    def _keys_and_values(self) -> int:
        """Elements of one rank's tokens: heads of keys are not repeated for the queries that share them."""
        return 2 * self._tokens * self.attention.key_value_heads * self.attention.head_size

    def _around(self, phase: str, passes: int) -> list[Collective]:
        """`_templated_ring_attention`: gathered in one call, or passed on until all ranks had them."""
        dtype = self.workload.compute_dtype
        size = self._keys_and_values * DTYPE_BYTES[dtype]
        if self.workload.options.get("rotation") == "all-to-all":
            further = self.ranks - 1
            return self._calls(phase, "permute", dtype, ROTATED, size * further, further, passes)
        return self._calls(phase, "all_gather", dtype, KEYS, size * self.ranks, 1, passes)

    def _exchanged(self, phase: str, passes: int) -> list[Collective]:
        """Four calls: queries, keys, values, results. Fewer heads of keys than ranks are repeated first."""
        dtype, heads = self.workload.compute_dtype, self.attention.heads
        keys = max(self.attention.key_value_heads, self.ranks)
        elements = 2 * (heads + keys) * self._tokens * self.attention.head_size
        return self._calls(phase, "all_to_all", dtype, EXCHANGED, elements * DTYPE_BYTES[dtype], 4, passes)

    def _calls(
        self, phase: str, op: str, dtype: str, term: str, size: int, calls: int, passes: int
    ) -> list[Collective]:
        """`size` bytes in `calls` calls, in each block of each pass."""
        times = self.attention.layers * passes
        if not times:
            return []
        return [
            Collective(
                phase=phase, op=op, dtype=dtype, term=term, payload_bytes=size * times, calls=calls * times,
                role=self.role,
            )
        ]  # fmt: skip
