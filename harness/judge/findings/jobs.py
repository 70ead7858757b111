"""Runs that trained another job, as a file, a launcher or a script gave it, or whose own parts matter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from harness.backends.libraries.facts import FACTS
from harness.backends.registry import REFERENCE
from harness.forms.layout import Layout, element_bytes
from harness.forms.terms import BETWEEN, GATHERING, SCALAR_BYTES, may_reduce
from harness.forms.textbook import hardware_flops_per_token
from harness.job.job import CODE_SWITCH
from harness.judge.agreement.causes import where
from harness.judge.agreement.job_equivalence import aligned_runs, job_differences
from harness.judge.agreement.parity import has_dropout
from harness.judge.distance import step_pairs
from harness.judge.findings.execution import layer_names
from harness.judge.findings.finding import Finding, Rules, found, labels, of_cells
from harness.judge.quantities import REDUCTIONS, geometry, recomputation, volume_differences
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import both, words
from harness.nested import differences, value_at
from harness.record import CommunicationPart, ModelLossPart, RankPart, Record, workload
from harness.record.run import LABELLED, OF_PASS, OF_UPDATE, PADDING, SAMPLER_SEED

CUT = {("training", name) for name in ("global_batch_size", "micro_batch_size", "accumulation_steps")}
"""Settings that weak scaling changes with the number of ranks."""

DRAWN = ("initial weights", "samples of step")
"""What a seed decides."""

OWN = {"learning-rate-differs": "that of rank 0", "optimizer-steps-differ": "the updates that were made"}
"""What the figures of a run differ from if no other run has any."""


def jobs_apart(runs: Runs) -> list[Finding]:
    # Of a script that made no step no job was seen.
    rows = [row for row in runs.rows if row.record.steps or row.record.observation is None]
    jobs = {row.record.job_id: row.record.job.model_dump() for row in rows}
    if len(jobs) < 2:
        return []
    first, *others = jobs.values()
    differing = dict.fromkeys(keys for other in others for keys, _, _ in differences(first, other))
    # Weak scaling, in which every rank of every run has equally many samples, is no mistake.
    records = [row.record for row in rows if row.record.backend.name != REFERENCE]
    each = {(r.job.training.global_batch_size or 0) / r.world.world_size for r in records}
    if differing.keys() <= CUT and len({r.world.world_size for r in records}) > 1 and len(each) == 1:
        return []
    values = {".".join(keys): [value_at(job, keys) for job in jobs.values()] for keys in differing}
    scripts = [row.record for row in rows if row.record.observation is not None]
    for other in scripts[1:] if not values else ():  # their rates and samples are part of their jobs
        values |= {d.field: [d.reference, d.given] for d in job_differences(scripts[0], other)}
    values.pop("job_id", None)
    started = {str((r.observation.command, r.observation.files)) for r in scripts if r.observation}
    seeds = len(started) == 1 and bool(values) and all(path.startswith(DRAWN) for path in values)
    shown = {path: list(map(words, given)) for path, given in values.items()}
    return [found("several-jobs", labels(rows), values, jobs=len(jobs), differing=shown, seeds=seeds)]


def another_job(row: JudgedRun) -> Iterator[Finding]:
    # `jobs_apart` reports once that a table holds several jobs.
    for difference in () if row.is_of_another_job else row.judgement.not_same_job:
        given, expected = both(difference.given, difference.reference)
        whose, other = "the reference", row.same_job_as
        if row.reference is not other:
            whose = "the others" if other is None else f"{other.label}, as the reference has no result"
        if difference.field == "optimizer steps":
            whose = "those due"
        if other is not None and other.record is row.record:
            whose = OWN.get(difference.kind, whose)
        yield found(
            difference.kind, row.cell, {"reference": difference.reference, "given": difference.given},
            "job" if difference.kind in ("samples-repeated", "samples-missing") else "",
            differs=difference.differs, whose=whose, given=given, expected=expected,
        )  # fmt: skip


def dropout(row: JudgedRun) -> Iterator[Finding]:
    """Dropout, whether layers were kept from it, and which ranks draw alike."""
    record, seen = row.record, row.record.observed
    if record.status != "ok" or not has_dropout(record) or (record.observation and row.reference is None):
        return
    idle = (seen.evaluating_in_training or []) if seen else []
    peers = _random_states(record)
    values = {"job": record.job.model.dropout, "live": seen.dropout if seen else None}
    yield found(
        "not-deterministic", row.cell, values | ({"evaluating": idle} if idle else {}),
        idle=layer_names(idle), draw_alike=_draw_alike(record),
        peers_differ=any(len(of_one) > 1 for of_one in peers.values()),
    )  # fmt: skip


def _random_states(record: Record) -> dict[int, set[str]]:
    """Random states in which the ranks of each data rank begin to train; {}: not all are known."""
    peers = dict[int, set[str]]()
    for rank in record.ranks if len(record.ranks) > 1 else ():
        if rank.random_state is None:
            return {}
        peers.setdefault(record.world.mesh.data_rank(rank.rank), set()).add(rank.random_state)
    return peers


def _draw_alike(record: Record) -> bool:
    peers = _random_states(record)
    return len(peers) > 1 and len(set().union(*peers.values())) == 1


def masks_alike(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that seeds its ranks alike; the Trainer does so itself."""
    seen = row.record.observation
    if seen is not None and seen.masks_repeated > 1 and has_dropout(row.record):
        yield found("masks-alike", row.cell, {"steps": seen.masks_repeated}, "steps")
    if seen is not None and TRAINER not in seen.frameworks and has_dropout(row.record):
        if _draw_alike(row.record) and not _on_same_samples(row.record):
            values = {"ranks": row.record.world.world_size, "dropout": row.record.job.model.dropout}
            yield found("masks-alike", row.cell, values, "ranks")


