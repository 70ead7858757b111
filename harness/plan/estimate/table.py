"""An estimate as lines of text: the answer first, then memory, then communication and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from textwrap import wrap
from typing import Any

from harness.backends.strategy import ROUTE_PREFIXES
from harness.forms.terms import STATE_KINDS
from harness.judge.wording import CellName, counted, listed, percent, ranks
from harness.plan.alternatives import (
    COMMAND,
    NO_WAYS,
    Alternative,
    Ways,
    alternative_lines,
    least_change,
    least_of,
    more_than_least_change,
    nothing_fits,
)
from harness.plan.architectures import mixture_of_experts
from harness.plan.command_words import estimate_command
from harness.plan.estimate.document import formulae
from harness.plan.estimate.question import EstimateRequest
from harness.plan.estimate.row import EstimateRow, trust_of
from harness.plan.leading import (
    CLOSE_SHARE,
    IN_WORDS,
    USUAL,
    about,
    between,
    by_speed,
    close_to_first,
    distinct_backends,
    figures,
    if_joined,
    in_order,
    pointless,
    preference,
    rate,
)
from harness.plan.limits import STATES_SHARE, VERDICT_LEGEND
from harness.plan.models import why_uneven
from harness.plan.time.computing import HOST_LINK, UPDATE_ON_HOST, attention_kernel
from harness.tell.formats import NOT_AVAILABLE, fitted, line_width

NAMES = frozenset({"label", "scenario"})
"""What of a row is no figure."""


def without_equal_estimates(rows: Sequence[EstimateRow]) -> tuple[list[EstimateRow], dict[str, str]]:
    """The rows to show, and the label of each left out -> the native label whose figures it has."""
    by_label = {row.label: row for row in rows}
    equal = {label: native for label in by_label if (native := _native(label, by_label)) is not None}
    return [row for row in rows if row.label not in equal], equal


def equal_estimates_line(equal: Mapping[str, str]) -> str:
    """'accelerate-ddp as ddp, accelerate-fsdp as fsdp: the same in all figures'."""
    return ", ".join(f"{label} as {native}" for label, native in equal.items()) + ": the same in all figures"


def _native(label: str, by_label: Mapping[str, EstimateRow]) -> str | None:
    for prefix in ROUTE_PREFIXES:
        name = label.removeprefix(prefix)
        other = by_label.get(name) if name != label else None
        if other is not None and _figures(other) == _figures(by_label[label]):
            return name
    return None


def _figures(row: EstimateRow) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row) if field.name not in NAMES}


MEMORY = (
    ("weights", ("weights",)), ("gath.", ("gathered",)), ("grads", ("gradients",)),
    ("mast.", ("masters",)), ("Adam", ("optimizer",)), ("act.", ("activations",)),
    ("comm.", ("communication",)), ("temp.", ("temporary", "buffers", "data")),
)  # fmt: skip
"""Column -> kinds of terms at the decisive moment."""
MOMENTS = {"forward/backward": "passes", "gradient reduction": "reduction", "optimizer step": "update"}
LEGEND = (
    "each row shows memory at its fullest moment (at: in the passes, as gradients are reduced, or in the "
    "update); -: nothing of the kind then, or less than the last digit; gath.: weights of other ranks; "
    "mast.: fp32 masters; temp.: temporaries, model buffers and data"
)
TOTAL = "total: with {} outside of torch's allocator (CUDA context, NCCL)"
ABSENT = "-"
STEP_LEGEND = (
    "nodes: GB of it to other nodes; exposed: seconds of communication that nothing hides; "
    "tok/s: per GPU; MFU: attention in full, its masked half too; h and kWh: for 1e9 tokens on all GPUs, at "
    "their power limit"
)
INDENT = " " * 4
MEGA, GIGA = 1e6, 1e9


FEW_NAMED = 3
"""Strategies that are named, of which the answer has the figures of each."""
FEW = 6
"""Rows that are shown where nobody named the strategies."""


def estimate_lines(
    asked: EstimateRequest,
    rows: Sequence[EstimateRow],
    *,
    details: bool = False,
    whole: bool = True,
    instead: Ways = NO_WAYS,
    words: Sequence[str] = (),
) -> list[str]:
    """The text of `harness estimate`; not `whole`: of every strategy, the few that lead.

    `instead`: what was predicted where nothing fits, by number of ranks. `words`: of the model, the job and
    the hardware, as a command repeats them.
    """
    few = asked.names_all and not whole
    by_size = {size: [row for row in rows if row.world_size == size] for size in asked.world_sizes}
    shown: list[EstimateRow] = []
    answers, tables = [], []
    for size, of_size in by_size.items():
        compared = leading(of_size) if few else None
        shown += of_size if compared is None else compared[:FEW]
        said = _answers(asked, size, of_size, compared, instead.get(size, ()))
        answers += [part for line in said for part in _wrapped(line)]
        heading = [ranks(size), ""] if len(by_size) > 1 else []
        tables += ["", *heading, *_of_size(asked, of_size, compared)]
    lines = [*answers, *tables, ""]
    for size, ways in instead.items():
        told = alternative_lines(ways, lambda one: estimate_command(one, words))
        heading = [ranks(size)] if len(by_size) > 1 and ways else []
        lines += [*heading, *(part for line in told for part in _wrapped(line)), ""]
    trust = trust_of(shown, least_of(instead))
    assumed = [*_header(asked), *(trust.lines() if trust else [])]
    lines += [part for line in assumed for part in _wrapped(line)]
    if details:
        for row in shown:
            lines += ["", *_details(row)]
    return lines


def leading(rows: Sequence[EstimateRow]) -> list[EstimateRow]:
    """Strategies that `harness recommend` compares, in its order: what fits, then what is nearest to it.

    Without a GPU, the usual ones first.
    """
    distinct = {entry.name for entry in distinct_backends(rows[0].world_size if rows else None)[0]}
    known = [row for row in rows if row.scenario is not None and row.label.partition(":")[0] in distinct]
    sensible = [row for row in known if not pointless(row.label, row.world_size)]
    if any(_is_roomy(row) for row in sensible) or not any(_is_roomy(row) for row in known):
        known = sensible or known
    if not any(row.verdict for row in known):
        return sorted(known, key=lambda row: USUAL.index(row.label) if row.label in USUAL else len(USUAL))
    fitting = in_order([row for row in known if row.verdict and row.verdict.fits])
    rest = [row for row in known if row not in fitting]
    rest.sort(key=lambda row: -row.verdict.margin_bytes if row.verdict else 0)
    return [*fitting, *rest]


def _is_roomy(row: EstimateRow) -> bool:
    return row.verdict is not None and row.verdict.is_roomy


def _header(asked: EstimateRequest) -> list[str]:
    experiment = asked.experiment
    training = experiment.training
    clipping = (
        "no clipping" if training.gradient_clipping is None else f"clipping {training.gradient_clipping:g}"
    )
    checkpointing = "activation checkpointing" if training.activation_checkpointing else "no checkpointing"
    where = (
        [] if asked.device is None else [f"{asked.device.name}, {asked.device.memory_bytes / GIGA:.1f} GB"]
    )
    where += [] if asked.network is None else [asked.network.name]
    # A model of one's own has no configuration that says which.
    kernel = attention_kernel(asked.model, experiment.model) if asked.model.config else NOT_AVAILABLE
    sequence = f"sequence {experiment.data.sequence_length}, " if experiment.data.is_tokenized else ""
    return [
        f"{asked.model.name}: {asked.model.counted} ({asked.model.source})",
        f"{sequence}{training.precision}, {clipping}, {checkpointing}, attention: {kernel}, "
        f"{experiment.runtime.preset}; "
        + ", ".join([*where, f"{counted(asked.gpus_per_node, 'GPU')} per node"]),
        *(f"note: {remark}" for remark in asked.remarks),
    ]


AT_THIS_BATCH = "at this batch and checkpointing; harness recommend chooses them"
"""Why the two commands may name different strategies."""
LOGITS_SHARE = 0.1
"""Of the activations, from which one copy of the logits is worth a word."""


def _answers(
    asked: EstimateRequest,
    world_size: int,
    rows: Sequence[EstimateRow],
    compared: Sequence[EstimateRow] | None,
    instead: Sequence[Alternative],
) -> list[str]:
    """What to use, the runner-up, and what fits at all, of one number of ranks."""
    known, _ = without_equal_estimates([row for row in rows if row.scenario is not None])
    cut = next((row.scenario for row in known if row.scenario), None)
    batch = f", micro-batch {cut.micro_batch_size}, accumulation {cut.accumulation_steps}" if cut else ""
    if asked.experiment.training.precision == "fp8":
        batch += ", fp8 emulated (not what fp8 hardware takes)"
    answer, joined = _answer(asked, known, compared, instead), if_joined(cut)
    place = f"{ranks(world_size)}{batch}{'' if joined in answer else joined}"
    fitting = [
        row
        for row in compared or leading(rows)
        if row.verdict and row.verdict.is_roomy and row.speed and (row.memory or row.near_bounds)
    ]
    if not fitting or _are_few(asked, known):
        return [f"{place}: {answer}", *more_than_least_change(instead)]
    said = [f"{place}: use {fitting[0].label}, {figures(fitting[0])} ({AT_THIS_BATCH})"]
    said += [f"Runner-up: {row.label}, {figures(row)}" for row in fitting[1:2]]
    others = [row for row in known if row.verdict and row.verdict.fits and row is not fitting[0]]
    return [*said, answer if others else "nothing else fits"]


def _of_size(
    asked: EstimateRequest, rows: Sequence[EstimateRow], compared: Sequence[EstimateRow] | None
) -> list[str]:
    """Of one number of ranks. `compared`: strategies of which the first few are shown; None: all are."""
    known, equal = without_equal_estimates([row for row in rows if row.scenario is not None])
    shown = known if compared is None else compared[:FEW]
    lines = [*_memory_table(asked, shown), "", *_step_table(asked, shown)] if shown else []
    notes = [equal_estimates_line(equal)] if equal and compared is None else []
    unsupported: dict[str, list[str]] = {}
    for row in rows:
        if row.unsupported:
            unsupported.setdefault(row.unsupported, []).append(row.label)
    notes += [f"{', '.join(labels)}: unsupported: {reason}" for reason, labels in unsupported.items()]
    if compared is not None:
        more = len(rows) - len(shown) - sum(map(len, unsupported.values()))
        notes = [f"{more} more strategies with --all", *notes]
    notes += [*_about_logits(asked, shown), *_reasons(shown), *_about_experts(known)]
    return lines + [part for note in notes for part in _wrapped(note)]


def _about_experts(rows: Sequence[EstimateRow]) -> list[str]:
    """Of a mixture of experts, why states differ by library."""
    held = {row.label: row.state_bytes(*STATE_KINDS) or 0 for row in rows}
    config = next((row.scenario.model.config for row in rows if row.scenario), {})
    why = why_uneven(held, config) if mixture_of_experts(config) else None
    return [why] if why else []


def _about_logits(asked: EstimateRequest, rows: Sequence[EstimateRow]) -> list[str]:
    """What removes the logits, where a row does not fit and they are much of what a rank holds."""
    experiment, vocabulary = asked.experiment, (asked.model.config or {}).get("vocab_size")
    if experiment.task != "causal-lm" or experiment.loss.chunk_tokens is not None or vocabulary is None:
        return []
    for row in rows:
        held = row.most_bytes("activations")
        if row.scenario is None or row.verdict is None or row.verdict.fits or not held:
            continue
        tokens = row.scenario.micro_batch_size * experiment.data.sequence_length
        logits = 4 * tokens * vocabulary
        if logits > LOGITS_SHARE * held:
            return [
                f"one copy of the logits in fp32 takes {logits / GIGA:.1f} GB ({tokens:,} tokens x "
                f"{vocabulary:,}), and the loss holds several: loss.chunk_tokens=1024, or a fused loss in a "
                "program of your own, removes them"
            ]
    return []


def _answer(
    asked: EstimateRequest,
    rows: Sequence[EstimateRow],
    compared: Sequence[EstimateRow] | None,
    instead: Sequence[Alternative],
) -> str:
    """Which strategies fit, and the fastest of those that are compared."""
    if asked.device is None:
        return "name a GPU with --gpu to learn what fits and how fast it is"
    other, one = nothing_fits(instead), least_change(instead)
    if _are_few(asked, rows):
        way = [f"{'' if one.name else 'with '}{one.called}: {one.figures}"] if one else []
        return "; ".join([*map(_of_row, rows), *way])
    judged = [(row, row.verdict) for row in rows if row.verdict is not None]
    fitting = [row for row, verdict in judged if verdict is not None and verdict.is_roomy]
    barely = [row for row, verdict in judged if verdict is not None and verdict.barely_fits]
    if not fitting and barely:
        few = ", ".join(f"{row.label} barely ({figures(row, marked=False)})" for row in barely[:FEW_NAMED])
        return f"nothing fits with room for what the allocator adds, {few}" + (f"; {other}" if other else "")
    of_states = len(judged) < len(rows) and not (other and any(row.memory for row in rows))
    if not fitting and of_states:
        return _answer_of_states(rows, one)
    if not fitting:
        return other or "nothing fits"
    fastest = ""
    timed = [row for row in fitting if row.speed is not None and (compared is None or row in compared)]
    if timed:
        close = sorted(close_to_first(sorted(timed, key=by_speed)), key=preference)
        equal = f" (equal within {100 * CLOSE_SHARE:.0f} %)" if len(close) > 1 else ""
        reached = about(close[0].tokens_per_second_per_gpu)
        fastest = f"; fastest {listed([row.label for row in close])}{equal}, about {reached} tokens/s a GPU"
    tight = f"; {listed([row.label for row in barely])} barely" if barely else ""
    untimed = {row.speed_unknown for row in fitting}
    unknown = [(reason or "").partition(";")[0] for reason in untimed if len(untimed) == 1 and reason]
    return f"{_names(fitting, rows)} fit{fastest}{tight}" + "".join(f"; no speed: {why}" for why in unknown)


def _are_few(asked: EstimateRequest, rows: Sequence[EstimateRow]) -> bool:
    """Whether the answer has the figures of each row."""
    predicted = all(row.memory or row.near_bounds for row in rows)
    return bool(rows) and not asked.names_all and len(rows) <= FEW_NAMED and predicted


def _of_row(row: EstimateRow) -> str:
    """'zero2:offload=optimizer fits, 40.1 of 85.1 GB and 128 GB of host memory per node, about 1,200 ...'."""
    verdict = "may fit" if row.verdict is None else IN_WORDS.get(row.verdict.said, row.verdict.said)
    return f"{row.label} {verdict}, {figures(row, marked=False)}"


def _answer_of_states(rows: Sequence[EstimateRow], way: Alternative | None) -> str:
    """Where peaks are not predicted: a verdict is there only where model states alone are too large."""
    if any(row.states is not None and row.states.unknown for row in rows):
        return "memory is not predicted"
    too_large = [row.label for row in rows if row.verdict is not None]
    others = [row.label for row in rows if row.verdict is None]
    fit = listed(others) if len(others) < len(too_large) else f"all but {listed(too_large)}"
    instead = (
        f", with little room for activations above {percent(STATES_SHARE)} of memory; "
        f"{way.called}: {way.figures}"
        if way
        else ""
    )
    return f"memory is not predicted; model states of {fit if too_large else 'all'} fit{instead}"


def _names(fitting: Sequence[EstimateRow], rows: Sequence[EstimateRow]) -> str:
    """The shorter of those that fit and 'all but' the others."""
    others = [row.label for row in rows if row not in fitting]
    if len(rows) > 1 and len(others) < len(fitting) and all(row.memory is not None for row in rows):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(row.label for row in fitting)


def _memory_table(asked: EstimateRequest, rows: Sequence[EstimateRow]) -> list[str]:
    peaks = [row.memory.peak_bytes for row in rows if row.memory is not None]
    peaks += [row.peak_bytes_between[1] for row in rows if row.peak_bytes_between]
    peaks += [row.state_bytes(*STATE_KINDS) or 0 for row in rows if not peaks]
    unit, name = (MEGA, "MB") if max(peaks, default=0) < GIGA else (GIGA, "GB")
    judged = asked.device is not None
    headers = [f"{name} per rank", *(title for title, _ in MEMORY)]
    headers += ["total", "at", "left", "fits"] if judged else ["peak", "at"]
    table = []
    for row in rows:
        cells = [row.label, *_memory_cells(row, unit, judged)]
        if judged:
            verdict = row.verdict
            cells += (
                [NOT_AVAILABLE] * 2 if verdict is None else [_size(verdict.margin_bytes, unit), verdict.word]
            )
        table.append(cells)
    host = [row for row in rows if row.memory is not None and row.host_bytes_per_node > GIGA]
    return [
        *_tabulated(table, headers),
        *_wrapped("; ".join([LEGEND, *_outside(rows), VERDICT_LEGEND] if judged else [LEGEND])),
        *(f"{row.label}: {row.host_bytes_per_node / GIGA:,.0f} GB of host memory per node" for row in host),
    ]


def _outside(rows: Sequence[EstimateRow]) -> list[str]:
    """What the kinds of memory do not count, of the rows together."""
    known = [memory for row in rows for memory in (row.memory, *(row.near_bounds or ())) if memory]
    found = sorted({memory.device_bytes - memory.peak_bytes for memory in known})
    ends = dict.fromkeys(f"{count / GIGA:.2f}" for count in (found[:1] + found[-1:]))
    return [TOTAL.format(f"{' to '.join(ends)} GB")] if found else []


def _memory_cells(row: EstimateRow, unit: float, judged: bool) -> list[str]:
    """By kind, then the allocator's peak, or `judged` what the GPU must have; and when."""
    if row.memory is None:
        kinds = ("weights", "gathered", "gradients", "masters", "optimizer")
        needed = [bound.device_bytes if judged else bound.peak_bytes for bound in row.near_bounds or ()]
        between = " to ".join(dict.fromkeys(_size(count, unit) for count in needed)) or NOT_AVAILABLE
        return [
            *(_kind(row.state_bytes(kind), unit) for kind in kinds),
            *[NOT_AVAILABLE] * 3, between, NOT_AVAILABLE,
        ]  # fmt: skip
    memory = row.memory
    terms = [term for term in memory.decisive.terms if not term.host]
    sums = [sum(term.bytes for term in terms if term.kind in kinds) for _, kinds in MEMORY]
    return [
        *(_kind(value, unit) for value in sums),
        _size(memory.device_bytes if judged else memory.peak_bytes, unit),
        MOMENTS[memory.decisive.name],
    ]


