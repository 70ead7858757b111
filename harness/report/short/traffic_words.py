"""Communication in a sentence: which cells send least, and whether every byte is as expected."""

from __future__ import annotations

from harness.forms.network import EMULATED
from harness.judge.metrics import EXPECTED_SENT, SENT, TRANSPORT_SENT
from harness.judge.repeats import Repeats
from harness.judge.wording import listed, ranks
from harness.report.formats import megabytes
from harness.report.short.stage import Stage, sent_once
from harness.report.short.words import levels, names, ratio, sentence


def traffic_sentence(stage: Stage) -> str:
    """Empty where one rank has nobody to send to."""
    if stage.size == 1:
        return ""
    found = levels(stage.figures(sent_once), megabytes)
    if not found:
        return "Communication was not counted."
    (least, value), (most, largest) = found[0], found[-1]
    if len(found) == 1:
        text = f"every cell sends {megabytes(value)} MB per rank and step on {ranks(stage.size)}"
    else:
        verb = "sends" if len(least) == 1 else "send"
        text = (
            f"least traffic on {ranks(stage.size)}: {names(least)} {verb} {megabytes(value)} MB per rank and "
            f"step (ring algorithm); most: {names(most)}, {megabytes(largest)} MB"
            f"{f' ({ratio(largest, value)})' if value else ''}"
        )
    return sentence(text, *_expected(stage), *_emulated(stage))


def _expected(stage: Stage) -> list[str]:
    differences = {group.label: _bytes_off(group) for group in stage.groups}
    off = [f"{label} ({most:+,.0f} bytes)" for label, most in differences.items() if most and abs(most) >= 1]
    without = [label for label, most in differences.items() if most is None]
    unknown = [f"no closed form for {names(without)}"] if without else []
    if off:
        return [f"not what the closed form expects: {names(off)}", *unknown]
    return [*(["as expected to the byte"] if len(without) < len(differences) else []), *unknown]


def _bytes_off(group: Repeats) -> float | None:
    """Sent minus expected per step, of the repeat furthest off; None where no repeat has both."""
    pairs = [(row.figures[SENT], row.figures[EXPECTED_SENT]) for row in group.rows]
    found = [sent - expected for sent, expected in pairs if sent is not None and expected is not None]
    return max(found, key=abs, default=None)


def _emulated(stage: Stage) -> list[str]:
    """What a transport sends that implements a collective as another one; empty where none does."""
    pairs = [(g.median(SENT), g.median(TRANSPORT_SENT), g) for g in stage.groups]
    more = [(real, g) for ring, real, g in pairs if ring is not None and real is not None and real != ring]
    if not more:
        return []
    most, group = max(more, key=lambda pair: pair[0])
    transport = group.record.world.collectives
    instead = listed([f"{op} as {other}" for op, other in EMULATED[transport].items()]).replace("_", "-")
    return [f"{transport} implements {instead} and sends up to {megabytes(most)} MB"]
