"""Tables and thresholds of the sweeps, in the words of the page."""

from __future__ import annotations

from docs.hooks import sweeps
from docs.hooks.sweeps import COPIES, FABRICS, PIPELINED, STAGES, fits, gigabytes, rate, total
from docs.hooks.tables import table
from harness.forms.pipeline import bubble_share
from harness.plan.hardware import load_hardware
from harness.plan.prediction import Prediction


def length_table() -> str:
    """What fits and how fast it is, by the length of a sample."""
    found = sweeps.by_length()
    lines = []
    for n, plain in found.plain.items():
        divided = [cell for by_length in found.divided.values() for cell in _cells(by_length[n])]
        lines.append([f"{n:,}", *_cells(plain, found.least[n]), *divided])
    head = ["tokens", "data parallel", "GB", "tokens/s"]
    for backend in found.divided:
        head += [f"`{backend}`", "GB", "tokens/s"]
    return table(head, lines, words=2)


def _cells(row: Prediction | None, least: Prediction | None = None) -> list[str]:
    if row is not None:
        return [_how(row), f"{gigabytes(row):,.0f}", f"{rate(row):,.0f}"]
    return ["nothing fits", f"({gigabytes(least):,.0f})" if least else "", ""]


def _how(row: Prediction) -> str:
    """The label; of ranks that share samples, how many do."""
    _, _, options = row.label.partition(":")
    shares = any(options.startswith(name) for name in ("tensor=", "sequence="))
    return f"`{options}`" if shares else f"`{row.label}`"


def plain_of_batches() -> str:
    """The data-parallel strategies that are fastest, by samples in a step."""
    labels = (row.label for row in sweeps.by_batch().plain.values() if row is not None)
    return "`, `".join(dict.fromkeys(labels))


def batch_table() -> str:
    """Thousands of tokens/s of all GPUs, by samples in a step; bold: it pays."""
    found = sweeps.by_batch()
    lines = []
    for samples, plain in found.plain.items():
        cells = [f"{total(plain) / 1e3:,.0f}"]
        degrees = dict.fromkeys(_degree(rows[samples]) for rows in found.divided.values())
        for backend, rows in found.divided.items():
            text = f"{total(rows[samples]) / 1e3:,.0f}"
            cells.append(f"**{text}**" if samples in found.pays(backend) else text)
        lines.append([str(samples), *cells, ", ".join(degrees)])
    heads = ["samples", "data parallel", *(f"`{b}`" for b in found.divided), "`tensor`, `sequence`"]
    return table(heads, lines, words=0)


def _degree(row: Prediction | None) -> str:
    return "" if row is None else row.label.partition("=")[2]


def gpus_table() -> str:
    """GB and tokens/s for each GPU of the large model, by GPUs; bold: it pays."""
    found = sweeps.by_gpus()
    lines = []
    for gpus, plain in found.plain.items():
        for backend, row in (("", plain), *((b, rows[gpus]) for b, rows in found.divided.items())):
            if row is not None:
                speed = f"{rate(row):,.0f}"
                speed = f"**{speed}**" if backend and gpus in found.pays(backend) else speed
                lines.append([str(gpus), f"`{row.label}`", f"{gigabytes(row):,.0f}", speed])
    return table(["GPUs", "strategy", "GB", "tokens/s"], lines, words=2)


def pipeline_table() -> str:
    """Tokens/s for each GPU, data-parallel and in stages, by samples in a step and network; bold: it pays."""
    found = sweeps.pipelines()
    lines = []
    for samples in PIPELINED:
        parts = sweeps.parts_of(samples)
        shares = [bubble_share(ranks=STAGES, micro_batches=parts, stages_per_rank=n) for n in (1, 2)]
        plain = [f"{rate(found.plain[fabric, samples]):,.0f}" for fabric in FABRICS]
        staged = []
        for fabric in FABRICS:
            row = found.staged[fabric, samples]
            text = f"{rate(row):,.0f}" if row is not None else "does not fit"
            staged.append(f"**{text}**" if samples in found.pays(fabric) else text)
        lines.append([f"{samples:,}", "data parallel", "", "", "", *plain])
        lines.append(["", f"`pp:stages={STAGES}`", str(parts), *(f"{s:.0%}" for s in shares), *staged])
    head = ["samples", "strategy", "micro-batches", "bubble", "interleaved", *FABRICS]
    return table(head, lines, words=2)


def copies_table() -> str:
    """GB and tokens/s for each GPU by network; bold: it pays."""
    found = sweeps.copies()
    lines = []
    for label, other in COPIES.items():
        pays = sweeps.copies_pay(label) if other else []
        row = found[FABRICS[0], label]
        speeds = [f"{rate(found[fabric, label]):,.0f}" for fabric in FABRICS]
        cells = [
            f"**{text}**" if fabric in pays else text for fabric, text in zip(FABRICS, speeds, strict=True)
        ]
        lines.append(
            [f"`{label}`", f"{gigabytes(row):,.0f}", *(cells if fits(row) else ["does not fit"] * len(cells))]
        )
    return table(["strategy", "GB", *FABRICS], lines, words=1)


def from_length(backend: str) -> str:
    """'from 65,536 tokens a sample'."""
    found = sweeps.by_length()
    pays = found.pays(backend)
    tokens = list(found.plain)
    return (
        f"from {pays[0]:,} tokens a sample" if pays else f"never from {tokens[0]:,} to {tokens[-1]:,} tokens"
    )


def to_batch(backend: str) -> str:
    """'with 32 samples in a step or fewer'."""
    found = sweeps.by_batch()
    pays, tried = found.pays(backend), list(found.plain)
    if not pays:
        return f"never with {tried[0]} to {tried[-1]} samples in a step"
    return f"with {pays[-1]} samples in a step or fewer"


def to_samples() -> str:
    """'on Ethernet-10 with 128 samples in a step or fewer'."""
    found = sweeps.pipelines()
    by_fabric = {fabric: pays for fabric in FABRICS if (pays := found.pays(fabric))}
    if not by_fabric:
        return (
            f"never on {FABRICS[0]} to {FABRICS[-1]} with {PIPELINED[0]} to {PIPELINED[-1]} samples in a step"
        )
    return ", ".join(f"on {f} with {pays[-1]} samples in a step or fewer" for f, pays in by_fabric.items())


def from_fabric(label: str) -> str:
    """'from Ethernet-25 downwards'."""
    pays = sweeps.copies_pay(label)
    if not pays:
        return f"never on {FABRICS[0]} to {FABRICS[-1]}"
    gigabits = load_hardware().fabric(pays[0]).bandwidth_per_gpu * 8 / 1e9
    return f"on {pays[0]} ({gigabits:.0f} Gbit/s for each GPU) and slower"


def on_gpus(backend: str) -> str:
    """'on 16 GPUs'."""
    found = sweeps.by_gpus()
    pays, tried = found.pays(backend), list(found.plain)
    listed = " and ".join(map(str, pays))
    return f"on {listed} GPUs" if pays else f"on no number from {tried[0]} to {tried[-1]}"
