"""Loss curves, and their differences to the reference, as SVG: equal records give equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.compare.rows import Row
from harness.record import Record
from harness.report.formats import ranks

# Okabe and Ito: told apart by colour-blind readers; black last, for the reference.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A6D00")
LINE_STYLES = ("-", "--", "-.", ":")
GREY = "#808080"


def loss_curves(rows: Sequence[Row], path: Path) -> Path | None:
    """Draw loss over steps, and below it the difference to the reference; None without any loss."""
    drawn = [row for row in rows if any(step.loss is not None for step in row.record.steps)]
    if not drawn:
        return None
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    settings = {
        "svg.hashsalt": "sharding-harness", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9,
        "text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
        "axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with mpl.rc_context(settings):  # type: ignore[arg-type]
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        reference = _references(drawn)
        several_jobs = len({row.record.job_id for row in drawn}) > 1
        lines = []
        for index, row in enumerate(drawn):
            style = {
                "color": COLOURS[index % len(COLOURS)],
                "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
                # Curves that agree lie on each other: the earlier ones are wider and stay visible.
                "linewidth": 4.0 - 3.0 * index / max(1, len(drawn) - 1),
            }
            record = row.record
            label = f"{record.backend.label}, {ranks(record.world.world_size)}"
            if several_jobs:
                label += f", job {record.job_id[:6]}"
            steps = [(s.step, s.loss) for s in record.steps if s.loss is not None]
            lines += above.plot(*zip(*steps, strict=True), label=label, **style)
            beside = reference.get(record.job_id)
            if beside is None or beside.run_id == record.run_id:
                continue
            differences = [
                (a.step, a.loss - b.loss)
                for a, b in zip(record.steps, beside.steps, strict=False)
                if a.loss is not None and b.loss is not None
            ]
            if differences:
                below.plot(*zip(*differences, strict=True), **style)
        above.set_ylabel("loss (nats per token)")
        below.set_ylabel("loss minus reference\n(nats per token)")
        below.set_xlabel("optimizer step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.axhline(0, color=GREY, linewidth=0.6)
        below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        for axis in (above, below):
            axis.grid(color=GREY, alpha=0.25, linewidth=0.5)
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
        pyplot.close(figure)
    return path


def _references(rows: Sequence[Row]) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for row in rows:
        if row.record.backend.name == "single":
            found.setdefault(row.record.job_id, row.record)
    return found