def batch_split(runs: Runs) -> list[Finding]:
    """One per world size with different splits.

    Where ranks share samples the batch is cut over fewer data ranks: only runs with as many are alike.
    """
    layouts: dict[tuple[int, int], dict[str, list[str]]] = {}
    for row in runs.rows:
        world = row.record.world
        if row.record.backend.name != REFERENCE and row.record.status == "ok":
            split = f"{world.micro_batch_size} x {world.accumulation_steps}"
            splits = layouts.setdefault((world.world_size, world.data_size), {})
            splits.setdefault(split, []).append(row.backend)
    return [
        found(
            "micro-batch-differs", tuple(sorted({one for each in splits.values() for one in each})), splits,
            size=size, splits=sorted(splits),
        )
        for (size, _), splits in layouts.items()
        if len(splits) > 1
    ]  # fmt: skip


def accumulation(row: JudgedRun) -> Iterator[Finding]:
    asked = row.record.world.accumulation_steps
    effective = row.record.backend.effective
    given = effective.accumulation_steps if effective else asked
    if given != asked:
        yield found("accumulation-differs", row.cell, {"asked": asked, "given": given})


LARGEST_RATIO = 1.1


def weak_scaling(runs: Runs) -> list[Finding]:
    """At most one finding: of the runs on each number of ranks, whose models grow with it."""
    records = [r.record for r in runs.rows if r.record.status == "ok" and r.record.backend.name != REFERENCE]
    sizes = sorted({record.world.world_size for record in records})
    models = [{r.job.model.model_dump_json() for r in records if r.world.world_size == n} for n in sizes]
    if len(sizes) < 2 or any(len(of_size) != 1 for of_size in models):
        return []
    first = [next(record for record in records if record.world.world_size == size) for size in sizes]
    parameters = [record.model.parameters if record.model else 0 for record in first]
    known = [amount for record in first if (amount := work_per_rank(record)) is not None]
    grows = all(one < other for one, other in pairwise(parameters))
    if not grows or len(known) < len(first) or max(known) <= LARGEST_RATIO * min(known):
        return []
    values = {"world_sizes": sizes, "parameters": parameters, "flops_per_rank_and_step": known}
    about = tuple(sorted({record.backend.label for record in records}))
    return [found("uneven-weak-scaling", about, values, by_size=list(zip(sizes, known, strict=True)))]


def work_per_rank(record: Record) -> float | None:
    """FLOPs that a rank computes in a step; None where the geometry is not known."""
    shape, batch = geometry(record), record.job.training.global_batch_size
    if shape is None or batch is None or record.model is None:
        return None
    each = hardware_flops_per_token(shape, recomputation=recomputation(record))
    return each * shape.sequence_length * batch / record.world.world_size


AS_GIVEN = "exactly-as-given"