def _step_table(asked: EstimateRequest, rows: Sequence[EstimateRow]) -> list[str]:
    most = max((row.sent_bytes or 0.0 for row in rows), default=0.0)
    unit, name = (MEGA, "MB") if most < GIGA else (GIGA, "GB")
    headers = ["per step", f"sent {name}", "nodes"]
    if asked.device is not None:
        headers += ["comp. s", "comm. s", "exposed", "step s", "tok/s", "MFU %", "h", "kWh"]
    table = []
    for row in rows:
        cells = [row.label, _size(row.sent_bytes, unit), _size(row.between_bytes, unit)]
        table.append([*cells, *_speed_cells(row)] if asked.device is not None else cells)
    too_large = any(row.speed and row.verdict and not row.verdict.fits for row in rows)
    legend = STEP_LEGEND if asked.device is not None else STEP_LEGEND.partition(";")[0]
    legend += f"; {ABSENT}: it does not fit" if too_large else ""
    return [*_tabulated(table, headers), *_wrapped(legend), *map(_on_host, filter(_offloads, rows))]


def _offloads(row: EstimateRow) -> bool:
    return row.speed is not None and any(term.name == UPDATE_ON_HOST for term in row.speed.computing)


def _on_host(row: EstimateRow) -> str:
    """'zero3:offload=cpu: comp. s includes 25 s of optimizer step on the host, 2.1 s between device ...'."""
    assert row.speed is not None
    seconds = {term.name: term.seconds for term in row.speed.computing}
    parts = [
        f"{_figure(seconds[UPDATE_ON_HOST])} s of {UPDATE_ON_HOST}",
        f"{_figure(seconds[HOST_LINK])} s {HOST_LINK}",
    ]
    return f"{row.label}: comp. s includes {', '.join(parts)}"


