"""An answer for people: what to use first, then tables, then what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from textwrap import wrap
from typing import Any

from harness.backends.strategy import ROUTE_PREFIXES
from harness.forms.terms import STATE_KINDS
from harness.judge.wording import counted, listed, percent, ranks
from harness.nested import grouped
from harness.plan.alternatives import (
    CHUNKED,
    COMMAND,
    LORA,
    RELIEFS,
    alternative_lines,
    least_change,
    nothing_fits,
    reaches_more,
)
from harness.plan.answer import Answer, leading, set_words, trust_in_answers, trust_of
from harness.plan.document import formulae
from harness.plan.hardware import STATES_SHARE, TIGHT_SHARE, VERDICT_LEGEND
from harness.plan.prediction import Prediction
from harness.plan.question import Question
from harness.plan.search import (
    CLOSE_SHARE,
    IN_WORDS,
    OPTION,
    between,
    by_speed,
    close_to_first,
    figures,
    if_joined,
    preference,
    rate,
    reached,
    why_slower,
)
from harness.plan.step_time import (
    HOST_LINK,
    UPDATE_ON_HOST,
    attention_kernel,
    gpu_hours_per_billion_tokens,
    kilowatt_hours_per_billion_tokens,
)
from harness.tell.formats import NOT_AVAILABLE, fitted, line_width

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
BATCH_LEGEND = "batch: micro-batch; acc.: accumulation; ckpt: activation checkpointing"
TOTAL = "total: with {} outside of torch's allocator (CUDA context, NCCL)"
ABSENT = "-"
STEP_LEGEND = (
    "nodes: of it to other nodes; exposed: seconds of communication that nothing hides; "
    "tok/s: per GPU; MFU: attention in full, its masked half too; GPU h and kWh: for 1e9 tokens, at the "
    "power limit of the boards"
)
INDENT = " " * 4
MEGA, GIGA = 1e6, 1e9
FEW_NAMED = 3
"""Strategies that are named, of which the answer has the figures of each."""
FEW = 6
"""Rows that are shown where nobody named the strategies."""
NAMED = 4
"""Backends that a reason names."""
SAME = ("shards like ", "the same strategy through ", "on one GPU the same as ")
"""Begins of why a backend is left out whose strategy another one has."""


def answer_lines(
    found: Sequence[Answer], *, details: bool = False, whole: bool = False, wraps: bool = True
) -> list[str]:
    """The text of a plan; not `whole`: of every strategy, the few that lead. `wraps`: to the terminal."""
    several, shown = len(found) > 1, list[Prediction]()
    answers, tables, rest = list[str](), list[str](), list[str]()
    for answer in found:
        size = [ranks(answer.question.gpus)] if several else []
        compared = _compared(answer, whole)
        shown += answer.rows if compared is None else compared[:FEW]
        answers += _use(answer, several) if answer.question.is_open else _at_batch(answer, compared)
        tables += ["", *(f"{one}\n" for one in size), *_tables(answer, compared)]
        taken = [one.scenario for one in answer.best]
        others = [one for one in answer.instead if one.scenario not in taken]
        ways = list(alternative_lines(others, answer.command))
        rest += [*(size if ways else []), *ways, *([""] if ways else [])]
        if answer.question.is_open:
            rest += [*size, *_reasons_and_next_steps(answer)]
    trust = trust_in_answers(found, shown)
    assumed = [*_header(found), *(trust.lines() if trust else [])]
    lines = [*answers, *tables, "", *rest, *assumed]
    if details:
        lines += [line for row in shown if row.scenario for line in ("", *_details(row))]
    return [part for line in lines for part in _wrapped(line)] if wraps else lines


def _compared(answer: Answer, whole: bool) -> list[Prediction] | None:
    """Predictions of which the first few are shown; None: all are."""
    if answer.question.is_open:
        return None if whole else list(answer.rows)
    return leading(answer.rows) if answer.question.names_all and not whole else None


def _use(answer: Answer, several: bool) -> Iterator[str]:
    """What to take of a search, the runner-up, and what speaks for another."""
    found, best, question = answer.found, answer.best, answer.question
    assert found is not None
    place = f"{ranks(question.gpus)}: " if several else ""
    if best:
        first, *others = best
        alone = "No runner-up: nothing else fits with room"
        yield f"{place}Use {_split(first)}{if_joined(first.planned)}"
        if not first.planned.mesh.shares_samples:
            yield from reaches_more(answer.instead, first.tokens_per_second_per_gpu)
        faster = found.fastest and why_slower(found.fastest, first)
        is_second = bool(others) and found.fastest is others[0]
        yield f"Runner-up{f', {faster}' if is_second else ''}: {_split(others[0])}" if others else alone
        if whole := answer.whole:
            steps, price = question.experiment.training.steps, question.experiment.compare.price_per_gpu_hour
            hours = whole.get("hours_between", [whole["hours"]])
            gpu_hours = [each * question.gpus for each in hours]
            cost = f", {_span(each * price.amount for each in gpu_hours)} {price.currency}" if price else ""
            of_all = f"All {steps:,} steps: " if steps else ""
            known = trust_of([first])
            taken = f"{_span(hours)} hours, {_span(gpu_hours)} GPU hours{cost}"
            if known and known.speed and known.speed.typical:
                taken += f" (speed ±{percent(known.speed.typical)}, see typical error)"
            yield f"{of_all}{whole['tokens']:,} tokens in {taken}"
        if first.planned.options.get(OPTION) and first.planned.accumulation_steps > 1:
            yield f"{OPTION}: gradients are reduced in each micro-step; whole ones that add up leave no room"
        if first.is_tight:
            safe = _split(found.with_room) if found.with_room else "none"
            yield f"Close to the limit: less than {percent(1 - TIGHT_SHARE)} is free. Safe: {safe}"
        if found.fastest and faster and not is_second:
            yield f"{faster[0].upper()}{faster[1:]}: {_split(found.fastest)}"
        if answer.chunked:
            yield f"With a chunked loss ({set_words(RELIEFS[CHUNKED])[1]}): {_split(answer.chunked)}"
        if answer.fewest and answer.fewest.world_size < question.gpus:
            yield f"Fewest GPUs with room: {answer.fewest.world_size:,}, {_split(answer.fewest)}"
    else:
        none = "nothing fits" if found.too_large else "no configuration can be ranked"
        if not question.samples:
            none += f": {question.samples_asked:,} samples a step are fewer than GPUs"
        yield place + (nothing_fits(answer.instead) or none)
        adapted = [one for one in answer.instead[1:] if one.is_roomy and one.name in LORA]
        yield from (f"{one.called}: {one.figures}" for one in adapted if question.is_mixture)
        if one := least_change(answer.instead):
            yield from reaches_more(answer.instead, one.tokens_per_second_per_gpu)
    other = answer.other_best
    if answer.other_preset and (other is None or not best or other.label != best[0].label):
        if best or other:
            text = _split(other) if other else "nothing fits"
            yield f"With runtime.preset={answer.other_preset}: {text}"


def _split(one: Prediction) -> str:
    """'fsdp, micro-batch 1, accumulation 64: 75.7 of 85.1 GB, about 3,500 tokens/s a GPU'."""
    scenario = one.planned
    batch = f"micro-batch {scenario.micro_batch_size}, accumulation {scenario.accumulation_steps}"
    batch += ", with checkpointing" if one.checkpointing else ""
    why = (one.speed_unknown or "").partition(";")[0]
    unknown = "" if one.speed or not one.most_memory else f", no speed predicted{f' ({why})' if why else ''}"
    return f"{one.label}, {batch}: {figures(one)}{unknown}"


def _at_batch(answer: Answer, compared: Sequence[Prediction] | None) -> Iterator[str]:
    """What to use at the batch of the question, the runner-up, and what fits at all."""
    question, rows, instead = answer.question, answer.rows, answer.instead
    known, _ = without_equal_estimates([row for row in rows if row.scenario is not None])
    cut = next((row.scenario for row in known), None)
    place = ranks(question.gpus)
    if cut:
        place += f", micro-batch {cut.micro_batch_size}, accumulation {cut.accumulation_steps}"
    if question.experiment.training.precision == "fp8":
        place += ", fp8 emulated (not what fp8 hardware takes)"
    way, joined = least_change(instead), if_joined(cut)
    if question.device is None:
        yield f"{place}: name a GPU with --gpu to learn what fits and how fast it is"
        return
    predicted = all(row.memory or row.near_bounds for row in known)
    if known and predicted and not question.names_all and len(known) <= FEW_NAMED:  # with figures of each
        offer = [f"{'' if way.name else 'with '}{way.called}: {way.figures}"] if way else []
        text = "; ".join([*map(_of_row, known), *offer])
        yield f"{place}{'' if joined in text else joined}: {text}"
    else:
        told = _which_fit(known, compared, nothing_fits(instead))
        lead = [row for row in compared or leading(rows) if row.is_roomy and row.speed and row.needed_between]
        if lead:
            yield f"{place}{joined}: use {lead[0].label}, {figures(lead[0])}"
            yield from (f"Runner-up: {row.label}, {figures(row)}" for row in lead[1:2])
            others = any(row.verdict and row.verdict.fits and row is not lead[0] for row in known)
            yield told if others else "nothing else fits"
        else:
            yield f"{place}{'' if joined in told else joined}: {told}"
    if way:
        yield from reaches_more(instead, way.tokens_per_second_per_gpu)
    if answer.found is not None:
        best = answer.best
        yield f"With the batch open: {_split(best[0]) if best else 'nothing fits'}"


def _of_row(row: Prediction) -> str:
    """'zero2:offload=optimizer fits, 40.1 of 85.1 GB and 128 GB of host memory per node, about 1,200 ...'."""
    verdict = "may fit" if row.verdict is None else IN_WORDS.get(row.verdict.said, row.verdict.said)
    return f"{row.label} {verdict}, {figures(row, marked=False)}"


def _which_fit(rows: Sequence[Prediction], compared: Sequence[Prediction] | None, other: str | None) -> str:
    """Which strategies fit, and the fastest of those that are compared. `other`: what fits instead."""
    judged = [row for row in rows if row.verdict is not None]
    fitting = [row for row in judged if row.is_roomy]
    barely = [row for row in judged if row.barely_fits]
    if not fitting and barely:
        few = ", ".join(f"{row.label} barely ({figures(row, marked=False)})" for row in barely[:FEW_NAMED])
        return f"nothing fits with room for what the allocator adds, {few}" + (f"; {other}" if other else "")
    if not fitting and len(judged) < len(rows) and not (other and any(row.memory for row in rows)):
        return _states_that_fit(rows, other)
    if not fitting:
        return other or "nothing fits"
    others = [row.label for row in rows if row not in fitting]
    if len(rows) > 1 and len(others) < len(fitting) and all(row.memory is not None for row in rows):
        told = [f"all but {', '.join(others)} fit" if others else "all fit"]
    else:
        told = [f"{', '.join(row.label for row in fitting)} fit"]
    timed = [row for row in fitting if row.speed is not None and (compared is None or row in compared)]
    if timed:
        close = sorted(close_to_first(sorted(timed, key=by_speed)), key=preference)
        equal = f" (equal within {100 * CLOSE_SHARE:.0f} %)" if len(close) > 1 else ""
        names = listed([row.label for row in close])
        told.append(f"fastest {names}{equal}, {reached(close[0])} tokens/s a GPU")
    told += [f"{listed([row.label for row in barely])} barely"] if barely else []
    untimed = {row.speed_unknown for row in fitting}
    told += [f"no speed: {why.partition(';')[0]}" for why in untimed if len(untimed) == 1 and why]
    return "; ".join(told)


def _states_that_fit(rows: Sequence[Prediction], other: str | None) -> str:
    """Where peaks are not predicted: a verdict is there only where model states alone are too large."""
    if any(row.states is not None and row.states.unknown for row in rows):
        return "memory is not predicted"
    too_large = [row.label for row in rows if row.verdict is not None]
    others = [row.label for row in rows if row.verdict is None]
    fit = listed(others) if len(others) < len(too_large) else f"all but {listed(too_large)}"
    instead = f", with little room for activations above {percent(STATES_SHARE)} of memory" if other else ""
    text = f"memory is not predicted; model states of {fit if too_large else 'all'} fit{instead}"
    return text + (f"; {other}" if other else "")


def without_equal_estimates(rows: Sequence[Prediction]) -> tuple[list[Prediction], dict[str, str]]:
    """The rows to show, and the label of each left out -> the native label whose figures it has."""

    def values(row: Prediction) -> list[Any]:
        return [getattr(row, one.name) for one in fields(row) if one.name not in ("named", "scenario")]

    by_label, equal = {row.label: row for row in rows}, dict[str, str]()
    for label, row in by_label.items():
        for prefix in ROUTE_PREFIXES:
            name = label.removeprefix(prefix)
            if name != label and name in by_label and values(by_label[name]) == values(row):
                equal.setdefault(label, name)
    return [row for row in rows if row.label not in equal], equal


def _header(found: Sequence[Answer]) -> list[str]:
    asked = max((answer.question for answer in found), key=lambda question: question.gpus)
    experiment, training, device = asked.experiment, asked.experiment.training, asked.device
    clip = training.gradient_clipping
    # A model of one's own has no configuration that says which.
    kernel = attention_kernel(asked.model, experiment.model) if asked.model.config else NOT_AVAILABLE
    job = [f"sequence {asked.sequence_length}"] if experiment.data.is_tokenized else []
    job += [training.precision, "no clipping" if clip is None else f"clipping {clip:g}"]
    if asked.is_open:
        tokens = dict.fromkeys(answer.question.tokens_per_step for answer in found if answer.question.samples)
        job += [f"{listed([f'{count:,}' for count in tokens])} tokens per step"] if tokens else []
    else:
        job.append(f"{'activation' if training.activation_checkpointing else 'no'} checkpointing")
    where = [] if device is None else [f"{device.name}, {device.memory_bytes / GIGA:.1f} GB"]
    where += [] if asked.network is None else [asked.network.name]
    where.append(f"{counted(asked.gpus_per_node, 'GPU')} per node")
    remarks = dict.fromkeys(remark for answer in found for remark in answer.question.remarks)
    return [
        f"{asked.model.name}: {asked.model.counted} ({asked.model.source})",
        f"{', '.join(job)}, attention: {kernel}, {asked.preset}; {', '.join(where)}",
        *(f"note: {remark}" for remark in remarks),
    ]


def _tables(answer: Answer, compared: Sequence[Prediction] | None) -> list[str]:
    """Memory and step of one number of ranks, and what of it is not known."""
    question, rows = answer.question, list(answer.rows)
    known, equal = without_equal_estimates([row for row in rows if row.scenario is not None])
    shown = known if compared is None else list(compared[:FEW])
    if question.is_mixture and answer.found and question.is_open:
        shown = [*shown, *answer.found.too_large]
    lines = [*_memory_table(question, shown), "", *_step_table(question, shown)] if shown else []
    if compared is not None:
        unsupported = sum(row.scenario is None for row in rows)
        more = len(rows) - min(FEW, len(compared)) - unsupported
        if more and not question.is_open:  # which stand among those that are not taken
            lines.append(f"{more} more strategies with --all")
    elif equal:
        names = ", ".join(f"{label} as {native}" for label, native in equal.items())
        lines.append(f"{names}: the same in all figures")
    why = [(f"unsupported: {row.unsupported}", row.label) for row in rows if row.unsupported]
    because = grouped([*why, *((reason, row.label) for row in shown for reason in _unknown(row))])
    lines += [f"{', '.join(labels)}: {reason}" for reason, labels in because.items()]
    return lines + ([answer.uneven] if answer.uneven else [])


WHOLE_SEQUENCES = (
    "each rank keeps whole sequences between cut layers, and all logits; with sequence and loss parallel "
    "(Megatron, torchtitan), which this backend lacks, it would hold less"
)


def _unknown(row: Prediction) -> Iterator[str]:
    """Why something is n/a or could be otherwise."""
    if "tensor" in row.planned.options:
        yield WHOLE_SEQUENCES
    memory = row.memory_unknown
    if bounds := row.peak_bytes_between:
        yield f"peak {between(bounds)} GB: {memory}"
        memory = None
    speed = row.speed_unknown if row.planned.device is not None else None
    if memory is not None and memory == speed:
        yield f"memory and speed n/a: {memory}"
        return
    yield from (f"{what} n/a: {why}" for what, why in (("memory", memory), ("speed", speed)) if why)


def _memory_table(question: Question, rows: Sequence[Prediction]) -> list[str]:
    peaks = [row.memory.peak_bytes for row in rows if row.memory is not None]
    peaks += [row.peak_bytes_between[1] for row in rows if row.peak_bytes_between]
    peaks += [row.state_bytes(*STATE_KINDS) or 0 for row in rows if not peaks]
    unit, name = (MEGA, "MB") if max(peaks, default=0) < GIGA else (GIGA, "GB")
    judged = question.device is not None
    headers = [f"{name} per rank", *(("batch", "acc.", "ckpt") if question.is_open else ())]
    headers += [title for title, _ in MEMORY]
    headers += ["total", "at", "left", "fits"] if judged else ["peak", "at"]
    table = []
    for row in rows:
        cells = [row.label]
        if question.is_open:
            batch = row.planned.micro_batch_size, row.planned.accumulation_steps
            cells += [*map(str, batch), "yes" if row.checkpointing else "no"]
        cells += _memory_cells(row, unit, judged)
        if judged:
            verdict = row.verdict
            left = None if verdict is None else verdict.margin_bytes
            cells += [_size(left, unit), verdict.word if verdict else NOT_AVAILABLE]
        table.append(cells)
    legend = [*([BATCH_LEGEND] if question.is_open else []), LEGEND]
    if judged:
        both = [memory for row in rows for memory in (row.memory, *(row.near_bounds or ())) if memory]
        outside = sorted({memory.device_bytes - memory.peak_bytes for memory in both})
        ends = dict.fromkeys(f"{count / GIGA:.2f}" for count in (outside[:1] + outside[-1:]))
        legend += [TOTAL.format(f"{' to '.join(ends)} GB")] if outside else []
        legend.append(VERDICT_LEGEND)
    host = [(row, row.host_bytes_per_node) for row in rows if row.memory is not None]
    return [
        *_tabulated(table, headers),
        "; ".join(legend),
        *(f"{row.label}: {held / GIGA:,.0f} GB of host memory per node" for row, held in host if held > GIGA),
    ]


def _memory_cells(row: Prediction, unit: float, judged: bool) -> list[str]:
    """Cells of memory by kind, then the allocator's peak, or `judged` what the GPU must have; and when."""
    if row.memory is None:
        kinds = ("weights", "gathered", "gradients", "masters", "optimizer")
        needed = [bound.device_bytes if judged else bound.peak_bytes for bound in row.near_bounds or ()]
        span = " to ".join(dict.fromkeys(_size(count, unit) for count in needed)) or NOT_AVAILABLE
        states = [_kind(row.state_bytes(kind), unit) for kind in kinds]
        return [*states, *[NOT_AVAILABLE] * 3, span, NOT_AVAILABLE]
    held, memory = row.memory.decisive.kinds, row.memory
    return [
        *(_kind(sum(held.get(kind, 0) for kind in kinds), unit) for _, kinds in MEMORY),
        _size(memory.device_bytes if judged else memory.peak_bytes, unit),
        MOMENTS[memory.decisive.name],
    ]


