"""One answer to a question on one number of ranks: rows at its batch or the search of all that is open, ways
out where nothing fits, and the commands that go on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset, World
from harness.errors import HarnessError, JobError
from harness.forms.terms import STATE_KINDS
from harness.forms.textbook import SECONDS_PER_HOUR
from harness.job.batch import BatchLayout, cell_layout, job_layout, with_global_batch
from harness.judge.wording import CellName, listed, percent, ranks
from harness.nested import grouped
from harness.plan.alternatives import (
    CHUNKED,
    CHUNKED_SHARE,
    RELIEFS,
    Alternative,
    alternatives,
    changed,
    least_change,
    logits_bytes,
)
from harness.plan.hardware import TIGHT_SHARE, Device, load_hardware
from harness.plan.models import why_uneven
from harness.plan.prediction import Prediction, Predictors, predict, with_traffic
from harness.plan.question import BATCH, Question
from harness.plan.scenario import Scenario, why_not_planned
from harness.plan.search import (
    CLOSE_SHARE,
    TIE,
    USUAL,
    Found,
    distinct_backends,
    exposed_share,
    fewest_gpus,
    in_order,
    pointless,
    reducing_each,
    search,
    textbook_because,
)
from harness.plan.trust import Trust, trust_in
from harness.tell.formats import number

EXPOSED_SHARE = 0.2
"""Of a step: above it communication decides the speed."""
OF_ROUTING = ("activations, speed", "they depend on which tokens go to which expert")
SITE = "site.yaml"
MOST_STAGES = 16
"""Of a pipeline that nobody described."""
LOGITS_HELD = 2
"""Copies in fp32 that a loss holds at least, and a chunked one does not: logits and their log-softmax."""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What the person typed that commands repeat."""

    config: Path | None = None
    model: str | None = None
    """Of `--model`; None: the job has it."""
    assignments: tuple[str, ...] = ()
    place: Mapping[str, object] = field(default_factory=dict)
    """Options of the GPUs and of the network."""

    @property
    def named(self) -> list[str]:
        return option_words({"--config": self.config, "--model": self.model})

    @property
    def job(self) -> list[str]:
        """Words that name the model and the job."""
        return [*self.named, *(word for text in self.assignments for word in ("--set", text))]

    def without(self, settings: Mapping[str, Any] | Sequence[str]) -> Typed:
        """Without what sets one of these."""
        kept = (text for text in self.assignments if text.partition("=")[0].strip() not in settings)
        return replace(self, assignments=tuple(kept))


def option_words(given: Mapping[str, object]) -> list[str]:
    """Options that were given, as a command repeats them."""
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def set_texts(settings: Mapping[str, Any]) -> list[str]:
    """'SECTION.KEY=VALUE' for each, its values as YAML reads them."""
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings.items())
    return [f"{key}={text}" for key, text in texts]


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """`--set` for each."""
    return [word for text in set_texts(settings) for word in ("--set", text)]


def site_line(gpus_per_node: int, device: Device | None) -> str:
    """Writes the least that Slurm's scripts need, unless there is a site file; partition, account and modules
    are added by hand.

    With a GPU that every command knows `slurm submit` refuses what cannot fit, such as the reference.
    """
    name = device.name if device is not None else ""
    is_plain = shlex.quote(name) == name and "%" not in name
    gpu = f"gpu: {name}\\n" if is_plain and name in load_hardware().devices else ""
    return f"[ -e {SITE} ] || printf 'name: here\\ngpus_per_node: {gpus_per_node}\\n{gpu}' > {SITE}"


def planned_settings(scenario: Scenario) -> dict[str, Any]:
    """What a command sets so that it runs what was planned."""
    adapter, training = scenario.job.adapter, scenario.job.training
    base = {"adapter.base_dtype": adapter.base_dtype} if adapter.is_present and adapter.base_dtype else {}
    return {
        "runtime.preset": scenario.preset,
        "data.sequence_length": scenario.job.data.sequence_length,
        "training.precision": training.precision,
        "training.global_batch_size": scenario.samples * scenario.mesh.data_size,
        "training.micro_batch_size": scenario.micro_batch_size,
        "training.activation_checkpointing": training.activation_checkpointing,
        **base,
    }