def _speed_cells(row: EstimateRow) -> list[str]:
    speed = row.speed
    if speed is None:
        return [NOT_AVAILABLE] * 8
    if row.verdict is not None and not row.verdict.fits:
        return [ABSENT] * 8
    seconds = (
        speed.computing_seconds,
        speed.communication_seconds,
        speed.exposed_seconds,
        speed.step_seconds,
    )
    share = speed.model_flops_utilization
    energy = row.kilowatt_hours_per_billion_tokens
    return [
        *(_figure(value) for value in seconds),
        rate(speed.tokens_per_second_per_gpu),
        NOT_AVAILABLE if share is None else f"{100 * share:.1f}",
        _figure(row.hours_per_billion_tokens),
        NOT_AVAILABLE if energy is None else f"{energy:,.0f}",
    ]


def _reasons(rows: Sequence[EstimateRow]) -> list[str]:
    """Why something is n/a or could be otherwise, each reason once with the rows that it holds for."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.scenario is None:
            continue
        lacks: dict[str, list[str]] = {}
        if bounds := row.peak_bytes_between:
            found.setdefault(f"peak {between(bounds)} GB: {row.memory_unknown}", []).append(row.label)
        elif row.memory_unknown is not None:
            lacks.setdefault(row.memory_unknown, []).append("memory")
        if row.speed_unknown is not None and row.scenario.device is not None:
            lacks.setdefault(row.speed_unknown, []).append("speed")
        if row.reduced_each_time is not None:
            found.setdefault(row.reduced_each_time, []).append(row.label)
        for reason, what in lacks.items():
            found.setdefault(f"{' and '.join(what)} n/a: {reason}", []).append(row.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in found.items()]


def _details(row: EstimateRow) -> list[str]:
    if row.scenario is None:
        return []
    lines = formulae(row)
    cells = [[line["quantity"], _detail(line)] for line in lines]
    head, rule, *values = fitted(cells, ["what", "value"], alignments={"value": "right"}).splitlines()
    title = f"{CellName(row.label, row.world_size)}, line by line (bytes unless said otherwise)"
    body = [part for line, text in zip(lines, values, strict=True) for part in (text, *_origin(line))]
    return [title, head, rule, *body, ""]


def _origin(line: Mapping[str, Any]) -> list[str]:
    """Formula and source of a line, below it."""
    text = "; source: ".join(filter(None, (line["formula"], line["source"])))
    return wrap(
        text, line_width(), initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _detail(line: Mapping[str, Any]) -> str:
    if "bytes" in line:
        return f"{line['bytes']:,}"
    return f"{line['seconds'] * 1000:,.3f} ms" if "seconds" in line else f"{line['ratio']:.3g}"


def _tabulated(table: list[list[str]], headers: list[str]) -> list[str]:
    """All but the first column are figures."""
    return fitted(table, headers, alignments=dict.fromkeys(headers[1:], "right")).splitlines()


def _wrapped(line: str) -> list[str]:
    if line.startswith(COMMAND):  # to be copied
        return [line]
    return wrap(line, line_width(), break_on_hyphens=False, break_long_words=False) or [line]


def _kind(count: int | None, unit: float) -> str:
    """Bytes of a kind of memory; what would read as zero is absent."""
    text = _size(count, unit)
    return ABSENT if text in ("0", "0.00") else text


def _size(count: float | None, unit: float) -> str:
    if count is None:
        return NOT_AVAILABLE
    value = count / unit
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _figure(value: float | None) -> str:
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
