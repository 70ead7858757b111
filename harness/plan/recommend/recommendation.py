"""The whole answer: the best variants, the few to take, what else is called for, and what is uncertain."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import Preset
from harness.errors import HarnessError
from harness.judge.wording import listed, percent
from harness.plan.alternatives import (
    CHUNKED,
    CHUNKED_SHARE,
    CONTEXT,
    MORE_GPUS,
    OFFLOAD,
    RELIEFS,
    Alternative,
    alternatives,
    bases,
    logits_bytes,
)
from harness.plan.architectures import mixture_of_experts
from harness.plan.command_words import SITE, option_words, planned_settings, run_command, set_words, site_line
from harness.plan.leading import CLOSE_SHARE, TIE, USUAL, distinct_backends
from harness.plan.limits import TIGHT_SHARE
from harness.plan.prediction import Predictors
from harness.plan.recommend.best_variants import BestVariants, best_variants
from harness.plan.recommend.guide import Advice, advise, fewer_tokens, guide_line
from harness.plan.recommend.of_experts import (
    OfExperts,
    advice_of_experts,
    of_experts,
    scenario_in,
    scenarios_in,
    states_as_json,
)
from harness.plan.recommend.predict import Configuration, scenario_of
from harness.plan.recommend.question import BATCH, RecommendRequest
from harness.plan.scenario import Scenario, with_settings
from harness.plan.time.speed import gpu_hours_per_billion_tokens, kilowatt_hours_per_billion_tokens
from harness.plan.trust import PUBLISHED, Trust, trust_in


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What the person typed that commands repeat."""

    config: Path | None = None
    assignments: tuple[str, ...] = ()
    model: str | None = None
    """Of `--model`; None: the job has it."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Lines to type, one after the other."""

    compare: tuple[str, ...]
    """On one node; empty for several."""
    slurm: tuple[str, ...]


def commands(question: RecommendRequest, chosen: Sequence[Scenario], typed: Typed) -> Commands:
    """A comparison, and a Slurm matrix, for each set of settings among the chosen scenarios.

    Backends of equal micro-batch and checkpointing share one; all of them record into one folder of runs.
    """
    groups: dict[tuple[int, bool | str], list[Scenario]] = {}
    for one in chosen:
        key = one.micro_batch_size, one.job.training.activation_checkpointing
        groups.setdefault(key, []).append(one)
    compare, slurm = [], []
    for number, group in enumerate(groups.values(), start=1):
        shared = [*option_words(_named(typed)), "--backends", ",".join(c.label for c in group)]
        settings = _settings(group[0], typed)
        compare.append(shlex.join(["harness", "compare", *shared, "--nproc", str(question.gpus), *settings]))
        folder = f"jobs-{number}"
        world = ["--nodes", str(question.nodes), "--nproc", str(question.gpus_per_node)]
        slurm.append(
            shlex.join(
                ["harness", "slurm", "render", "--site", SITE, *shared, *world, *settings, "-o", folder]
            )
        )
        slurm.append(shlex.join(["harness", "slurm", "submit", folder, "--wait"]))
    if not chosen:
        return Commands(compare=(), slurm=())
    report = "harness report runs -o report.md"
    return Commands(
        compare=(*compare, report) if question.nodes == 1 else (),
        slurm=(site_line(question.gpus_per_node, question.device), *slurm, report),
    )


def _given(typed: Typed) -> list[str]:
    """Of the model and of the job, as every command repeats it."""
    return option_words(_named(typed), typed.assignments)


def _named(typed: Typed) -> dict[str, object]:
    return {"--config": typed.config, "--model": typed.model}


def _settings(scenario: Scenario, typed: Typed) -> list[str]:
    decided = {
        **planned_settings(scenario),
        # Repetitions of a reference that one GPU cannot hold tell nothing.
        "compare.noise_runs": False,
    }
    given = [text for text in typed.assignments if text.partition("=")[0].strip() not in decided]
    return [*(word for text in given for word in ("--set", text)), *set_words(decided)]