def estimate_command(one: Alternative, typed: Typed) -> str:
    """What predicts it."""
    place = ["--backends", one.label, "--world-size", str(one.world_size), *set_words(one.settings)]
    job = typed.without(one.settings).job
    return shlex.join(["harness", "estimate", *job, *option_words(typed.place), *place])


def run_command(one: Alternative, typed: Typed) -> str:
    """What runs it: on one node, or under Slurm."""
    scenario, decided = one.planned, {**planned_settings(one.planned), **one.settings}
    job = [*typed.without(decided).job, *set_words(decided)]
    if scenario.nodes > 1:
        start = ["slurm", "render", "--site", SITE, "--backends", one.label, "--nodes", str(scenario.nodes)]
        end = ["--nproc", str(scenario.ranks_per_node), *job, "-o", "jobs"]
        render = shlex.join(["harness", *start, *end])
        return f"{site_line(scenario.ranks_per_node, scenario.device)} && {render}"
    start = ["run", "--backend", one.label, "--nproc", str(scenario.world_size)]
    return shlex.join(["harness", *start, *job])


def commands(question: Question, chosen: Sequence[Scenario], typed: Typed) -> dict[str, list[str]]:
    """Lines to type, one after the other: 'compare' on one node, empty for several, and 'slurm'.

    A comparison, and a Slurm matrix, for each set of settings among the chosen scenarios: backends of equal
    micro-batch and checkpointing share one; all of them record into one folder of runs.
    """
    compare: list[str] = []
    slurm: list[str] = []
    if not chosen:
        return {"compare": compare, "slurm": slurm}
    groups = grouped(
        ((one.micro_batch_size, one.job.training.activation_checkpointing), one) for one in chosen
    )
    for nth, group in enumerate(groups.values(), start=1):
        # Repetitions of a reference that one GPU cannot hold tell nothing.
        decided = {**planned_settings(group[0]), "compare.noise_runs": False}
        given = [
            word
            for text in typed.without([*decided, "training.steps"]).assignments
            for word in ("--set", text)
        ]
        shared = [*typed.named, "--backends", ",".join(one.label for one in group)]
        settings = [*given, *set_words(decided)]
        compare.append(shlex.join(["harness", "compare", *shared, "--nproc", str(question.gpus), *settings]))
        world = ["--nodes", str(question.nodes), "--nproc", str(question.gpus_per_node)]
        start, folder = ["harness", "slurm", "render", "--site", SITE], f"jobs-{nth}"
        slurm.append(shlex.join([*start, *shared, *world, *settings, "-o", folder]))
        slurm.append(shlex.join(["harness", "slurm", "submit", folder, "--wait"]))
    report = "harness report runs -o report.md"
    return {
        "compare": [*compare, report] if question.nodes == 1 else [],
        "slurm": [site_line(question.gpus_per_node, question.device), *slurm, report],
    }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is said of one number of ranks."""

    question: Question
    """Of these ranks; of a search, with the tokens of a step."""
    typed: Typed = Typed()
    rows: tuple[Prediction, ...]
    """At the batch of the question; of a search the best of each backend that fits, in order."""
    found: Found | None = None
    """Of the search; None: the batch is given, and nothing else is known."""
    instead: tuple[Alternative, ...] = ()
    """What people do where nothing fits, or only with offload."""
    other_preset: Preset | None = None
    other_best: Prediction | None = None
    """What would be recommended if that preset planned."""
    fewest: Prediction | None = None
    """What full sharding or one process fits with room on the fewest GPUs."""
    chunked: Prediction | None = None
    """What would be recommended of the usual strategies with a chunked loss, if that gains speed or room."""

    @property
    def best(self) -> tuple[Prediction, ...]:
        return self.found.best() if self.found else ()

    @property
    def whole(self) -> dict[str, Any] | None:
        """Tokens, hours, GPU hours and price of all steps; of 1e9 tokens where the job has a price alone.

        hours_between: the fewest and the most, where the speed is a range.
        """
        experiment, best = self.question.experiment, next(iter(self.best), None)
        steps, price = experiment.training.steps, experiment.compare.price_per_gpu_hour
        if best is None or best.speed is None or (steps is None and price is None):
            return None
        # Of the scenario: where the batch is given, the question has no tokens of a step.
        samples = best.planned.samples * best.planned.mesh.data_size
        tokens = samples * self.question.sequence_length
        count = 1e9 / tokens if steps is None else steps
        hours = count * best.speed.step_seconds / SECONDS_PER_HOUR
        gpu_hours = hours * self.question.gpus
        found: dict[str, Any] = {"tokens": round(count * tokens), "hours": hours, "gpu_hours": gpu_hours}
        if ends := best.speed.tokens_per_second_between:
            found["hours_between"] = [hours * best.tokens_per_second_per_gpu / end for end in reversed(ends)]
        return found if price is None else {**found, "price": gpu_hours * price.amount}

    @cached_property
    def uneven(self) -> str | None:
        """Why strategies that shard alike hold different states; None: the model is no mixture of experts."""
        if not self.question.is_mixture:
            return None
        known = (*self.rows, *(self.found.too_large if self.found else ()))
        held = {one.label: one.state_bytes(*STATE_KINDS) or 0 for one in known}
        return why_uneven(held, self.question.model.config)

    @cached_property
    def communication_bound(self) -> str | None:
        """How much of its step the best strategy waits for communication, which more tokens between
        collectives would hide; None: little, or ranks share samples."""
        best = next(iter(self.best), None)
        speed = None if best is None or best.planned.mesh.shares_samples else best.speed
        if speed is None or speed.exposed_seconds <= EXPOSED_SHARE * speed.step_seconds:
            return None
        scenario = self.best[0].planned
        tokens = scenario.micro_batch_size * self.question.sequence_length
        per = "micro-step"
        if scenario.strategy.stage < 2:
            tokens, per = tokens * scenario.accumulation_steps, "step"
        ratio = speed.communication_seconds / speed.computing_seconds
        enough = f"; as long at {round(tokens * ratio):,} tokens a GPU and {per}, not {tokens:,}"
        return (
            f"{exposed_share(speed, f'the step of {self.best[0].label}')}: it communicates "
            f"{number(speed.communication_seconds)} s and computes {number(speed.computing_seconds)} s"
            f"{enough if ratio > 1 else ''}"
        )

    @cached_property
    def commands(self) -> dict[str, list[str]]:
        return commands(self.question, [one.planned for one in self.best], self.typed)

    def command(self, one: Alternative) -> str:
        """Runs a way out, or predicts it where the batch was given."""
        return (run_command if self.question.is_open else estimate_command)(one, self.typed)

    @cached_property
    def uncertain(self) -> list[tuple[str, str]]:
        """What a measurement may turn round, and why."""
        if self.found is None or not self.best or self.best[0].most_memory is None:
            routed = [OF_ROUTING] if self.question.is_mixture else []
            return [*routed, *([("memory", self.uneven)] if self.uneven else [])]
        fitting, found = self.found.best_by_backend(), list[tuple[str, str]]()
        fastest = self.found.fastest or fitting[0]
        least = fastest.tokens_per_second_per_gpu * (1 - CLOSE_SHARE)
        close = [one.label for one in fitting[1:] if one.tokens_per_second_per_gpu >= least]
        if close and fitting[0].speed is not None:
            share = percent(CLOSE_SHARE)
            found.append(("speed", f"{listed(close)}: within {share} of {fitting[0].label}, {TIE}"))
        if tight := [one.label for one in fitting if one.is_tight]:
            free = f"less than {percent(1 - TIGHT_SHARE)} of the device free; `harness fit` measures it"
            found.append(("memory", f"{listed(tight)}: {free}"))
        if self.communication_bound:
            found.append(("speed", self.communication_bound))
        reasons = grouped(
            ((what, why), one.label)
            for one in self.found.fitting
            for what, why in (
                ("no speed", one.speed_unknown),
                ("speed from the bytes of the ZeRO paper", textbook_because(one)),
            )
            if why
        )
        found += [(what, f"{listed(labels)}: {why}") for (what, why), labels in reasons.items()]
        remarks = {remark for one in fitting if one.speed for remark in one.speed.remarks}
        return found + [
            ("speed rests on", remark) for remark in sorted(remarks) if remark.startswith("constants")
        ]


def answers(question: Question, typed: Typed = Typed(), by: Predictors | None = None) -> list[Answer]:
    """One for each number of ranks.

    With the batch given, rows at it, and with every strategy on a GPU what a search finds too. Raises
    HarnessError where nothing can be predicted.
    """
    by = by or Predictors()
    if question.is_open:
        return [_searched(question.opened(size), typed, by) for size in question.world_sizes]
    rows, found = estimate(question, by), []
    for size in question.world_sizes:
        own = tuple(row for row in rows if row.world_size == size)
        at_size = replace(question, world_sizes=(size,))
        is_searched = question.names_all and question.device is not None and question.torch_device != "cpu"
        found.append(
            Answer(
                question=at_size, typed=typed, rows=own, instead=ways_out(at_size, own, by),
                found=search(replace(question, tokens=None).opened(size), by) if is_searched else None,
            )
        )  # fmt: skip
    return found


def _searched(question: Question, typed: Typed, by: Predictors) -> Answer:
    typed = typed.without([f"training.{name}" for name in BATCH])
    if question.experiment.training.accumulation_steps is not None and typed.config is not None:
        typed = replace(typed, assignments=(*typed.assignments, "training.accumulation_steps=null"))
    found = search(question, by)
    if question.samples and not (found.fitting or found.too_large):
        reason = list(found.left_out.values())[-1].removeprefix("no prediction: ")
        raise HarnessError(
            f"no strategy can be recommended: {reason}; `harness estimate --backends` gives its states and "
            "traffic"
        )
    rows = tuple(with_traffic(one) for one in found.best_by_backend())
    has_room = any(one.offload == "none" and one.is_roomy for one in found.fitting)
    has_room = has_room or not question.samples_per_rank
    (other,) = (preset for preset in get_args(Preset) if preset != question.preset)
    answer = Answer(
        question=question, typed=typed, rows=rows, found=found, other_preset=other,
        instead=() if has_room else tuple(alternatives(question, by)),
    )  # fmt: skip
    if question.is_mixture:
        return answer
    best = answer.best
    others = search(question.of("runtime", preset=other), by, found.choices)
    return replace(
        answer,
        other_best=next(iter(others.best()), None),
        chunked=_chunked(question, best, by),
        fewest=fewest_gpus(question, by) if best else None,
    )


def _chunked(question: Question, best: Sequence[Prediction], by: Predictors) -> Prediction | None:
    """The best of the usual strategies with a chunked loss; None: it gains neither speed nor room.

    It is tried where logits are much of the memory, or what keeps it from leaving room.
    """
    if not best:
        return None
    first, asked = best[0], changed(question, RELIEFS[CHUNKED])
    logits = logits_bytes(question, first.planned.micro_batch_size)
    without = first.held_against_limit(first.needed_bytes - LOGITS_HELD * logits)
    is_worth = logits >= CHUNKED_SHARE * first.there_bytes or (first.is_tight and without.leaves_room)
    if not is_worth or asked is None or asked.job == question.job:
        return None
    one = next(iter(search(asked, by, only=(registry.REFERENCE, *USUAL)).best()), None)
    if one is None or one.barely_fits:
        return None
    rate, before = one.tokens_per_second_per_gpu, first.tokens_per_second_per_gpu
    gives_room = first.is_tight and not one.is_tight and rate >= (1 - CLOSE_SHARE) * before
    return one if gives_room or rate * (1 - CLOSE_SHARE) > before else None


def ways_out(question: Question, rows: Sequence[Prediction], by: Predictors) -> tuple[Alternative, ...]:
    """Where no row of a given batch fits; empty where something fits, or no GPU was named."""
    known = [row for row in rows if row.scenario and (row.memory or question.is_mixture)]
    if (
        not known
        or any(row.is_roomy for row in rows)
        or not question.device
        or question.torch_device == "cpu"
    ):
        return ()
    first = known[0].planned
    tokens = first.samples * first.mesh.data_size * question.sequence_length
    opened = replace(question, tokens=tokens).opened(first.world_size)
    return tuple(alternatives(opened, by, question.experiment.training))


def candidates(question: Question) -> Iterator[Prediction]:
    """The rows before anything is predicted, by world size and then by backend."""
    for world_size in question.world_sizes:
        for label in _labels(question, world_size):
            yield _planned(question, label, world_size)


def _labels(question: Question, world_size: int) -> list[str]:
    """Labels to predict; of every strategy also one process, and a pipeline of no more stages than blocks."""
    if not question.names_all:
        return list(question.labels)
    most = min(MOST_STAGES, len(question.model.layout.blocks))
    stages = max(n for n in range(1, most + 1) if world_size % n == 0)
    staged = {"pp": f"pp:stages={stages}"} if 1 < stages < world_size else {}
    alone = [registry.REFERENCE] if world_size == 1 else []
    return list(dict.fromkeys([*alone, *(staged.get(label, label) for label in question.labels)]))


def _planned(question: Question, label: str, world_size: int) -> Prediction:
    per_node, named = min(question.ranks_per_node, world_size), CellName(label, world_size)
    training, job = question.experiment.training, question.job
    layout: BatchLayout | None = None
    misfit = None
    try:
        layout = cell_layout(label, world_size, job_layout([label], world_size, training), training)
    except JobError as error:
        misfit = str(error)
    world = World.planned(world_size, per_node, question.torch_device)
    reason = why_not_planned(label, job, world, layout.micro_batch_size if layout else None, question.model)
    reason = reason or misfit
    if layout is None or reason is not None:
        return Prediction(named=named, unsupported=reason)
    scenario = question.scenario(
        label, with_global_batch(job, layout), world_size, torch_device=question.torch_device,
        micro_batch_size=layout.micro_batch_size, accumulation_steps=layout.accumulation_steps,
    )  # fmt: skip
    return Prediction(scenario=scenario, named=named)


def estimate(question: Question, by: Predictors | None = None) -> list[Prediction]:
    """Every row of a question at its batch. A row that cannot be predicted says why.

    Of every strategy, one whose whole gradients leave no room where they add up has a second row that reduces
    in every micro-step. Raises HarnessError if no strategy can run the job on any of the numbers of ranks.
    """
    rows = list(candidates(question))
    if all(row.scenario is None for row in rows):
        first, more = rows[0], len(rows) - 1
        raise HarnessError(
            f"{first.label} cannot run on {ranks(first.world_size)}: {first.unsupported}"
            + (f"; nor can any of the {more} others that were asked for" if more else "")
        )
    by = by or Predictors()
    found = []
    for row in rows:
        predicted = _predicted(row, by)
        each = None
        if question.names_all and predicted.verdict is not None and not predicted.leaves_room:
            each = reducing_each(row.label) if predicted.planned.accumulation_steps > 1 else None
        if each is None:
            found.append(predicted)
            continue
        found += predicted, _predicted(_planned(question, each, row.world_size), by)
    return found


def _predicted(row: Prediction, by: Predictors) -> Prediction:
    if row.scenario is None:
        return row
    return with_traffic(replace(predict(row.scenario, by), named=row.named))


def leading(rows: Sequence[Prediction]) -> list[Prediction]:
    """Strategies that a search compares, in its order: what fits, then what is nearest to it.

    Without a GPU, the usual ones first.
    """
    distinct = {entry.name for entry in distinct_backends(rows[0].world_size if rows else None)[0]}
    known = [row for row in rows if row.scenario is not None and row.backend in distinct]
    sensible = [row for row in known if not pointless(row.label, row.world_size)]
    if any(row.is_roomy for row in sensible) or not any(row.is_roomy for row in known):
        known = sensible or known
    if not any(row.verdict for row in known):
        return sorted(known, key=lambda row: USUAL.index(row.label) if row.label in USUAL else len(USUAL))
    fitting = in_order([row for row in known if row.verdict and row.verdict.fits])
    rest = [row for row in known if row not in fitting]
    rest.sort(key=lambda row: -row.verdict.margin_bytes if row.verdict else 0)
    return [*fitting, *rest]


def trust_of(rows: Sequence[Prediction]) -> Trust | None:
    """How wrong such predictions have been; None: of no row is more than states and traffic predicted."""
    known = [row for row in rows if row.scenario and (row.memory or row.near_bounds or row.speed)]
    if not known:
        return None
    share = max((row.speed.host_share for row in known if row.speed), default=None)
    return trust_in(
        *(row.planned for row in known), speed=share is not None, host_share=share,
        update_share=known[0].speed.host_update_share if known[0].speed else None,
        bounded=not any(row.memory for row in known),
    )  # fmt: skip


def trust_in_answers(found: Sequence[Answer], shown: Sequence[Prediction]) -> Trust | None:
    """How wrong predictions such as those shown have been; after a search, such as what it takes."""
    best = [one for answer in found if answer.question.is_open for one in answer.best[:1]]
    ways = [one for answer in found if (one := least_change(answer.instead))]
    return trust_of(best or ways[:1] or shown)