def as_given(runs: Runs) -> Iterator[Finding]:
    """One for each cell that ran a file exactly as given, with its settings that others do not have."""
    as_given = [row for row in runs.rows if (part := row.record.backend.given) and part.mode == AS_GIVEN]
    other_jobs = {row.record.job_id for row in runs.rows if row not in as_given and not row.is_reference}
    others = [  # a reference that only serves to judge rows exactly as given is none of them
        row.record
        for row in runs.rows
        if row not in as_given and (not row.is_reference or row.record.job_id in other_jobs)
    ]

    def rule(row: JudgedRun) -> Iterator[Finding]:
        part = row.record.backend.given
        if part is None or part.mode != AS_GIVEN or len({other.cell for other in runs.rows}) == 1:
            return
        pinned = {s.key: {"given": s.given, "used": s.used} for s in part.pinned if s.used is not None}
        unfair = {name: list(pair) for name, pair in _unfair(row.record, others).items()}
        yield found(AS_GIVEN, row.cell, {"file": part.file, "settings": unfair, "pinned": pinned})

    return of_cells(runs, rule)


def _unfair(record: Record, others: list[Record]) -> dict[str, tuple[object, object]]:
    """Settings with the row's value and that of the others: the job's, the cut of its batch, the preset."""
    other = next((one for one in others if one.world.world_size > 1), next(iter(others), None))
    if other is None:
        return {}
    mine, theirs = record.job.model_dump(mode="json"), other.job.model_dump(mode="json")
    unlike = {".".join(keys): (left, right) for keys, left, right in differences(mine, theirs)}
    for name in ("micro_batch_size", "accumulation_steps", "preset"):
        left, right = getattr(record.world, name), getattr(other.world, name)
        if left != right:
            unlike[name] = (left, right)
    return unlike


OVERRIDDEN = "launcher-settings-overridden"
NEUTRAL = ("", "no", "none", "false", "0", "default")
"""Values that switch nothing on, in small letters."""
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_CONFIG_DS_FIELDS")
"""They say that others of their kind follow, or count."""


def launcher(row: JudgedRun) -> Iterator[Finding]:
    """Settings of a launcher that the job contradicts or does not know."""
    if unlike := overridden(row.record):
        yield found(OVERRIDDEN, row.cell, {"overridden": list(unlike)}, settings=unlike)


def overridden(record: Record) -> dict[str, str | None]:
    """The launcher's settings without effect, as 'NAME=value', each with what ran instead where known."""
    training = record.job.training
    precision, clipping = training.precision, training.gradient_clipping
    ran = {
        "ACCELERATE_MIXED_PRECISION": precision.removesuffix("-mixed")
        if str(precision).endswith("-mixed")
        else "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(record.world.accumulation_steps),
        "ACCELERATE_GRADIENT_CLIPPING": "none" if clipping is None else str(clipping),
    }
    on_cpu = "ACCELERATE_USE_CPU" if record.world.device == "cpu" else None
    unlike: dict[str, str | None] = {}
    for name, value in record.environment.launcher_settings.items():
        if name in ran:
            if _number(value) != _number(ran[name]):
                unlike[f"{name}={value}"] = ran[name]
        elif value.lower() not in NEUTRAL and name not in (*SWITCHES, on_cpu):
            unlike[f"{name}={value}"] = None
    return unlike


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text.lower()


def faulty_version(row: JudgedRun) -> Iterator[Finding]:
    """One finding per fact about a library of the run's version that makes it train something else."""
    record = row.record
    strategy = workload.known_strategy(record)
    for fact in FACTS if strategy is not None and strategy.zero_stage is not None else ():
        version = record.backend.versions.get(fact.library)
        if fact.effect != "wrong" or version is None or strategy is None or strategy.zero_stage is None:
            continue
        training = record.job.training
        concerned = fact.concerns(
            strategy.zero_stage, training.held_precision, record.world.accumulation_steps
        )
        if fact.includes(version) and concerned:
            values = {"fact": fact.id, "version": version, "versions": fact.versions, "source": fact.source}
            yield found("faulty-version", row.cell, values, library=fact.library, what=fact.what)


def spoilt(runs: Runs) -> Iterator[Finding]:
    """Runs that something else changed while they ran."""
    for name, field in (("code-changed", "code_changed"), ("events-unreadable", "broken_event_lines")):
        rows = {row: count for row in runs.rows if (count := getattr(row.record.environment, field))}
        if rows:
            ids = [row.record.run_id for row in rows]
            yield found(name, labels(list(rows)), {"runs": ids}, count=sum(rows.values()))


def custom_code(runs: Runs) -> list[Finding]:
    ran = [row for row in runs.rows if row.record.job.model.trust_remote_code]
    if not ran:
        return []
    model = ran[0].record.job.model
    values = {"model": model.name, "revision": model.revision}
    return [found("custom-code", labels(ran), values, switch=CODE_SWITCH)]