def _step_table(question: Question, rows: Sequence[Prediction]) -> Iterator[str]:
    most = max((row.sent_bytes or 0.0 for row in rows), default=0.0)
    unit, name = (MEGA, "MB") if most < GIGA else (GIGA, "GB")
    timed = question.device is not None
    headers = ["per step", f"sent {name}", f"nodes {name}"]
    if timed:
        headers += ["comp. s", "comm. s", "exposed", "step s", "tok/s", "MFU %", "GPU h", "kWh"]
    table = [
        [row.label, _size(row.sent_bytes, unit), _size(row.between_bytes, unit)]
        + (_speed_cells(row) if timed else [])
        for row in rows
    ]
    too_large = any(row.speed and row.verdict and not row.verdict.fits for row in rows)
    legend = STEP_LEGEND if timed else STEP_LEGEND.partition(";")[0]
    legend += f"; {ABSENT}: it does not fit" if too_large else ""
    yield from [*_tabulated(table, headers), legend]
    ranges = [(row.label, row.speed) for row in rows if row.speed and row.speed.between_because]
    because = grouped(((of.between_because, of.loses_with_scale), label) for label, of in ranges)
    for (why, loses), labels in because.items():
        out = "exposed is" if loses else "comp. s and exposed are"
        yield f"{listed(labels)}: {why}, so {out} {NOT_AVAILABLE}"
    for row in rows:
        seconds = {term.name: term.seconds for term in row.speed.computing} if row.speed else {}
        if UPDATE_ON_HOST in seconds:
            parts = f"{_figure(seconds[UPDATE_ON_HOST])} s of {UPDATE_ON_HOST}"
            parts += f", {_figure(seconds[HOST_LINK])} s {HOST_LINK}"
            yield f"{row.label}: comp. s includes {parts}"