TOP = 3


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What `harness recommend` says."""

    question: RecommendRequest
    variants: BestVariants
    best: tuple[Configuration, ...]
    """The best configuration of each of the best backends."""
    advice: Advice | None
    guide: str | None
    uncertain: tuple[str, ...]
    commands: Commands
    words: tuple[str, ...]
    """Of the model and of the job, as typed."""
    other_preset: Preset
    other_best: Configuration | None
    """What would be recommended if that preset planned."""
    chunked: Configuration | None = None
    """What would be recommended of the usual strategies with a chunked loss, if that gains speed or room."""
    instead: tuple[Alternative, ...] = ()
    """What people do where nothing fits, or only with offload."""
    fewer_tokens: tuple[str, ...] = ()
    """How few let full sharding fit, where it does not."""
    trust: Trust | None = None
    """How wrong such answers have been; None: nothing fits."""
    experts: OfExperts | None = None
    """Of a mixture of experts, in place of variants."""

    def as_json(self) -> dict[str, Any]:
        question, variants = self.question, self.variants
        return {
            "model": question.model.name,
            "parameters": question.model.parameters,
            "gpus": question.gpus,
            "gpus_per_node": question.gpus_per_node,
            "gpu": question.device.name,
            "fabric": question.network.name if question.network else None,
            "fabric_assumed": bool(question.network and question.network.assumed),
            "tokens_per_step": question.tokens_per_step,
            "sequence_length": question.sequence_length,
            "precision": question.job.training.precision,
            "preset": question.preset,
            "other_preset": {
                "preset": self.other_preset,
                "best": _as_json(question, self.other_best) if self.other_best else None,
            },
            "chunked_loss": {**RELIEFS[CHUNKED], "best": _as_json(question, self.chunked)}
            if self.chunked
            else None,
            "remarks": list(question.remarks),
            "with_room": _as_json(question, variants.with_room) if variants.with_room else None,
            "best": [_as_json(question, c) for c in self.best] + self._of_states()[:TOP],
            "fitting": [_as_json(question, c) for c in variants.fitting] + self._of_states(),
            "not_chosen": self._not_chosen(),
            "left_out": variants.left_out,
            "data_parallel_is_right": self.advice is None,
            "advice": None
            if self.advice is None
            else {
                "case": self.advice.case,
                "figures": self.advice.figures,
                "remedies": [
                    {"tool": r.tool, "degree": r.degree, "reason": r.reason} for r in self.advice.remedies
                ],
            },
            "guide": self.guide,
            "uncertain": list(self.uncertain),
            "alternatives": [
                {**one.as_json(), "command": run_command(one, self.words)} for one in self.instead
            ],
            "fewer_tokens": list(self.fewer_tokens),
            "trust": self.trust.as_json() if self.trust else None,
            "commands": {"compare": list(self.commands.compare), "slurm": list(self.commands.slurm)},
        }

    def _of_states(self) -> list[dict[str, Any]]:
        return [states_as_json(one) for one in self.experts.roomy] if self.experts else []

    def _not_chosen(self) -> list[dict[str, Any]]:
        if self.experts:
            found = self.experts.reasons()
            return [{"backend": scenario_in(one).label, "fits": False, "reason": why} for one, why in found]
        return [
            {"backend": one.configuration.label, "fits": one.configuration.fits, "reason": one.reason}
            for one in self.variants.rejected(self.best)
        ]


def recommend(
    question: RecommendRequest, typed: Typed, predictors: Predictors | None = None
) -> Recommendation:
    """Rank what fits, and say what to measure. Raises HarnessError where nothing can be predicted."""
    typed, predictors = _without_batch(typed, question), predictors or Predictors()
    if mixture_of_experts(question.model.config):
        return _of_experts(question, typed, predictors)
    variants = best_variants(question, predictors)
    if question.samples and not (variants.fitting or variants.too_large):
        reason = list(variants.left_out.values())[-1].removeprefix("no prediction: ")
        raise HarnessError(
            f"no strategy can be recommended: {reason}; `harness estimate` gives its states and traffic"
        )
    best = _best(variants)
    other = _other(question)
    return Recommendation(
        question=question,
        variants=variants,
        best=best,
        advice=advise(
            question,
            _data_parallel(question, variants.fitting),
            _data_parallel(question, variants.too_large),
            predictors,
            _sharing(question, (*variants.fitting, *variants.too_large)),
        ),
        guide=guide_line(question, _data_parallel(question, variants.fitting)),
        uncertain=tuple(_uncertain(variants)),
        commands=commands(question, [c.scenario for c in best], typed),
        chunked=_chunked(question, best, predictors),
        instead=_instead(question, variants, predictors),
        fewer_tokens=() if _is_plain(best) else tuple(fewer_tokens(question, predictors)),
        words=tuple(_given(typed)),
        other_preset=other,
        other_best=next(iter(_best(_rank_with(other, question, variants, predictors))), None),
        trust=_trust(best[0]) if best else None,
    )


def _of_experts(question: RecommendRequest, typed: Typed, predictors: Predictors) -> Recommendation:
    found = of_experts(question, predictors)
    shown = {scenario.label for scenario in scenarios_in(found.shown)}
    backends, left_out = distinct_backends(question.gpus)
    others = [entry.name for entry in backends if entry.name not in shown]
    left_out |= dict.fromkeys(others, "of a mixture of experts the usual strategies alone are compared")
    return Recommendation(
        question=question,
        variants=BestVariants(fitting=(), too_large=(), left_out=left_out),
        best=(),
        advice=advice_of_experts(),
        guide=None,
        uncertain=(found.uneven,) if found.uneven else (),
        commands=commands(question, scenarios_in(found.roomy[:TOP]), typed),
        words=tuple(_given(typed)),
        other_preset=_other(question),
        other_best=None,
        instead=found.instead,
        experts=found,
    )


def _other(question: RecommendRequest) -> Preset:
    (other,) = (preset for preset in get_args(Preset) if preset != question.preset)
    return other


def _rank_with(
    preset: Preset, question: RecommendRequest, variants: BestVariants, predictors: Predictors
) -> BestVariants:
    return best_variants(replace(question, preset=preset), predictors, variants.choices)


LOGITS_HELD = 2
"""Copies in fp32 that a loss holds at least, and a chunked one does not: logits and their log-softmax."""


def _chunked(
    question: RecommendRequest, best: Sequence[Configuration], predictors: Predictors
) -> Configuration | None:
    """The best of the usual strategies with a chunked loss; None: it gains neither speed nor room."""
    if not best or not _is_worth_chunking(best[0]):
        return None
    changed = with_settings(best[0].scenario, RELIEFS[CHUNKED])
    if changed is None or changed is best[0].scenario:
        return None
    asked = replace(question, job=question.job.model_copy(update={"loss": changed.job.loss}))
    one = next(iter(_best(best_variants(asked, predictors, only=(registry.REFERENCE, *USUAL)))), None)
    if one is None or one.verdict.barely_fits:
        return None
    rate, before = one.tokens_per_second_per_gpu, best[0].tokens_per_second_per_gpu
    gives_room = best[0].is_tight and not one.is_tight and rate >= (1 - CLOSE_SHARE) * before
    return one if gives_room or rate * (1 - CLOSE_SHARE) > before else None


def _is_worth_chunking(best: Configuration) -> bool:
    """Whether logits are much of the memory, or what keeps it from leaving room."""
    logits = logits_bytes(best.scenario)
    without = best.held_against_limit(best.needed_bytes - LOGITS_HELD * logits)
    return logits >= CHUNKED_SHARE * best.memory_bytes or (best.is_tight and without.leaves_room)


def _without_batch(typed: Typed, question: RecommendRequest) -> Typed:
    """Without the batch from which the tokens of a step follow: commands set how those are split."""
    batch = tuple(f"training.{name}" for name in BATCH)
    kept = [text for text in typed.assignments if text.partition("=")[0].strip() not in batch]
    if question.accumulates and typed.config is not None:
        kept.append("training.accumulation_steps=null")
    return replace(typed, assignments=tuple(kept))


def _instead(
    question: RecommendRequest, variants: BestVariants, predictors: Predictors
) -> tuple[Alternative, ...]:
    """Where nothing fits well without offload: the ways that no variant takes, with the smallest micro-batch.

    Each says whether it needs checkpointing, so all begin from the job without what `recommend` adds.
    """
    roomy = [c for c in variants.fitting if c.offload == "none" and not c.verdict.barely_fits]
    if roomy or not question.samples_per_rank:
        return ()
    asked = {"training.activation_checkpointing": question.checkpointing[0]}
    on_device = [c for c in (*variants.fitting, *variants.too_large) if c.offload == "none"]
    found = [with_settings(c.scenario, asked) or c.scenario for c in on_device or variants.too_large]
    without = [OFFLOAD, CONTEXT]
    if (
        question.gpus == 1
    ):  # no strategy that shards was tried, from which the guide tells on how many it fits
        found += [scenario_of(question, label, 1, checkpointing=question.checkpointing[0]) for label in USUAL]
    else:
        without.append(MORE_GPUS)
    return tuple(alternatives(bases(found), without=without, by=predictors, keeps_batch=True))


def _is_plain(best: Sequence[Configuration]) -> bool:
    """Whether each rank of the best has samples of its own, and all on the device."""
    return bool(best) and best[0].offload == "none" and not best[0].scenario.mesh.shares_samples


def _trust(best: Configuration) -> Trust:
    found = trust_in(
        best.scenario, speed=best.speed is not None, bounded=best.memory_bounds is not None,
        host_share=best.speed.host_share if best.speed else None,
        update_share=best.speed.host_update_share if best.speed else None,
    )  # fmt: skip
    given = [
        remark for remark in (best.speed.remarks if best.speed else ()) if remark.startswith("constants: ")
    ]
    own = next((remark for remark in given if remark != f"constants: {PUBLISHED}"), None)
    return replace(found, assumption=own) if own else found


def _data_parallel(question: RecommendRequest, found: Sequence[Configuration]) -> list[Configuration]:
    """Those whose ranks all have samples of their own."""
    return [c for c in found if not registry.mesh_of(c.label, question.gpus).shares_samples]


def _sharing(question: RecommendRequest, found: Sequence[Configuration]) -> list[Configuration]:
    """Those whose ranks share samples."""
    return [c for c in found if registry.mesh_of(c.label, question.gpus).shares_samples]


def _best(variants: BestVariants) -> tuple[Configuration, ...]:
    """The few to measure; what barely fits only where nothing else fits."""
    fitting = variants.best_by_backend()
    return (tuple(c for c in fitting if not c.verdict.barely_fits) or fitting)[:TOP]


def _uncertain(variants: BestVariants) -> list[str]:
    """What a measurement may turn round."""
    lines = []
    fitting = variants.best_by_backend()
    if len(fitting) > 1 and fitting[0].speed is not None:
        fastest = variants.fastest or fitting[0]
        least = fastest.tokens_per_second_per_gpu * (1 - CLOSE_SHARE)
        close = [c.label for c in fitting[1:] if c.tokens_per_second_per_gpu >= least]
        if close:
            lines.append(
                f"speed: {listed(close)} {'is' if len(close) == 1 else 'are'} within "
                f"{percent(CLOSE_SHARE)} of {fitting[0].label}, {TIE}"
            )
    tight = [c.label for c in fitting if c.is_tight]
    if tight:
        lines.append(
            f"memory: {listed(tight)} {'leaves' if len(tight) == 1 else 'leave'} less than "
            f"{percent(1 - TIGHT_SHARE)} of the device free; `harness fit` measures it"
        )
    for said, reasons in (
        ("no speed of {}: {}", {c.label: c.speed_unknown for c in variants.fitting}),
        (
            "speed of {}: from the bytes of the ZeRO paper, since {}",
            {c.label: c.traffic for c in variants.fitting},
        ),
    ):
        by_reason: dict[str, list[str]] = {}
        for label, reason in reasons.items():
            if reason is not None:
                by_reason.setdefault(reason, []).append(label)
        lines += [said.format(listed(labels), reason) for reason, labels in by_reason.items()]
    remarks = {remark for c in fitting if c.speed is not None for remark in c.speed.remarks}
    lines += [f"speed rests on {remark}" for remark in sorted(remarks) if remark.startswith("constants")]
    return lines


FIGURES = ("step_seconds", "exposed_seconds", "tokens_per_second_per_gpu", "model_flops_utilization")
"""Of a speed, under the same names."""


def _as_json(question: RecommendRequest, configuration: Configuration) -> dict[str, Any]:
    memory, speed, between = configuration.memory, configuration.speed, configuration.peak_bytes_between
    return {
        "backend": configuration.label,
        "micro_batch_size": configuration.micro_batch_size,
        "accumulation_steps": configuration.accumulation_steps,
        "activation_checkpointing": configuration.checkpointing,
        "offload": configuration.offload,
        "shard_size": configuration.scenario.options.get("shard_size"),
        "state_bytes": configuration.held_beside_activations,
        "peak_bytes": None if configuration.memory_bounds else memory.peak_bytes,
        "peak_bytes_between": between,
        "device_bytes": configuration.needed_bytes,
        "margin_bytes": configuration.margin_bytes,
        "tight": configuration.is_tight,
        "host_bytes_per_node": memory.host_bytes_per_node,
        "decisive_moment": memory.decisive.name,
        **{name: getattr(speed, name) if speed else None for name in FIGURES},
        "gpu_hours_per_billion_tokens": gpu_hours_per_billion_tokens(speed) if speed else None,
        "kilowatt_hours_per_billion_tokens": kilowatt_hours_per_billion_tokens(speed, question.gpus)
        if speed
        else None,
    }
