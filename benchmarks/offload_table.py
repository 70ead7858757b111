"""What each kind of offload keeps where, and what a step moves: docs/memory.md, from runs on 2 ranks.

Usage: python -m benchmarks.offload_table RUNS     (runs every strategy, packs the records, writes the page)
       python -m benchmarks.offload_table          (writes the page again from the packed records)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.packed_page import DOCS, packed, run, table, with_tables, write
from harness.forms.network import host_link_bytes
from harness.forms.terms import STATE_KINDS
from harness.judge.quantities import expected_states
from harness.judge.rows import reason
from harness.record import Record
from harness.record.workload import of_record

NAME, MODULE = "offload", "benchmarks.offload_table"
PAGE = DOCS / "memory.md"
REFERENCE = "single"
WAYS = (
    REFERENCE, "zero1:offload=optimizer", "zero2", "zero2:offload=optimizer",
    "zero2:adam=deepspeed,offload=optimizer", "zero3", "zero3:offload=optimizer", "zero3:offload=cpu",
    "zero3:adam=deepspeed,offload=cpu", "fsdp", "fsdp:offload=cpu", "fsdp1:offload=cpu",
)  # fmt: skip
RANKS = 2
SETTINGS = (
    "training.steps=8", "training.micro_batch_size=1", "training.accumulation_steps=1",
    "training.precision=bf16-mixed", "measure.warmup_steps=2", "measure.probed_steps=1",
    "data.sequence_length=64", "data.limit=400", "runtime.threads_per_rank=1",
    "model.config={hidden_size: 768, intermediate_size: 2048, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, vocab_size: 2048, max_position_embeddings: 64, tie_word_embeddings: false}",
)  # fmt: skip


def records() -> dict[str, Record]:
    """By label, in the order of `WAYS`."""
    return packed(NAME, WAYS)


def on_host(record: Record, *, host: bool) -> int:
    """Bytes of model states of rank 0 that lie in host memory, or not; by the closed form."""
    states = expected_states(record, 0)
    assert states is not None
    return sum(states.kinds(host=host).get(kind, 0) for kind in STATE_KINDS)


def buffers_on_host(record: Record) -> int:
    """Bytes of buffers through which states of rank 0 pass; by the closed form."""
    states = expected_states(record, 0)
    assert states is not None
    return states.kinds(host=True).get("communication", 0)


def over_the_link(record: Record) -> float:
    """Bytes that rank 0 would move between a GPU and its host in a step; by the closed form."""
    workload, states = of_record(record, 0), expected_states(record, 0)
    assert workload is not None
    assert states is not None
    return host_link_bytes(workload, states)


def largest_difference(record: Record, reference: Record) -> float:
    """Of a step's loss, in nats."""
    pairs = zip(record.steps, reference.steps, strict=True)
    return max(abs((ours.loss or 0.0) - (theirs.loss or 0.0)) for ours, theirs in pairs)


def page_with_table(page: str, ran: Mapping[str, Record]) -> str:
    """The page with its table between its marks."""
    body = [_row(label, record, ran[REFERENCE]) for label, record in ran.items() if record.status == "ok"]
    others = [f"`{label}`: {reason(record)}." for label, record in ran.items() if record.status != "ok"]
    headers = [
        "backend", "optimizer", "states on the device", "states in host memory", "buffers in host memory",
        "over the host link per step", "largest difference of a loss",
    ]  # fmt: skip
    return with_tables(page, MODULE, (table(body, headers), "Unsupported on the CPU: " + " ".join(others)))


def _row(label: str, record: Record, reference: Record) -> list[str]:
    effective = record.backend.effective
    assert effective is not None
    return [
        f"`{label}`",
        effective.optimizer.rpartition(".")[2],
        f"{on_host(record, host=False):,}",
        f"{on_host(record, host=True):,}",
        f"{buffers_on_host(record):,}",
        f"{over_the_link(record):,.0f}",
        f"{largest_difference(record, reference):.1e} nats",
    ]


def _run(folder: Path) -> None:
    run(folder, NAME, WAYS, RANKS, SETTINGS)


def main() -> None:
    """Run if a folder is given, then write the page."""
    write(PAGE, _run, lambda page: page_with_table(page, records()))


if __name__ == "__main__":
    main()