def batch_norm(row: JudgedRun) -> Iterator[Finding]:
    layers, record = workload.batch_statistics(row.record), row.record
    if not layers or record.status not in ("ok", "diverged") or record.backend.name == REFERENCE:
        return
    if record.world.world_size * record.world.accumulation_steps == 1:  # they normalise over the whole batch
        return
    reference = row.reference.record if row.reference else None
    if reference is not None and not workload.depends_on_split(reference):
        return  # as measured: these layers keep statistics and do not use the batch's
    values = {
        "layers": len(layers),
        "micro_batch_size": record.world.micro_batch_size,
        "reference_micro_batch_size": reference.world.micro_batch_size if reference else None,
    }
    another = reference is not None and workload.is_another_computation(record, reference)
    yield found("batch-norm", row.cell, values, another=another, ranks=record.world.world_size)


def split_decides(row: JudgedRun) -> Iterator[Finding]:
    """A loss that is another one on the whole batch, of a run that was judged by the ranks' split."""
    if row.whole is None or row.noise is None or row.judgement.parity in ("diverged", "unjudged"):
        return
    whole_batch, record = aligned_runs(row.whole.record, row.record)
    pairs = step_pairs(whole_batch, record)
    beyond = np.nan_to_num(pairs.loss_differences)
    if workload.batch_statistics(row.record) or not any(beyond > row.noise.widest(record).loss):
        return
    index = int(beyond.argmax())
    whole, loss = (float(losses[index]) for losses in pairs.losses)
    values = {
        "step": record.steps[index].step, "loss": loss, "whole_batch_loss": whole,
        "samples_at_once": row.at_once, "whole_batch": workload.samples_at_once(row.whole.record),
    }  # fmt: skip
    yield found("loss-depends-on-split", row.cell, values)


BYTES = "bytes"


def bytes_for_pretrained(runs: Runs) -> list[Finding]:
    jobs = [(row, row.record.job.model, row.record.job.data) for row in runs.rows]
    pretrained = [one for one in jobs if one[1].name is not None and one[1].weights != "random"]
    fed = [row for row, _, data in pretrained if data.is_tokenized and data.tokenizer == BYTES]
    if not fed:
        return []
    values = {"model": fed[0].record.job.model.name, "tokenizer": BYTES}
    return [found("bytes-for-pretrained", labels(fed), values)]


def nothing_updated(row: JudgedRun) -> Iterator[Finding]:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return
    rates = [rate for group in record.observation.learning_rates for rate in group if rate is not None]
    values = {
        "updated_tensors": seen.updated_tensors,
        "tensors": sum(group.get("tensors", 0) for group in seen.optimizer_groups),
    }
    if names := record.observation.replaced:
        yield found("nothing-updated", row.cell, {"parameters": names}, "replaced")
    if seen.updated_tensors == 0 and not seen.optimizer_steps:
        own = any(group.get("parameters") for group in seen.optimizer_groups)
        counted = record.world.world_size > 1 and record.probed_steps > 0
        keeps = record.observation.base in (None, "ddp")  # gradients also where none is reduced
        reduced = any(part.op not in GATHERING and _may_hold_gradients(part) for part in record.comm)
        unreduced = counted and not keeps and not reduced
        case = "not-reduced" if unreduced else "no-gradient" if own else "not-the-models"
        yield found("nothing-updated", row.cell, values, case)
    elif rates and not any(rates) and len(record.steps) > 1:
        yield found("nothing-updated", row.cell, values, "no-rate", steps=len(record.steps))
    elif rates:
        each = zip(*record.observation.learning_rates, strict=False)
        of_steps = [[rate for rate in of if rate is not None] for of in each]
        last = next((n for n, of in enumerate(reversed(of_steps)) if any(of) or not of), 0)
        if last > 1:
            yield found(
                "nothing-updated", row.cell, values, "rate-over", step=len(of_steps) - last, last=last
            )


def gradients_kept(row: JudgedRun) -> Iterator[Finding]:
    seen = row.record.observation
    if seen is not None and seen.kept_gradients > 1:
        yield found("gradients-kept", row.cell, {"updates": seen.kept_gradients})


def scheduler_calls(row: JudgedRun) -> Iterator[Finding]:
    seen, world = row.record.observation, row.record.world
    if seen is not None and (calls := seen.scheduler_calls) is not None:
        once = {"micro-step": world.accumulation_steps, "process": world.world_size}
        per = [name for name, count in once.items() if count == calls]
        moves = any(len({*of} - {None}) > 1 for of in seen.learning_rates)  # a script may set what it reads
        if calls or not (moves or "deepspeed" in seen.frameworks):  # whose own takes an optimizer's place
            yield found("scheduler-calls", row.cell, {"calls": calls}, per=per)


