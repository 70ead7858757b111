"""Writes docs/communication.md and its list: measured and expected payload of every backend that runs here.

Usage: python -m benchmarks.communication_table RUNS     (reuses records that exist in RUNS)
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tabulate import tabulate

from benchmarks.packed_page import DOCS, END, between
from harness.backends import registry
from harness.forms.terms import STEP_PHASES
from harness.judge.quantities import (
    expected_payload,
    expected_sent_bytes_per_step,
    measured_payload,
    sent_bytes_per_step,
    textbook_bytes_per_step,
    textbook_differences,
    volume_differences,
    volume_of,
)
from harness.judge.rows import reason
from harness.record import Record
from harness.record.store import read_runs
from harness.tell.sections.job import commit_words

DOCUMENT = DOCS / "communication.md"
LIST = DOCS / "communication" / "payload.csv"
MEASURED = ("measured", "expected")
LEFT_OUT = "the textbook leaves it out"
BEGIN = "<!-- runs: python -m benchmarks.communication_table -->"
GEOMETRIES = {
    "Llama, untied": (
        "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
        "num_key_value_heads: 2, vocab_size: 257, max_position_embeddings: 64, tie_word_embeddings: false}"
    ),
    "GPT-2, tied": "{model_type: gpt2, n_embd: 33, n_layer: 2, n_head: 3, vocab_size: 257, n_positions: 64}",
}
RECOMPUTATION = (
    "Activation checkpointing is not among them. `tests/traps/test_clean.py` compares it to the byte on 2 "
    "ranks with a Llama and GPT-2. Only ZeRO-3 communicates more with it: it gathers each block once more, "
    "except the module in which recomputation stops."
)
PRECISIONS = ("fp32", "bf16-mixed")
ACCUMULATION = (1, 4)
WORLD_SIZES = (2, 4)
WITH_OPTIONS = (
    "zero1:offload=optimizer", "zero2:offload=optimizer", "zero3:offload=optimizer", "zero3:offload=cpu",
    "fsdp:offload=cpu",
)  # fmt: skip
BACKENDS = ",".join([*(name for name in registry.entries() if name != registry.REFERENCE), *WITH_OPTIONS])
COMMON = (
    "training.steps=4", "training.micro_batch_size=1", "measure.warmup_steps=2", "measure.probed_steps=2",
    "data.sequence_length=16", "data.limit=200", "runtime.threads_per_rank=1",
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One table of the matrix and one column of it."""

    geometry: str
    world_size: int
    precision: str
    accumulation_steps: int
    preset: str = "like-for-like"

    def settings(self) -> list[str]:
        return [
            *COMMON,
            f"model.config={GEOMETRIES[self.geometry]}",
            f"training.precision={self.precision}",
            f"training.accumulation_steps={self.accumulation_steps}",
            f"runtime.preset={self.preset}",
        ]

    def command(self, runs: str) -> list[str]:
        sets = [part for setting in self.settings() for part in ("--set", setting)]
        return ["compare", "--backends", BACKENDS, "--nproc", str(self.world_size), "--runs", runs, *sets]


CUTS = [
    *(Cut(*values) for values in product(GEOMETRIES, WORLD_SIZES, PRECISIONS, ACCUMULATION)),
    *(Cut(geometry, 2, "bf16-mixed", 4, "library-defaults") for geometry in GEOMETRIES),
]


def main(runs: Path) -> None:
    records: dict[Cut, dict[str, Record]] = {}
    for number, cut in enumerate(CUTS, start=1):
        print(f"[{number}/{len(CUTS)}] {cut}", file=sys.stderr)
        folder = runs / f"{number:02d}"
        subprocess.run([sys.executable, "-m", "harness", *cut.command(str(folder))], check=True)
        found, _ = read_runs([folder])
        records[cut] = {r.backend.label: r for _, r in found if r.backend.name != "single"}
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(between(page, BEGIN, END, "\n\n".join(document(records))), encoding="utf-8")
    LIST.write_text(listed(records), encoding="utf-8")


