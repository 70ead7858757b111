"""Communication in a sentence: which cells send least, and whether every byte is as expected."""

from __future__ import annotations

from harness.compare.metrics import EXPECTED_SENT, SENT
from harness.compare.wording import ranks
from harness.report.formats import megabytes
from harness.report.short.stage import Stage
from harness.report.short.words import levels, names, ratio, sentence


def traffic_sentence(stage: Stage) -> str:
    """Empty where nothing was counted, or one rank has nobody to send to."""
    found = levels(stage.figures(lambda group: group.median(SENT)), megabytes)
    if not found or stage.size == 1:
        return ""
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
    return sentence(text, *_expected(stage))


def _expected(stage: Stage) -> list[str]:
    off, known = [], []
    for group in stage.groups:
        for row in group.rows:
            sent, expected = row.figures[SENT], row.figures[EXPECTED_SENT]
            if sent is None or expected is None:
                continue
            known.append(group.label)
            if abs(sent - expected) >= 1:
                off.append(group.label)
    if off:
        return [f"not what the closed form expects in {names(list(dict.fromkeys(off)))}"]
    without = [group.label for group in stage.groups if group.label not in known]
    if not known:
        return []
    return [f"as expected to the byte{f', no closed form for {names(without)}' if without else ''}"]