def script_modes(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that evaluates in training mode, or trains in the mode of its evaluations."""
    seen, count = row.record.observation, len(row.record.steps)
    if seen is None:
        return
    if 0 < 2 * len(seen.evaluations_in_training) <= count:  # else they belong to each step
        values = {"steps": seen.evaluations_in_training}
        yield found("mode-differs", row.cell, values, "script-evaluates")
    if seen.evaluating_since:
        yield found("mode-differs", row.cell, {"step": seen.evaluating_since}, "script-trains")


def empty_group(row: JudgedRun) -> Iterator[Finding]:
    record, seen = row.record, row.record.observed
    if record.observation is None or seen is None:
        return
    counts = [group.get("tensors") for group in seen.optimizer_groups]
    empty = [place for place, count in enumerate(counts) if count == 0]
    if _trains_no_vector(record.layout):  # as with LoRA: a group of them is rightly empty
        empty = [place for place in empty if seen.optimizer_groups[place].get("weight_decay")]
    if empty:
        yield found("empty-group", row.cell, {"empty": empty, "tensors": counts})


def _may_hold_gradients(part: CommunicationPart, *, least: int = SCALAR_BYTES) -> bool:
    """Whether a collective took place where gradients are exchanged, on more than `least` bytes."""
    return may_reduce(part.phase, part.op) and (part.largest_bytes or part.payload_bytes) > least


def _trains_no_vector(layout: Layout | None) -> bool:
    frozen = set(layout.frozen) if layout is not None else set()
    return layout is not None and all(len(p.shape) > 1 for p in layout.parameters if p.name not in frozen)


def ranks_alone(row: JudgedRun) -> Iterator[Finding]:
    record = row.record
    if record.observation is None or record.world.world_size == 1:
        return
    if not record.probed_steps or record.observation.synchronised_at is not None:
        return  # nothing was counted, or they average what they have every now and then
    wrapped = record.observation.base is not None
    if not any(_may_hold_gradients(part, least=0 if wrapped else SCALAR_BYTES) for part in record.comm):
        values = {"ranks": record.world.world_size, "same_samples": _on_same_samples(record)}
        yield found("ranks-alone", row.cell, values, skips=record.observation.base == "ddp")


TRAINER = "transformers.Trainer"
DIVIDING = {"accelerate", "lightning", "deepspeed", TRAINER}
"""Libraries that divide by the number of micro-steps that they were given, how many a step has or not."""
SAME_RATIO = 0.02
"""Relative: ratios of losses, which low precision rounds."""


def loss_divided(row: JudgedRun) -> Iterator[Finding]:
    """Find a script whose gradients are not those of the mean over its micro-steps."""
    seen, count = row.record.observation, row.record.world.accumulation_steps
    lost, rest = divmod(seen.discarded, max(1, len(row.record.steps))) if seen is not None else (0, 1)
    taken, ranks = [1 / (count + lost)] * 2, row.record.ranks
    # A script may add them up in buffers of its own: then it updates by what no pass left.
    kept = [rank.step_figures.get(OF_PASS) == rank.step_figures.get(OF_UPDATE, []) for rank in ranks]
    if lost and not rest and all(kept) and all(ends == taken for rank in ranks for ends in rank.loss_factors):
        yield found("loss-not-divided", row.cell, {"micro_steps": count + lost}, "zeroed")
    ratio = seen.backward_ratio if seen is not None else None
    if seen is None or ratio is None or count < 2:
        return
    for case, due in (("sum", float(count)), ("twice", 1 / count)):
        if abs(ratio / due - 1) <= SAME_RATIO:
            values = {"micro_steps": count, "ratio": ratio}
            yield found("loss-not-divided", row.cell, values, case)
    libraries = {name.partition(" ")[0] for name in seen.frameworks} & DIVIDING
    short = {n: r for n, r in seen.shorter_ratios.items() if abs(r * count / n - 1) <= SAME_RATIO}
    if abs(ratio - 1) <= SAME_RATIO and short and not libraries:
        told = {"micro_steps": count, "ratios": short}
        yield found("loss-not-divided", row.cell, told, "shorter", first=min(short))


def losses_apart(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that multiplies losses differently by rank, or a micro-step's by 0, in every step.

    Means over unlike numbers of samples or targets are weighted by these.
    """
    record, seen = row.record, row.record.observation
    steps = [*zip(*(rank.loss_factors for rank in record.ranks), strict=False)]
    if seen is None or len(steps) < 2 or None in {ends for of in steps for ends in of if ends is None}:
        return
    if all(least == 0 < most for of in steps for least, most in of):
        micro_steps = {"micro_steps": record.world.accumulation_steps}
        yield found("loss-not-divided", row.cell, micro_steps, "nothing")
        return
    factors = {
        rank.rank: [max(of[place], key=abs) for of in steps] for place, rank in enumerate(record.ranks)
    }
    usual = Counter(of[0] for of in factors.values()).most_common(1)[0][0]
    first = next(rank for rank in record.ranks if factors[rank.rank][0] == usual)
    apart = [rank for rank in record.ranks if _is_weighted(first, rank, factors)]
    if apart and (seen.parts > 1 or factors[apart[0].rank][0] * usual < 0) and not any(ranks_alone(row)):
        told = {"ranks": [one.rank for one in apart], "factor": factors[apart[0].rank][0], "usual": usual}
        yield found("loss-not-divided", row.cell, told, "by-rank")


def _is_weighted(first: RankPart, rank: RankPart, factors: Mapping[int, Sequence[float]]) -> bool:
    """Whether a rank takes its losses as many times as another in every step, not once, and not as the sizes
    of their batches are."""
    pairs = [*zip(factors[rank.rank], factors[first.rank], strict=True)]
    if not all(usual for _, usual in pairs):
        return False
    shares = [own / usual for own, usual in pairs]
    if abs(shares[0] - 1) <= SAME_RATIO or any(
        abs(s - shares[0]) > SAME_RATIO * abs(shares[0]) for s in shares
    ):
        return False
    sizes = ((one.samples, one.target_tokens) for one in (rank, first))
    return not any(
        own and all(
            abs(share * other - size) <= SAME_RATIO * size
            for share, size, other in zip(shares, own, others, strict=False)
        )
        for own, others in zip(*sizes, strict=True)
    )  # fmt: skip


def twice(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that repeats what its library does, or leaves out what the library leaves to it."""
    seen, size = row.record.observation, row.record.world.world_size
    if seen is None:
        return
    if seen.labels_ahead:
        yield found("labels-misplaced", row.cell, {"steps": seen.labels_ahead}, "ahead")
    if seen.world_left_out > 1:
        yield found("loss-not-divided", row.cell, {"ranks": size}, "world")
    if seen.parts > size:
        yield found("samples-missing", row.cell, {"parts": seen.parts, "ranks": size}, "twice")
    drawn = (rank.step_figures.get(SAMPLER_SEED, []) for rank in row.record.ranks)
    seeds = [next((int(seed) for seed in of_rank if seed is not None), None) for of_rank in drawn]
    if None not in seeds and len(set(seeds)) > 1:
        yield found("samples-missing", row.cell, {"seeds": seeds}, "seeds")


def padding(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that trains on all padding of some ranks and on none of the others."""
    steps = {
        rank.rank: [
            (own, of)
            for own, of in zip(*(rank.step_figures.get(key, []) for key in (LABELLED, PADDING)), strict=False)
            if own is not None and of
        ]
        for rank in (row.record.ranks if row.record.observation is not None else ())
    }
    ranks = [rank for rank, pairs in steps.items() if pairs and all(own == of for own, of in pairs)]
    others = [rank for rank, pairs in steps.items() if pairs and not any(own for own, _ in pairs)]
    are_all = len(ranks) + len(others) == len(steps) and all(len(p) > 1 for p in steps.values())
    if ranks and others and are_all:
        yield found("labels-misplaced", row.cell, {"ranks": ranks}, "padding", others=others)


def epochs_alike(row: JudgedRun) -> Iterator[Finding]:
    """Find a script whose sampler shuffles every epoch alike, so that its batches come again in order."""
    seen, hashes = row.record.observation, [step.sample_hashes for step in row.record.steps]
    if seen is None or not seen.repeated_epochs or None in hashes:
        return
    periods = (n for n in range(1, 1 + len(hashes) // 2) if hashes[n:] == hashes[:-n])
    if (period := next(periods, None)) is not None:
        values = {"steps": len(hashes), "period": period, "repeated_epochs": seen.repeated_epochs}
        yield found("epochs-alike", row.cell, values)


def outside(row: JudgedRun) -> Iterator[Finding]:
    """Find a script that wraps one module and trains another, or what it adds to it, without exchanging its
    gradients."""
    record, seen = row.record, row.record.observation
    sizes_of = {p.name: math.prod(p.shape) for p in record.layout.parameters} if record.layout else {}
    own = sum(sizes_of.get(name, 0) for name in seen.added) if seen is not None else 0
    count = own + (sum(seen.unwrapped.values()) if seen is not None else 0)
    if seen is None or not count or seen.base is None or seen.synchronised_at is not None:
        return
    probed = record.probed_steps
    by_hand = any(
        part.op not in GATHERING and (part.largest_bytes or part.payload_bytes) > min(SCALAR_BYTES, count)
        for part in record.comm
        if part.phase in (BETWEEN, "forward")
    )
    trained = record.layout.trained_count - own if record.layout else 0
    least = {"backward": 0, "step": SCALAR_BYTES}  # an update exchanges norms and flags of so few bytes
    ops = [part for part in record.comm if part.rank == 0 and part.op in REDUCTIONS
           and (part.largest_bytes or part.payload_bytes) > least.get(part.phase, math.inf)]  # fmt: skip
    if any(part.op == "reduce_scatter" for part in ops):  # of wrapped units, which are padded
        ops = [part for part in ops if part.op != "reduce_scatter"]
    reduced = sum(part.payload_bytes / (element_bytes(part.dtype) or 4) for part in ops) / max(1, probed)
    # Of the wrapped module alone: once, or in every micro-step.
    beside = reduced - round(reduced / trained) * trained if trained else reduced
    apart = not seen.unwrapped or abs(beside) < count / 2
    if record.world.world_size > 1 and probed and not by_hand and apart:
        values = {"elements": count, "modules": [*seen.unwrapped], "added": seen.added}
        yield found("trained-outside", row.cell, values)


def ranks_drift(row: JudgedRun) -> Iterator[Finding]:
    """Find a script whose ranks reduce gradients over all of them, and hold weights, or scale gradients, of
    their own."""
    record, seen, size = row.record, row.record.observation, row.record.world.world_size
    if seen is None or size == 1:
        return
    sums = ([rank.step_figures.get(key, []) for rank in record.ranks] for key in (OF_PASS, OF_UPDATE))
    before, after = ([of for of in zip(*each, strict=False) if None not in of] for each in sums)
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if all(b)]
    summed, averaged = (
        len(pairs) > 1 and all(math.isclose(one, sum(b) / by, rel_tol=SUMMED) for b, a in pairs for one in a)
        for by in (1, size)
    )
    due = 1 / record.world.accumulation_steps
    taken = [ends for rank in record.ranks for ends in rank.loss_factors]
    if summed and taken and all(ends == [due, due] for ends in taken):
        yield found("gradient-scale", row.cell, {"ranks": size}, "script")
    parts = [part for part in record.comm if part.op in REDUCTIONS and _may_hold_gradients(part)]
    reduced = bool(parts) and {part.group_size for part in parts} == {size} and record.backend.claim
    if reduced and not summed and not averaged:
        factors = [[a / b for b, a in zip(*pair, strict=True)] for pair in pairs]
        if len(pairs) > 1 and all(max(of) - min(of) > SUMMED * max(map(abs, of)) for of in factors):
            yield found("clipped-otherwise", row.cell, {"factors": factors[0]}, "by-hand")
    is_cut = seen.base is not None and seen.base.startswith("fsdp")
    alike = len({rank.device_name for rank in record.ranks}) == 1  # kernels of others round otherwise
    # Weights that each rank moves by gradients of its own and moves back, as SAM does, differ by roundings.
    if (summed or averaged or reduced) and not is_cut and alike and not _share_passes(record):
        for step, names in seen.weights_apart.items() if not seen.discarded else ():
            values = {"step": step, "parameters": names}
            yield found("replicas-differ", row.cell, values, "script", where=where(record, names))


def passes_apart(row: JudgedRun) -> Iterator[Finding]:
    """Find further backward passes of a forward pass under DDP, which reduces in the first one alone."""
    record, seen = row.record, row.record.observation
    if seen is None or not seen.further_passes or seen.base != "ddp" or record.world.world_size == 1:
        return
    # One reduction of each gradient, under a strategy that is known; else the ranks' weights show it.
    if volume_differences(record) == [] or any(seen.weights_apart):
        yield found("passes-not-reduced", row.cell, {"further_passes": seen.further_passes})


def samples_repeated(row: JudgedRun) -> Iterator[Finding]:
    record = row.record
    if record.observation is None or record.observation.base is None or any(ranks_alone(row)):
        return
    if _share_passes(record) or not record.ranks:
        return
    values = {"ranks": record.world.world_size, "steps": len(record.ranks[0].batch_digests)}
    if _on_same_samples(record):
        yield found("samples-repeated", row.cell, values, "script")
        return
    fed = [rank.batch_hash_sums for rank in record.ranks]
    for first, last in pairwise([*record.observation.shuffles, len(record.steps)]):
        sums = {sum(int(h or "0", 16) for h in of_rank[first:last]) % 2**64 for of_rank in fed}
        if record.observation.parts == 1 < min(last - first, len(fed)) and len(sums) == 1 and sums != {0}:
            yield found("samples-repeated", row.cell, values | {"steps": last - first}, "whole")
            return


def _share_passes(record: Record) -> bool:
    """Whether ranks cut layers or samples between them: they talk in the forward pass."""
    return any(part.phase == "forward" and part.op not in GATHERING for part in record.comm)


def _on_same_samples(record: Record) -> bool:
    fed = [rank.batch_digests for rank in record.ranks]
    return len(fed) > 1 and bool(fed[0]) and all(fed[0]) and all(digests == fed[0] for digests in fed)


SUMMED = 1e-3
"""Relative: sums of a gradient, of ranks and of what they add up to."""
ROUNDING = 2.0**-23
"""Of fp32, in which both are summed."""
LOW_ROUNDING = 2.0**-8
"""Of bfloat16, the widest spacing of a precision that runs have."""
OF_A_TERM = 8
"""Roundings of one target's cross entropy: a maximum, exponentials, their sum, a logarithm, a difference."""


def labels_and_losses(runs: Runs) -> Iterator[Finding]:
    """One finding of each kind per job, about the backends that trained it."""
    for job_id in dict.fromkeys(row.record.job_id for row in runs.rows):
        rows = [row for row in runs.rows if row.record.job_id == job_id]
        misplaced = [row for row in rows if row.record.data and row.record.data.misplaced_labels]
        if misplaced and (data := misplaced[0].record.data) is not None:
            values: dict[str, Any] = {
                "misplaced_labels": data.misplaced_labels, "target_tokens": data.target_tokens,
                "targets": rows[0].record.job.data.targets,
            }  # fmt: skip
            yield found("labels-misplaced", labels(misplaced), values, "data")
        adding = [row for row in rows if _adds_loss(row)]
        if adding and (part := added_loss(adding[0].record)) is not None:
            values = {"model_loss": part.model, "job_loss": part.job, "targets": part.targets}
            yield found("model-adds-loss", labels(adding), values)


def _adds_loss(row: JudgedRun) -> bool:
    """Whether a model adds to its loss; what a backend's run shows alone is done to its outputs there."""
    reference = row.reference.record if row.reference is not None else row.record
    known = reference.observed is not None and reference.observed.model_loss is not None
    return added_loss(row.record) is not None and not (known and added_loss(reference) is None)


def added_loss(record: Record) -> ModelLossPart | None:
    """The two losses where they differ by more than fp32 sums of the same terms can.

    A pairwise sum of n terms is off by at most log2(n) roundings (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2); a logarithm of a softmax adds a few, and either side may be off. Wrappers of
    a run in low precision also round what the model returns, which the reference does not; a model whose
    weights are bf16 may sum in it.
    """
    part = record.observed.model_loss if record.observed else None
    if part is None:
        return None
    relative = 2 * (math.log2(part.targets) + OF_A_TERM) * ROUNDING
    precision = record.job.training.precision
    if precision == "bf16" or (record.backend.name != REFERENCE and precision != "fp32"):
        relative = max(relative, 2 * LOW_ROUNDING)
    return part if abs(part.model - part.job) > relative * abs(part.job) else None


RULES = Rules(
    of_runs=(another_job, dropout, accumulation, batch_norm, split_decides, faulty_version),
    of_cells=(
        launcher, nothing_updated, empty_group, ranks_alone, samples_repeated, masks_alike,
        gradients_kept, scheduler_calls, script_modes, loss_divided, losses_apart, twice, padding,
        epochs_alike, passes_apart, outside, ranks_drift,
    ),
    of_all=(
        jobs_apart, as_given, batch_split, spoilt, custom_code, bytes_for_pretrained, labels_and_losses,
        weak_scaling,
    ),
)  # fmt: skip
