"""The markdown report of a set of records. The same records give the same bytes."""

from __future__ import annotations

import html
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tabulate import tabulate

from harness.compare.findings.catalogue import find_all
from harness.compare.parity import BAND_LOW_PRECISION, TIGHT_WITH_CLIPPING, TIGHT_WITHOUT_CLIPPING
from harness.compare.rows import Row, make_rows, reason
from harness.record import Record
from harness.report.formats import markdown_text, megabytes, number, ranks
from harness.report.plots import loss_curves
from harness.report.tables import grouped, main_table

CommunicationKey = tuple[str, str, str, int]


def write_report(runs: Sequence[tuple[Path, Record]], output: Path) -> Path:
    """Write the report and its picture beside it; return the report's path."""
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = make_rows(record for _, record in runs)
    picture = loss_curves(rows, output.with_suffix(".loss.svg"))
    parts = [
        "# Comparison of data-parallel sharding strategies",
        _jobs(rows),
        _machine(rows),
        _results(rows),
        _findings(rows),
        _curves(picture),
        _evaluations(rows),
        _memory(rows),
        _communication(rows),
        _failures(rows),
        _reading(),
        _reproduce(rows),
        _configurations(rows),
        _records(runs, output),
    ]
    output.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return output


def _jobs(rows: Sequence[Row]) -> str:
    ids = list(dict.fromkeys(row.record.job_id for row in rows))
    parts = ["## The job"]
    if len(ids) > 1:
        parts.append(
            f"These records hold {len(ids)} jobs. A run is compared only with the reference of its own job."
        )
    for job_id in ids:
        record = next(row.record for row in rows if row.record.job_id == job_id)
        weights = next(
            (
                r.record.initial_weights
                for r in rows
                if r.record.job_id == job_id and r.record.initial_weights
            ),
            None,
        )
        size = f", {weights.parameter_count:,} parameters" if weights else ""
        built = next((r.record.model for r in rows if r.record.job_id == job_id and r.record.model), None)
        if built:
            size = f", {built['architecture']}, attention {built['attention']}{size}"
        training = record.job["training"]
        parts.append(
            f"Job `{job_id}`{size}: global batch {training['global_batch_size']} samples of "
            f"{record.job['data']['sequence_length']} tokens, precision {training['precision']}, "
            f"gradient clipping {training['gradient_clipping'] or 'none'}."
        )
        parts.append(_folded("Job, every setting", "yaml", _yaml(record.job)))
    return "\n\n".join(parts)


def _machine(rows: Sequence[Row]) -> str:
    """Each distinct machine once; the versions of all records of it."""
    parts = ["## Machine and versions"]
    seen: list[dict[str, Any]] = []
    for row in rows:
        e = row.record.environment
        facts = {
            "CPU": f"{e['cpu']}, {e['cores']} cores, {e['memory_bytes'] / 2**30:.1f} GiB",
            "accelerators": "; ".join(e["gpus"]) or "none",
            "system": f"{e['platform']}, Python {e['python']}",
            "packages": ", ".join(f"{name} {v}" for name, v in sorted(e["packages"].items())),
            "harness code": e["code"] + _commit(e),
            "device": f"{row.record.world.device}, collectives over {row.record.world.collectives}",
            "preset": row.record.world.preset,
        }
        if facts not in seen:
            seen.append(facts)
    for facts in seen:
        parts.append("\n".join(f"- {name}: {markdown_text(value)}" for name, value in facts.items()))
    return "\n\n".join(parts)


def _commit(environment: dict[str, Any]) -> str:
    git = environment.get("git")
    if not git:
        return ""
    return f", commit {git['commit'][:12]}" + (" with local changes" if git["modified"] else "")


def _results(rows: Sequence[Row]) -> str:
    return "## Results\n\n" + main_table(rows, "github")


def _findings(rows: Sequence[Row]) -> str:
    found = find_all(rows)
    if not found:
        return "## Findings\n\nNone: every judged run is the same job as its reference and agrees with it."
    lines = [
        f"- **{f.id}**: {markdown_text(f.message)} ({markdown_text(json.dumps(f.values))})" for f in found
    ]
    return "## Findings\n\n" + "\n".join(lines)


def _curves(picture: Path | None) -> str:
    if picture is None:
        return ""
    return (
        "## Loss\n\nAbove: the loss of every run. Below: each run minus the reference of its job.\n\n"
        f"![Loss over steps and difference to the reference]({picture.name})"
    )


def _evaluations(rows: Sequence[Row]) -> str:
    """Held-out loss of each run; nothing where no job evaluates."""
    steps = sorted({part.step for row in rows for part in row.record.eval})
    if not steps:
        return ""
    body = []
    for row in rows:
        losses = {part.step: part.loss for part in row.record.eval}
        if losses:
            label = [row.record.backend.label, str(row.record.world.world_size)]
            body.append(label + [number(losses.get(step)) for step in steps])
    headers = ("backend", "ranks", *(f"after step {step}" for step in steps))
    return "## Loss on held-out samples (nats per token)\n\n" + _table(headers, body)


