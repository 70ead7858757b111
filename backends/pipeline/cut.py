"""Where a pipeline cuts a model: blocks in equal shares, what is before them first, what is after them last.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ACTIVATIONS = 1
GRADIENTS = 2
PHASES = {ACTIVATIONS: "forward", GRADIENTS: "backward"}
"""The pass that a message belongs to: a schedule runs both at a time, and sends both in one batch."""
PIPELINED_MODELS = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
"""Types of transformers' models that go on from `inputs_embeds` just as they go on from their own embedding,
and apply only their head to what the last block and the norm give."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model in consecutive stages. Stage i runs on rank i modulo `ranks` of its pipeline."""

    ranks: int
    """Ranks of one pipeline."""
    stages: int
    """Of the whole pipeline: a multiple of its ranks."""
    blocks: tuple[str, ...]
    """Names of the transformer blocks in the order in which they run."""

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank of a pipeline holds, in order."""
        return tuple(range(rank, self.stages, self.ranks))

    def blocks_of(self, stage: int) -> tuple[str, ...]:
        """Names of a stage's blocks; numbers of blocks differ by at most one."""
        count = len(self.blocks)
        return self.blocks[count * stage // self.stages : count * (stage + 1) // self.stages]

    def stage_by_name(self, names: Sequence[str]) -> dict[str, int]:
        """The stage of each parameter or buffer of a model, whose names are in the model's order."""
        of_block = {block: stage for stage in range(self.stages) for block in self.blocks_of(stage)}
        found: dict[str, int] = {}
        behind = False
        for name in names:
            block = block_of(name, of_block)
            behind = behind or block is not None
            outside = self.stages - 1 if behind else 0
            found[name] = outside if block is None else of_block[block]
        return found


def block_of(name: str, blocks: Mapping[str, int]) -> str | None:
    """The block that a parameter lies in; None: it lies outside of all."""
    parts = name.split(".")
    outer = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((module for module in outer if module in blocks), None)


def why_not_cut(*, blocks: int, ranks: int, stages: int) -> str | None:
    """Why a model of so many blocks cannot be cut into so many stages; None: it can."""
    if blocks < stages:
        return (
            f"{stages} stages need at least {stages} blocks, the model has {blocks}; "
            f"choose fewer stages{' or schedule=1f1b' if stages > ranks else ''}"
        )
    return None


def why_not_scheduled(schedule: str, *, micro_batches: int, ranks: int) -> str | None:
    """Why torch's schedule does not take so many micro-batches over so many ranks; None: it does.

    As torch 2.13, distributed/pipelining/schedules.py: 1F1B fills all stages before the first backward pass,
    interleaved stages pass in rounds of as many micro-batches each.
    """
    if schedule == "1f1b" and micro_batches < ranks:
        return (
            f"1F1B over {ranks} stages needs at least {ranks} micro-batches, not "
            f"micro_batches={micro_batches}; choose more, or schedule=gpipe"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule == "interleaved" and micro_batches % rounds:
        return (
            f"interleaved stages over {ranks} ranks take micro-batches in {rounds} equal rounds, which "
            f"micro_batches={micro_batches} does not divide into; choose a multiple of {ranks}"
        )
    return None


def not_whole(samples: int, micro_batches: int) -> str:
    """What is wrong with a micro-step whose samples the micro-batches do not divide."""
    return (
        f"{samples} samples per micro-step are not whole micro-batches of a pipeline "
        f"(micro_batches={micro_batches}); choose a divisor, or raise training.micro_batch_size"
    )
