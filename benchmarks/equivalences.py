"""Which ways to shard within groups of ranks are the same: writes docs/parallelism.md from runs on 4 ranks.

Usage: python -m benchmarks.equivalences RUNS     (runs every strategy, packs the records, writes the page)
       python -m benchmarks.equivalences          (writes the page again from the packed records)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from benchmarks.packed_page import DOCS, packed, run, table, with_tables, write
from harness.backends.libraries.facts import why_not_run
from harness.forms.terms import STATE_KINDS
from harness.record import Record

NAME = "equivalences"
PAGE = DOCS / "parallelism.md"
WAYS = {
    "zero3": "ZeRO-3 over all ranks",
    "zero3:hpz=2": "ZeRO-3 with a hierarchical partition (ZeRO++ hpZ)",
    "fsdp": "FSDP2 over all ranks",
    "fsdp:reshard=2": "FSDP2, `reshard_after_forward=2`",
    "fsdp1-hybrid:shard_size=2": "FSDP1 HYBRID_SHARD",
    "fsdp-hybrid:shard_size=2": "FSDP2 on a 2-D mesh (HYBRID_SHARD of FSDP2)",
}
RANKS = 4
SETTINGS = (
    "training.steps=3", "training.micro_batch_size=1", "training.accumulation_steps=1",
    "training.precision=fp32", "measure.warmup_steps=2", "measure.probed_steps=1", "data.sequence_length=16",
    "data.limit=200", "runtime.threads_per_rank=1",
    "model.config={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, vocab_size: 260, max_position_embeddings: 64, tie_word_embeddings: false}",
)  # fmt: skip
"""Every dimension divides by 4, so that no library pads."""
TRAFFIC = {
    ("forward", "all_gather"): "weights, forward",
    ("backward", "all_gather"): "weights, backward",
    ("backward", "reduce_scatter"): "gradients",
    ("backward", "all_reduce"): "gradients between replicas",
}
"""Collectives of weights and gradients; norms and handshakes are a few bytes and differ by library."""
MOMENTS = ("after_forward", "after_backward")

Traffic = dict[tuple[str, str], int]
"""Payload bytes of rank 0 by (cause, group of ranks)."""
States = dict[tuple[str, str], int]
"""Bytes of rank 0 by (moment, kind)."""


def traffic(record: Record) -> Traffic:
    """What weights and gradients move in the probed step; groups are named by their ranks."""
    found: Traffic = {}
    for row in record.comm:
        cause = TRAFFIC.get((row.phase, row.op))
        if row.rank == 0 and cause is not None:
            key = cause, ", ".join(map(str, sorted(row.group_ranks)))
            found[key] = found.get(key, 0) + row.payload_bytes
    return found


def held(record: Record) -> States:
    """Model states of rank 0 after the passes of the probed step, without the optimizer's step counters.

    fp32 `masters` are DeepSpeed's second copy of weights that are fp32 already; they are shown, not compared.
    """
    (part,) = (rank for rank in record.ranks if rank.rank == 0)
    return {
        (moment.moment, kind): moment.all_kinds().get(kind, 0)
        for moment in part.memory
        if moment.moment in MOMENTS
        for kind in STATE_KINDS
    }


def same_states(one: States, other: States) -> bool:
    """Weights after either pass, and gradients after the backward pass."""
    compared = (*((moment, "weights") for moment in MOMENTS), ("after_backward", "gradients"))
    return all(one[key] == other[key] for key in compared)


def records() -> dict[str, Record]:
    """By label, in the order of `WAYS`."""
    return packed(NAME, WAYS)


def page_with_tables(page: str, ran: Mapping[str, Record]) -> str:
    """The page with its tables between their marks."""
    tables = (_bytes_table(ran), _states_table(ran), _pairs_table(ran), f"{why_not_run('MiCS')}.")
    return with_tables(page, "benchmarks.equivalences", tables)


def _bytes_table(ran: Mapping[str, Record]) -> str:
    columns = list(dict.fromkeys(key for record in ran.values() for key in traffic(record)))
    columns.sort(key=lambda key: (list(TRAFFIC.values()).index(key[0]), len(key[1])))
    body = [
        [f"`{label}`", *(_size(traffic(record).get(key)) for key in columns)] for label, record in ran.items()
    ]
    headers = ["backend", *(f"{cause}, ranks {group}" for cause, group in columns)]
    return "Payload in bytes per step, rank 0:\n\n" + table(body, headers)


def _states_table(ran: Mapping[str, Record]) -> str:
    columns = [("after_forward", "weights"), *(("after_backward", kind) for kind in STATE_KINDS)]
    body = [
        [f"`{label}`", *(_size(held(record).get(key)) for key in columns)] for label, record in ran.items()
    ]
    headers = ["backend", *(f"{kind}, {moment.replace('_', ' ')}" for moment, kind in columns)]
    return "Model states in bytes, rank 0:\n\n" + table(body, headers)


def _pairs_table(ran: Mapping[str, Record]) -> str:
    body = []
    for one, other in combinations(ran, 2):
        sent, states = traffic(ran[one]) == traffic(ran[other]), same_states(held(ran[one]), held(ran[other]))
        if sent or states:
            body.append([f"`{one}`", f"`{other}`", _yes(sent), _yes(states)])
    headers = ["one", "other", "same bytes by group", "same weights and gradients held"]
    return "Pairs that share either; every other pair shares neither:\n\n" + table(body, headers)


def _size(count: int | None) -> str:
    return f"{count:,}" if count else "-"


def _yes(same: bool) -> str:
    return "yes" if same else "no"


def _run(folder: Path) -> None:
    run(folder, NAME, WAYS, RANKS, SETTINGS)


def main() -> None:
    """Run if a folder is given, then write the page."""
    write(PAGE, _run, lambda page: page_with_tables(page, records()))


if __name__ == "__main__":
    main()