def _memory(rows: Sequence[Row]) -> str:
    """Live bytes by kind after the backward pass, the rank that holds most."""
    kinds = ("weights", "gathered", "gradients", "masters", "optimizer", "communication", "buffers")
    body = []
    for group in grouped(rows):
        record = group[0].record
        moments = [
            m.kinds for rank in record.ranks for m in rank.memory if m.moment == "after_backward" and m.kinds
        ]
        if moments:
            largest = max(moments, key=lambda held: sum(held.values()))
            body.append(
                [record.backend.label, str(record.world.world_size)]
                + [megabytes(largest.get(kind, 0)) for kind in kinds]
            )
    if not body:
        return ""
    table = _table(("backend", "ranks", *(f"{kind} MB" for kind in kinds)), body)
    return (
        "## Memory after the backward pass, by kind\n\nLive tensors of the rank that holds most. "
        "Activations are gone by then; the peak in the table above includes them.\n\n" + table
    )


def _communication(rows: Sequence[Row]) -> str:
    body = []
    for group in grouped(rows):
        record = group[0].record
        counted = record.windows.counted if record.windows else 0
        totals: dict[CommunicationKey, list[int]] = {}
        for row in record.comm:
            if row.rank == 0:
                key = (row.phase, row.op, row.dtype, row.group_size)
                total = totals.setdefault(key, [0, 0])
                total[0] += row.calls
                total[1] += row.payload_bytes
        for (phase, op, dtype, size), (calls, payload) in sorted(totals.items()):
            body.append(
                [record.backend.label, str(record.world.world_size), phase, op, dtype, str(size),
                 f"{calls / counted:g}", megabytes(payload / counted)]
            )  # fmt: skip
    if not body:
        return ""
    headers = (
        "backend",
        "ranks",
        "phase",
        "collective",
        "dtype",
        "group",
        "calls/step",
        "payload MB/step",
    )
    return "## Communication of rank 0 per step\n\n" + _table(headers, body)


def _failures(rows: Sequence[Row]) -> str:
    lines = [
        f"- {markdown_text(row.record.backend.label)} on {ranks(row.record.world.world_size)}: "
        f"{row.record.status}: {markdown_text(why)}"
        for row in rows
        if (why := reason(row.record)) is not None
    ]
    if not lines:
        return ""
    return "## Cells without a whole result\n\n" + "\n".join(lines)


def _reading() -> str:
    return "\n".join(
        [
            "## How to read the numbers",
            "",
            "- MB is 1e6 bytes; n/a means not measured.",
            "- samples/s and tokens/s: what all ranks consumed in the timed steps, over the summed duration "
            "of those steps. A step lasts as long as on its slowest rank. Padding is no token.",
            "- peak MB/rank: the largest figure of torch's allocator in the counted steps, on the rank where "
            "it is largest; in brackets the difference to the smallest rank. CUDA: the caching allocator. "
            "CPU: a counting allocator in front of malloc.",
            "- states MB: live weights, gradients, fp32 masters and optimizer states after a backward pass, "
            "each storage once, on the rank where they are largest.",
            "- sent MB/step: bytes that a rank sends per optimizer step on a ring: passes x (n - 1) / n x "
            "payload of every collective, counted in torch's dispatcher; all-reduce has two passes, the "
            "others one. A transport that emulates a collective, as gloo does reduce-scatter, sends more.",
            "- textbook: the same from the closed form of the strategy. Where it differs, the library does "
            "something else than the paper. It is for one micro-step per step; "
            "accumulation adds what a library gathers or reduces in each.",
            "- loss diff and norm diff: the largest difference of a step to the reference, which is one "
            "process on the whole global batch: of the loss in nats per target token, of the norm relative.",
            f"- parity: exact, bit-equal losses, norms and final weights; tight, losses within "
            f"{TIGHT_WITHOUT_CLIPPING:g} ({TIGHT_WITH_CLIPPING:g} with clipping) and norms within 20 times "
            f"that; band, losses within {BAND_LOW_PRECISION:g} in low precision; diverged, beyond; unjudged, "
            "no comparison was possible.",
        ]
    )


def _reproduce(rows: Sequence[Row]) -> str:
    commands = list(dict.fromkeys(shlex.join(row.record.command) for row in rows))
    return "## How to reproduce\n\n" + _code_block("sh", "\n".join(commands))


def _configurations(rows: Sequence[Row]) -> str:
    parts = ["## Configuration of each backend"]
    for group in grouped(rows):
        record = group[0].record
        if record.backend.effective is None:
            continue
        title = f"{record.backend.label}, {ranks(record.world.world_size)}"
        document = {
            "effective": record.backend.effective,
            "native_config": record.backend.native_config,
            "versions": record.backend.versions,
        }
        parts.append(_folded(title, "yaml", _yaml(document)))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _records(runs: Sequence[tuple[Path, Record]], output: Path) -> str:
    import hashlib

    body = [
        [
            record.run_id,
            record.status,
            os.path.relpath(path, output.parent.resolve()),
            hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        ]
        for path, record in runs
    ]
    return "## Records\n\n" + _table(("run", "status", "record", "SHA-256 (first 16)"), body)


def _table(headers: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A markdown table; every cell is text, whatever it contains."""
    body = [[markdown_text(cell) for cell in line] for line in body]
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def _folded(title: str, language: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n\n{_code_block(language, text)}\n\n</details>"


def _code_block(language: str, text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
