"""What people do where nothing fits, each with what is predicted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.backends import registry
from harness.backends.registry import Entry
from harness.errors import JobError
from harness.job.batch import cell_layout, job_layout
from harness.job.job import Job, TrainingSection
from harness.judge.wording import counted, listed
from harness.plan import search
from harness.plan.hardware import ranks_per_node
from harness.plan.prediction import Prediction, Predictors
from harness.plan.question import BATCH, Question
from harness.plan.scenario import with_values
from harness.tell.formats import gigabytes

CHECKPOINTED, CHUNKED = "activation checkpointing", "a chunked loss"
RELIEFS: Mapping[str, Mapping[str, Any]] = {
    CHECKPOINTED: {"training.activation_checkpointing": True},
    CHUNKED: {"loss.chunk_tokens": 1024},
}
"""What leaves the training as it is, and goes along with each other way."""
CHUNKED_SHARE = 0.05
"""Of the memory, from which one copy of the logits in fp32 makes a chunked loss worth trying."""
STATES: Mapping[str, Mapping[str, Any]] = {
    "8-bit AdamW": {"optimizer.kind": "adamw-8bit"},
    "bf16 without fp32 masters": {"training.precision": "bf16"},
}
LORA: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"adapter.kind": "lora", "adapter.base_dtype": "bf16"},
    "QLoRA": {"adapter.kind": "lora", "adapter.base_dtype": "nf4"},
}
LORA_OF_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {**LORA["LoRA"], "adapter.targets": ["q_proj", "v_proj"]},
}
"""peft has no choice for every mixture, and 4 bits are for linear layers, which experts are not."""
OF_ADAPTED: Mapping[str, Mapping[str, Any]] = {
    "a frozen base in bf16": {"adapter.base_dtype": "bf16"},
    "a frozen base in nf4 (QLoRA)": {"adapter.base_dtype": "nf4"},
}
"""For a job that trains adapters already."""
ROOM_SHARE = 0.1
"""Of the memory: a way that needs so much less than another gains something."""
COMMAND = "  "
"""Begins a line to type."""
OFFLOAD, MORE_GPUS, CONTEXT = "offload", "more GPUs", "context parallelism"
EACH_REDUCED = "gradients reduced in every micro-step"
SHARING = {"fsdp": "fsdp-cp", "zero3": "ulysses-zero3"}
"""The same strategies with ranks of a node that share each sample."""
LONG_TOKENS = 8192
"""Of a sample, from which that is worth trying."""
MOST_TIMES = 64
"""So many times the GPUs are tried."""


@dataclass(frozen=True, kw_only=True)
class Alternative(Prediction):
    """One way out: a scenario that is not the one asked for."""

    name: str
    """Of what is changed besides `reliefs`; empty: nothing is."""
    reliefs: tuple[str, ...] = ()
    """Of `RELIEFS`, and another split of the batch."""
    settings: Mapping[str, Any]
    """What differs from the job, as `--set` takes it."""

    @property
    def called(self) -> str:
        """'LoRA, with activation checkpointing' where the job has none."""
        reliefs = listed(self.reliefs)
        return f"{self.name}, with {reliefs}" if self.name and reliefs else self.name or reliefs

    @property
    def states_alone(self) -> bool:
        """Whether that is all that is known of what it needs."""
        return self.memory is None and self.near_bounds is None

    @property
    def figures(self) -> str:
        """'zero3 on 4 ranks, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU', of what fits."""
        size = self.planned.micro_batch_size
        return f"{self.cell}, micro-batch {size}{search.if_joined(self.planned)}: {search.figures(self)}"

    def words(self) -> str:
        """'LoRA: zero3 on 4 ranks, micro-batch 1: 20.1 of 42.4 GB, about 2,100 tokens/s a GPU'."""
        if self.is_roomy:
            return f"{self.called}: {self.figures}"
        verdict, there = self.verdict, gigabytes(self.there_bytes)
        if verdict is not None and not verdict.fits:
            least = "" if self.memory else "at least " if self.memory_bounds else "model states alone take "
            size = f"{gigabytes(verdict.needed_bytes)} of {there} GB"
            return f"{self.called}: does not fit: {least}{size} ({self.label})"
        if self.states_alone:
            size = f"model states take {gigabytes(self.needed_bytes)} of {there} GB"
            return f"{self.called}: {size} ({self.label}); activations are not predicted"
        said = "may fit" if verdict is None else verdict.said
        return f"{self.called}: {said}: {search.figures(self, marked=False)} ({self.label})"

    def as_json(self) -> dict[str, Any]:
        scenario = self.planned
        return {
            "name": self.called,
            "backend": self.label,
            "world_size": scenario.world_size,
            "micro_batch_size": scenario.micro_batch_size,
            "settings": dict(self.settings),
            "fits": None if self.verdict is None else self.is_roomy,
            "verdict": self.verdict.said if self.verdict else None,
            "states_alone": self.states_alone,
            "device_bytes": self.needed_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "limit_bytes": self.there_bytes,
            "fabric": scenario.fabric.name if scenario.fabric and scenario.nodes > 1 else None,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu or None,
        }


def alternatives(
    question: Question, by: Predictors, given: TrainingSection | None = None
) -> list[Alternative]:
    """Ways out of an open question, the one that changes least first; each is what a search of it takes.

    That is the best of the strategies asked for that fits, else what needs least, with a chunked loss only
    where it does not fit well without. A way is left out that gains nothing over those before it; where none
    fits all stay. Where reliefs leave room, nothing else of the training is changed. One GPU alone shards
    nothing, and more GPUs come last there. Ways that the job takes already, that no strategy takes or that
    have no prediction are left out.

    given: what the job says of its batch, if it does; ways may split that, offload and divide samples then,
    which else the question has open.
    """
    is_new = given is not None or question.checkpointing == (False,)  # of which no search was made
    checkpoints = question.job.training.activation_checkpointing
    question = replace(question, checkpointing=(checkpoints,) if checkpoints else (False, True))
    ways = _Ways(question=question, by=by, given=given)
    plain, offloaded = ways.labels(question)
    found = ways.best("", {}, plain, chunked=not is_new)
    more = ways.on_more_gpus()
    last = more if question.gpus == 1 else []
    if any(one.leaves_room for one in found):
        return _worthwhile(found + more)
    if given and question.sequence_length >= LONG_TOKENS:
        shared = [SHARING[label] for label in plain if label in SHARING]
        entries = [registry.BUILT_IN[name] for name in shared]
        found += ways.best(CONTEXT, {}, list(ways.variants(question, entries)))
    found += [] if last else more
    if given or question.is_mixture:
        found += ways.best(OFFLOAD, {}, offloaded)
    changes = changes_of(question.job, is_mixture=question.is_mixture)
    for name, settings in changes.items():
        found += ways.best(name, settings, plain)
    if not any(one.is_roomy and one.name in changes for one in found):
        for name, settings in changes.items():
            found += [] if name in STATES else ways.best(name, settings, offloaded)
    return _worthwhile(found + last)


def alternative_lines(
    found: Sequence[Alternative], command: Callable[[Alternative], str] | None = None
) -> Iterator[str]:
    """Alternatives that fit, each with its command in a line of its own; where none does, what each needs."""
    fitting = [one for one in found if one.is_roomy]
    if found:
        yield "What fits instead" if fitting else "None of the usual alternatives fits either"
    for one in fitting or found:
        yield f"- {one.words()}"
        if command is not None and one.is_roomy:
            yield f"{COMMAND}{command(one)}"


def least_change(found: Sequence[Alternative]) -> Alternative | None:
    """The alternative that fits and changes least; None: none fits."""
    return next((one for one in found if one.is_roomy), None)


def nothing_fits(found: Sequence[Alternative]) -> str | None:
    """'nothing fits; with activation checkpointing: zero1 on 1 rank, micro-batch 1: 16.9 of ...', of the way
    that changes least; None: none fits."""
    one = least_change(found)
    if one is None:
        return None
    return f"nothing fits; {'' if one.name else 'with '}{one.called}: {one.figures}"


def reaches_more(found: Sequence[Alternative], than: float) -> list[str]:
    """'8-bit AdamW reaches more: zero3 on 8 ranks, ...' of the fastest way that fits; empty: none is faster.

    Of those that are faster by more than predictions can tell, only the kind that changes the training least.
    than: tokens per second and GPU of the answer.
    """
    faster = [
        one
        for one in found
        if one.is_roomy
        and one.name != MORE_GPUS
        and one.tokens_per_second_per_gpu * (1 - search.CLOSE_SHARE) > than
    ]
    least = min(map(_change, faster), default=None)
    ways = sorted((one for one in faster if _change(one) == least), key=search.by_speed)
    fastest = min(search.close_to_first(ways), key=lambda one: not one.leaves_room, default=None)
    if fastest is None:
        return []
    way = f"{fastest.called}," if fastest.name and fastest.reliefs else fastest.called
    return [f"{'' if fastest.name else 'With '}{way} reaches more: {fastest.figures}"]


def _change(one: Alternative) -> int:
    """How much of the training a way changes: nothing, what is kept of the weights, or what is trained."""
    return 0 if one.name in ("", OFFLOAD, CONTEXT) else 1 if one.name in STATES else 2


def changes_of(job: Job, *, is_mixture: bool) -> dict[str, Mapping[str, Any]]:
    """Changes of what is trained or kept, the smaller first."""
    if job.adapter.is_quantised:
        return dict(STATES)
    lora = LORA_OF_EXPERTS if is_mixture else LORA
    return {**STATES, **(OF_ADAPTED if job.adapter.is_present else lora)}


def logits_bytes(question: Question, samples: int = 1) -> int:
    """One copy in fp32 of what a micro-step of so many samples has; 0: it has no vocabulary."""
    return 4 * samples * question.sequence_length * (question.model.config.get("vocab_size") or 0)


def _worthwhile(found: Sequence[Alternative]) -> list[Alternative]:
    """Alternatives that fit and gain over each before them; all, if none fits."""
    kept: list[Alternative] = []
    for one in found:
        if one.is_roomy and all(_gains(one, over) for over in kept):
            kept.append(one)
    return kept or list(found)


def _gains(one: Alternative, over: Alternative) -> bool:
    """Whether a way that changes more takes fewer GPUs, is faster, or leaves much more room on as many."""
    rate, other = one.tokens_per_second_per_gpu, over.tokens_per_second_per_gpu
    if one.name == MORE_GPUS and over.name not in ("", OFFLOAD, CONTEXT, MORE_GPUS):
        return True  # which trains as asked
    if one.planned.world_size != over.planned.world_size:
        return one.planned.world_size < over.planned.world_size or rate * (1 - search.CLOSE_SHARE) > other
    if rate * (1 - search.CLOSE_SHARE) > other or (over.name == OFFLOAD and not other):  # offload is slow
        return True
    return over.needed_bytes - one.needed_bytes > ROOM_SHARE * one.there_bytes


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """Searches what a question becomes with other settings, elsewhere, or under some of its strategies."""

    question: Question
    by: Predictors
    given: TrainingSection | None

    def labels(self, asked: Question) -> tuple[list[str], list[str]]:
        """Of the strategies asked for, the usual ones if all are: as they are, and with offload."""
        alone = [registry.REFERENCE] if asked.gpus == 1 else []
        names = [*alone, *(search.USUAL if asked.names_all else asked.labels)]
        entries = [registry.parse(label)[0] for label in names if ":" not in label]
        more = [label for label in self.variants(asked, entries) if label not in names]
        offloaded = [label for label in more if registry.moving_parts(label)[0]]
        others = [] if asked.names_all else [label for label in more if label not in offloaded]
        return [*names, *others], offloaded

    def variants(self, asked: Question, entries: Iterable[Entry]) -> Iterator[str]:
        for entry in entries:
            yield from search.variants(entry, asked.gpus, asked.gpus_per_node, asked.job)

    def best(
        self,
        name: str,
        settings: Mapping[str, Any],
        labels: Sequence[str],
        asked: Question | None = None,
        *,
        chunked: bool = False,
    ) -> list[Alternative]:
        """The way without a chunked loss, or with one where it does not fit well without; both of a way that
        changes nothing else; empty: nothing is known of it, or the job has it. `chunked`: with it alone."""
        asked = changed(asked or self.question, settings)
        if asked is None or (settings and asked.job == self.question.job):
            return []
        there = asked.device.memory_bytes if asked.device else 0
        is_worth = logits_bytes(asked) >= CHUNKED_SHARE * there and not asked.is_mixture
        with_chunks = changed(asked, RELIEFS[CHUNKED]) if is_worth else None
        ways = [] if chunked else [(dict(settings), asked)]
        if with_chunks is not None and with_chunks.job != asked.job:
            ways.append(({**settings, **RELIEFS[CHUNKED]}, with_chunks))
        found: list[Alternative] = []
        for changes, each in ways:
            narrowed = replace(each, names_all=False, labels=tuple(labels))
            result = search.search(narrowed, self.by, only=labels)
            least = [*(one for one in result.fitting if one.barely_fits), *result.too_large]
            best = [one for one in result.best(1) if one.is_roomy] or least[:1]
            found += [way for one in best if (way := self._way(name, changes, one))]
            if name and found and found[-1].leaves_room:
                break
        fitting = [way for way in found if way.is_roomy]
        return fitting or sorted(found, key=lambda way: way.needed_bytes)[:1]

    def on_more_gpus(self) -> list[Alternative]:
        """On the smallest number of GPUs, doubled, on which one of them fits; else on the largest."""
        found: list[Alternative] = []
        times, base = 2, self.question
        per_node = base.ranks_per_node if base.nodes > 1 else ranks_per_node(base.device, None)
        grows = self.given is not None and self.given.global_batch_size is None
        while times <= MOST_TIMES and not any(one.is_roomy for one in found):
            tokens = base.tokens_per_step * (times if grows else 1)
            if tokens < base.sequence_length * base.gpus * times:
                break
            asked = replace(base, ranks_per_node=per_node, tokens=tokens).opened(base.gpus * times)
            asked = replace(asked, checkpointing=base.checkpointing)
            found = self.best(MORE_GPUS, {}, self.labels(asked)[0], asked) or found
            times *= 2
        return found

    def _way(self, name: str, settings: Mapping[str, Any], one: Prediction) -> Alternative | None:
        """None: it changes nothing."""
        reliefs, changes = [], dict(settings)
        scenario, job = one.planned, self.question.job
        if self.given is not None:
            training = self.given
            try:
                cut = cell_layout(
                    one.label, one.world_size, job_layout([one.label], one.world_size, training), training
                )
                size, steps = cut.micro_batch_size, cut.accumulation_steps
            except JobError:
                size, steps = 0, 0
            if size != scenario.micro_batch_size:
                reliefs.append(f"micro-batches of {counted(scenario.micro_batch_size, 'sample')}")
            if (size, steps) != (scenario.micro_batch_size, scenario.accumulation_steps):
                split = (scenario.samples * scenario.mesh.data_size, scenario.micro_batch_size, None)
                told = zip(BATCH, split, strict=True)
                changes |= {f"training.{key}": n for key, n in told if n != getattr(training, key)}
        if one.checkpointing and not job.training.activation_checkpointing:
            reliefs.append(CHECKPOINTED)
            changes |= RELIEFS[CHECKPOINTED]
        if "loss.chunk_tokens" in settings:
            reliefs.append(CHUNKED)
        if not (name or reliefs) and scenario.options.get(search.OPTION):
            name = EACH_REDUCED
        if not (name or reliefs):
            return None
        return Alternative(**vars(one), name=name, reliefs=tuple(reliefs), settings=changes)


def changed(question: Question, settings: Mapping[str, Any]) -> Question | None:
    """The question with other settings of its job; None: they contradict it."""
    experiment = with_values(question.experiment, settings)
    return None if experiment is None else replace(question, experiment=experiment)