def _speed_cells(row: Prediction) -> list[str]:
    speed = row.speed
    if speed is None:
        return [NOT_AVAILABLE] * 8
    if row.verdict is not None and not row.verdict.fits:
        return [ABSENT] * 8
    energy = kilowatt_hours_per_billion_tokens(speed, row.world_size)
    times = [seconds / speed.step_seconds for seconds in speed.step_seconds_between or (speed.step_seconds,)]
    share, ranged = speed.model_flops_utilization, len(times) > 1

    def ends(value: float | None, form: Callable[[float], str], power: int = 1) -> str:
        """A figure, or its least and most, '5,190-6,720', where the step is a range."""
        known = () if value is None else sorted(value * at**power for at in times)
        return "-".join(dict.fromkeys(map(form, known))) or NOT_AVAILABLE

    return [
        NOT_AVAILABLE if ranged and not speed.loses_with_scale else _figure(speed.computing_seconds),
        _figure(speed.communication_seconds),
        NOT_AVAILABLE if ranged else _figure(speed.exposed_seconds),
        ends(speed.step_seconds, _figure),
        ends(speed.tokens_per_second_per_gpu, rate, -1),
        ends(share, lambda of_peak: f"{100 * of_peak:.{0 if ranged else 1}f}", -1),
        ends(gpu_hours_per_billion_tokens(speed), _figure),
        ends(energy, lambda spent: f"{spent:,.0f}"),
    ]