def document(records: dict[Cut, dict[str, Record]]) -> list[str]:
    everything = [(cut, record) for cut, of_cut in records.items() for record in of_cut.values()]
    ran = [(cut, record) for cut, record in everything if record.status == "ok"]
    differing = [(cut, record) for cut, record in ran if volume_differences(record) != []]
    first = records[CUTS[0]]
    parts = [
        f"{len(ran) - len(differing)} of {len(ran)} runs send the bytes of their closed form, on every rank, "
        "in every phase of a step (forward, backward, step), collective, dtype and group "
        "([list of all](communication/payload.csv)). `harness/rank/probes/communication.py` counts, "
        "`harness/forms` derives from the job alone.",
        f"{CUTS[0].geometry}, {CUTS[0].world_size} ranks, {CUTS[0].precision}, no accumulation: traffic "
        "per rank and step in bytes (ring algorithm), and what the textbook counts otherwise.",
        _beside_textbook(first.values()),
        *_reasons(first.values()),
    ]  # fmt: skip
    if differing:
        parts += ["### Runs that differ", _differences(differing)]
    parts += [
        "### What was run",
        f"CPU ranks over gloo, {_origin(ran)}.",
        "Models: " + "; ".join(f"{name}: `{config}`" for name, config in GEOMETRIES.items()) + ". The odd "
        "width of the second requires every kind of padding. On 2 and 4 ranks, fp32 and bf16-mixed, with 1 "
        "and 4 micro-steps, like for like; with the libraries' defaults bf16-mixed, 4 micro-steps, on 2 "
        "ranks. Four steps, two of them probed; micro-batches of one sample of 16 tokens.",
        RECOMPUTATION, "Not run:", _failures(everything),
    ]  # fmt: skip
    return parts


def listed(records: dict[Cut, dict[str, Record]]) -> str:
    """A line of CSV for every run that ended well: payload in bytes per step."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(("model", "ranks", "preset", "precision", "accumulation", "backend", *MEASURED))
    for cut, of_cut in records.items():
        where = (cut.geometry, cut.world_size, cut.preset, cut.precision, cut.accumulation_steps)
        ran = {label: record for label, record in of_cut.items() if record.status == "ok"}
        lines.writerows((*where, label, *_payload(record)) for label, record in ran.items())
    return written.getvalue()


def _origin(ran: list[tuple[Cut, Record]]) -> str:
    """Dates and versions of the runs, and in a comment their code; several if earlier runs were reused."""
    days = sorted({record.created_at[:10] for _, record in ran})
    environments = [record.environment for _, record in ran]
    versions = {f"Python {e.python}" for e in environments}
    versions |= {f"{name} {version}" for e in environments for name, version in e.packages.items()}
    code = sorted({f"code {e.code}{commit_words(e)}" for e in environments})
    return f"{', '.join(days)}; {', '.join(sorted(versions, key=str.lower))}<!-- {'; '.join(code)} -->"


def _payload(record: Record) -> tuple[int, int]:
    """Measured and expected bytes of a step of a run that ended well."""
    pair = volume_of(record)
    assert pair is not None
    assert record.windows is not None
    measured, expected = measured_payload(record, pair[0])[0], expected_payload(pair[1])
    return _step_bytes(measured) // record.windows.probed, _step_bytes(expected) // record.windows.probed


def _step_bytes(payload: dict[tuple[str, str, str, str], int]) -> int:
    return sum(size for key, size in payload.items() if key[0] in STEP_PHASES)


def _differences(differing: list[tuple[Cut, Record]]) -> str:
    lines = [
        f"- {record.backend.label}, {cut}: {difference}"
        for cut, record in differing
        for difference in volume_differences(record) or ["no closed form"]
    ]
    return "\n".join(lines)


def _failures(everything: list[tuple[Cut, Record]]) -> str:
    causes: dict[tuple[str, str], list[str]] = {}
    for cut, record in everything:
        if record.status != "ok":
            where = f"{cut.geometry}, {cut.world_size} ranks, {cut.precision}, {cut.accumulation_steps}"
            key = (record.backend.label, f"{record.status}: {reason(record)}")
            causes.setdefault(key, []).append(where)
    lines = [f"- `{label}` ({len(where)} cells) {why}" for (label, why), where in causes.items()]
    return "\n".join(lines) or "None."


def _beside_textbook(records: Iterable[Record]) -> str:
    """One line for all backends whose figures and terms are equal."""
    labels: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if record.status == "ok":
            terms = [f"{d.term} {d.difference:+,.0f}" for d in textbook_differences(record) or ()]
            kinds = (sent_bytes_per_step, expected_sent_bytes_per_step, textbook_bytes_per_step)
            figures = (*(_bytes(of(record)) for of in kinds), "; ".join(terms) or "-")
            labels.setdefault(figures, []).append(f"`{record.backend.label}`")
    lines = [[", ".join(equal), *figures] for figures, equal in labels.items()]
    headers = ("backend", *MEASURED, "textbook", "expected minus textbook")
    return tabulate(lines, headers, tablefmt="pipe", disable_numparse=True)


def _reasons(records: Iterable[Record]) -> list[str]:
    """Why a term is another than the textbook's; norms, padding and buffers are left out there."""
    known = dict.fromkeys(
        (d.term, d.remark)
        for record in records if record.status == "ok"
        for d in textbook_differences(record) or () if d.remark not in ("", LEFT_OUT)
    )  # fmt: skip
    return ["\n".join(f"- {term}: {remark}" for term, remark in known)] if known else []


def _bytes(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
