"""The page's arithmetic in Python, on the same exported coefficients."""

from __future__ import annotations

from typing import Any

from harness.plan.speed import OverlapRule, Stage, run_time

Row = dict[str, Any]


def evaluate(data: Row, label: str, size: int, b: int, s: int) -> Row:
    """What `evaluate` of page.js returns, in its names."""
    row = data["rows"][label][str(size)]
    if "unsupported" in row:
        return {"label": label, "unsupported": row["unsupported"]}
    found: Row = {"label": label, "sent": row["sent_bytes"], "between": row["between_bytes"]}
    if row["memory"]:
        found |= _memory(row, b, s)
    if row["speed"]:
        found |= _speed(data, row, size, b, s)
    return found


def _memory(row: Row, b: int, s: int) -> Row:
    values = (1, b, s, b * s, s * s, b * s * s)
    sizes = [
        (min(sum(c * v for c, v in zip(p, values, strict=True)) for p in candidate), moment)
        for moment, candidate in row["memory"]["one" if b == 1 else "more"]
    ]
    peak, moment = max(sizes, key=lambda entry: entry[0])
    return {"peak": peak, "moment": moment, "needed": peak + row["overhead_bytes"]}


def _speed(data: Row, row: Row, size: int, b: int, s: int) -> Row:
    speed, times = row["speed"], _computing(data, row["speed"]["computing"], b, s)
    steps = row["steps"]
    seconds = steps * times["micro_step"] + times["update"] + speed["overhead"]
    ideal = _exposed(row, times) if speed["communicates"] else 0.0
    exposed = ideal + speed["contention"] * max(0.0, speed["communication"] - ideal)
    rate = b * s * steps / (seconds + exposed)
    constant, slope = speed["flops_per_token"]
    return {
        "computing": seconds, "communication": speed["communication"], "exposed": exposed,
        "step": seconds + exposed, "tokens": rate, "hours": 1e9 / (rate * size) / 3600,
        "utilization": rate * (constant + slope * s) / speed["peak_flops"] if speed["peak_flops"] else None,
    }  # fmt: skip


def _computing(data: Row, c: Row, b: int, s: int) -> Row:
    tokens = b * s

    def affine(name: str) -> float:
        none, each = c[name]
        return float(none + each * tokens)

    products, head, loss = affine("products"), affine("head"), c["loss"] * tokens
    again = c["recomputed"] * (products - affine("last"))
    causal = min(1.0, (1 + data["causal_tile"] / s) / 2)
    fused = c["attention"] * tokens * causal * (s + c["attention_half_length"])
    attended, returned = c["eager_forward"] * tokens * s, c["eager_backward"] * tokens * s
    forward = max(products + fused + attended + c["forward"] * tokens, c["least_forward"])
    backward = 2 * products + data["attention_backward"] * fused + returned + c["backward"] * tokens
    backward = max(backward, c["least_backward"]) + again + c["recomputed"] * (forward - products)
    return {
        "block_forward": forward, "block_backward": backward + c["kept"], "head_forward": head + loss / 3,
        "head_backward": 2 * head + 2 * loss / 3, "update": c["update"],
        "micro_step": forward + backward + c["kept"] + 3 * head + loss,
    }  # fmt: skip


def _exposed(row: Row, times: Row) -> float:
    speed, sent, count = row["speed"], row["speed"]["collectives"], row["steps"]
    rule = OverlapRule(
        gathers_ahead=speed["gathers_ahead"], reduces_beside=speed["reduces_beside"], source=""
    )

    def micro_step(*, first: bool, last: bool) -> float:
        forward = sent["forward"] if first or sent["gathers_each"] else 0.0
        reduced = sent["reduced"] if last or sent["reduces_each"] else 0.0
        stages = _stages(speed, times, forward, sent["backward"], reduced)
        return float(max(0.0, run_time(stages, rule) - times["micro_step"]))

    if count == 1:
        return float(sent["always"]) + micro_step(first=True, last=True)
    ends = micro_step(first=True, last=False) + micro_step(first=False, last=True)
    return float(sent["always"]) + ends + max(0, count - 2) * micro_step(first=False, last=False)


def _stages(speed: Row, times: Row, forward: float, backward: float, reduced: float) -> list[Stage]:
    root, blocks, early = speed["root"], speed["blocks"], speed["early"]
    count = len(blocks)
    return [
        Stage(compute=0.0, gather=root * forward),
        *(Stage(compute=times["block_forward"] / count, gather=share * forward) for share in blocks),
        Stage(compute=times["head_forward"]),
        Stage(compute=times["head_backward"], gather=root * backward, reduce=early * reduced),
        *(
            Stage(compute=times["block_backward"] / count, gather=share * backward, reduce=share * reduced)
            for share in reversed(blocks)
        ),
        Stage(compute=0.0, reduce=(root - early) * reduced),
    ]