def _reasons_and_next_steps(answer: Answer) -> Iterator[str]:
    """After a search: why the others lose, what was not tried, what is uncertain, and what to type."""
    found = answer.found
    assert found is not None
    rejected = [[one.label, why] for one, why in found.rejected(answer.best)]
    same = sum(reason.startswith(SAME) for reason in found.left_out.values())
    by_reason = grouped((why, name) for name, why in found.left_out.items() if not why.startswith(SAME))
    left_out = [[f"{same} backends", "shard as others do (--json names them)"]] if same else []
    left_out += [[listed(names, NAMED), reason] for reason, names in by_reason.items()]
    for headers, rows in (
        (("Why not the others", "reason"), rejected),
        (("Not considered", "reason"), left_out),
        (("Uncertain", "what"), [list(pair) for pair in answer.uncertain]),
    ):
        if rows:
            yield from (*fitted(rows, headers).splitlines(), "")
    for title, lines in (
        ("Measure the best ones on one node", answer.commands["compare"]),
        ("Measure the best ones under Slurm", answer.commands["slurm"]),
    ):
        if lines:
            yield from (title, *(f"{COMMAND}{line}" for line in lines), "")


def _details(row: Prediction) -> list[str]:
    lines = formulae(row)
    cells = [[line["quantity"], _detail(line)] for line in lines]
    head, rule, *values = fitted(cells, ["what", "value"], alignments={"value": "right"}).splitlines()
    title = f"{row.cell}, line by line (bytes unless said otherwise)"
    body: list[str] = []
    for line, text in zip(lines, values, strict=True):
        origin = "; source: ".join(filter(None, (line["formula"], line["source"])))
        body += [text, *_folded(origin, INDENT)]
    return [title, head, rule, *body, ""]


def _detail(line: Mapping[str, Any]) -> str:
    if "bytes" in line:
        return f"{line['bytes']:,}"
    return f"{line['seconds'] * 1000:,.3f} ms" if "seconds" in line else f"{line['ratio']:.3g}"


def _tabulated(table: list[list[str]], headers: list[str]) -> list[str]:
    """All but the first column are figures."""
    return fitted(table, headers, alignments=dict.fromkeys(headers[1:], "right")).splitlines()


def _wrapped(line: str) -> list[str]:
    if line.startswith(COMMAND) or len(line) <= line_width():  # to be copied, or fits
        return [line]
    return _folded(line) or [line]


def _folded(text: str, indent: str = "") -> list[str]:
    return wrap(
        text, line_width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


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


def _span(values: Iterable[float]) -> str:
    return " to ".join(dict.fromkeys(map(_figure, values)))


def _figure(value: float | None) -> str:
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
