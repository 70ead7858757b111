"""Writes what one process of an observed script does, in the events that the harness's own ranks write."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, time
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from harness.backends.base import Effective, World
from harness.backends.optimizer.groups import group_constants, group_rate
from harness.backends.registry import strategy_of
from harness.forms.layout import Layout
from harness.nested import grouped
from harness.rank.accelerator import describe_accelerator, placement
from harness.rank.live.model_watch import bare_module_name
from harness.rank.observing import facts
from harness.rank.observing.habits import Habits
from harness.rank.observing.step import Step
from harness.rank.probes.probes import ProbedSteps
from harness.rank.probes.weights import digest_share
from harness.rank.process.environment import device_name, random_state
from harness.rank.process.start import Crash, write_collectives, write_where
from harness.record import ModelPart, ObservationPart
from harness.run_directory import events
from harness.run_directory.events import GuestEventWriter
from harness.run_directory.observed_record import LOSS, note_start, rank_ends
from harness.run_directory.rank_state import STILL_SECONDS, PositionWriter, read_state
from harness.run_directory.request import rank_file, rank_state
from harness.safe_text import described, encodable, first_line
from harness.snapshots.flight_recorder import KEPT

ALWAYS = {
    "initial_weights": "the ranks' parts of the weights are not one whole of the model that trains",
    "final_weights": "weights are not gathered: that would add collectives to the script",
    "ranks[].overlap": "no step is traced",
    "ranks[].probe_loss": "no batch of the harness runs through the script's model",
    "eval": "evaluations of the script are not read",
    "data": "the script's data set is not read",
    "job.schedule": "only the learning rate of each step is seen, not the schedule",
    "job.training.seed": "the script's seed is not seen",
}
REASONS = {
    "tokens": "the model was given no tensor, or embeddings of tokens",
    "target_tokens": "the model was given no labels, or is not a causal language model of transformers",
    "samples": "the model was given no tensor",
    "gradient_norm": "nothing computed the norm of all gradients in some step",
}
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed")
CRASHING, CRASH_LOOKS = "crashing", 20
"""File while C++ ends a rank, and how often it looks whether the others have noted where they stand."""
LOOKED_AT = 64
"""First steps whose random states are."""
UPDATES = 4
"""Fewest after which a tensor that kept its bits is said to stand still."""
ALIKE = 0.01
"""Relative, of ratios of losses: rounding in low precision moves them by less."""


def alike(ratios: Sequence[float]) -> float | None:
    """What all steps have; None: they differ, or there are none."""
    usual = median(ratios) if ratios else 0.0
    return usual if usual and all(abs(one - usual) <= ALIKE * abs(usual) for one in ratios) else None


@dataclass(frozen=True, kw_only=True)
class Described:
    """What trains, once the first step has shown it."""

    live: facts.Live
    effective: Effective
    layout: Layout
    model: ModelPart
    trained_elements: int


class Writing:
    """The events of one rank."""

    def __init__(self, run_directory: Path, command: Sequence[str], seen: facts.Seen, habits: Habits) -> None:
        self._directory = run_directory
        self._habits = habits
        self._random_state: str | None = None
        self._drawn_in: dict[str, int] = {}
        """The first step that drew from each random state that a step began in."""
        self._drawing: tuple[str, int] | None = None
        self._share: dict[str, events.Held] = {}
        self._command = command
        self._seen = seen
        self._started = perf_counter()
        self._events: GuestEventWriter | None = None
        self._world: World | None = None
        self.described: Described | None = None
        self._optimizers = facts.Optimizers()
        self._called: Sequence[ref[nn.Module]] = ()
        self._held: Sequence[nn.Module] = ()
        self._loss_source = ""
        self._loss_is_known = True
        self._sizes: Counter[tuple[int | None, int | None]] = Counter()
        self._lengths: set[int | None] = set()
        self._micro_steps: Counter[int] = Counter()
        self._known: dict[str, bool] = {}
        self._has_measured = False
        self._synchronised_at: int | None = None
        self._notes: list[str] = []
        self._bits: tuple[dict[str, int], ...] = ()
        self._looked_at = 0
        self._is_over = self._has_others = False
        self._crash: Crash | None = None
        self._constants: dict[int, dict[str, Any]] = {}
        """By group of the optimizers, with what changed of each."""
        self._changes: dict[tuple[int, str], list[str]] = {}

    @property
    def world(self) -> World:
        assert self._world is not None
        return self._world

    @property
    def _roots(self) -> Sequence[nn.Module]:
        """Modules that the script calls. Until one has trained, those that the script still has: of a first
        try that ran out of memory nothing may stay."""
        return self._held or [root for called in self._called if (root := called()) is not None]

    def add(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer steps: note the rates of its groups, and what they hold. Whether it is a new one with
        tensors of no known module."""
        is_new = optimizer not in self._optimizers.each
        is_of_others = is_new and facts.follow(optimizer, self._roots, self._seen)
        self._optimizers.add(optimizer)
        seen, first = self._seen, 0
        for known in self._optimizers.each:
            for place, group in enumerate(known.param_groups, start=first):
                if known is optimizer:
                    seen.rates[place] = group_rate(group)
                    now, before = group_constants(group), self._constants.get(place, {})
                    for name in now.keys() & before.keys():
                        if now[name] != before[name]:
                            change = f"{before[name]} to {now[name]} before step {seen.steps}"
                            self._changes.setdefault((place, name), []).append(change)
                    self._constants[place] = now
                    seen.group_tensors[place] = max(seen.group_tensors.get(place, 0), len(group["params"]))
            first += len(known.param_groups)
        return is_of_others

    def join(self, roots: Sequence[nn.Module]) -> None:
        """Become a rank of the run: this process trains."""
        self._called = [ref(root) for root in roots]
        self._held = roots if self.described is not None else ()
        if self.described is not None and len(roots) > 1:
            self._others(self.described.live)  # one may be frozen by turns
        if self._world is None:
            self._world = facts.world_here(roots)
            path = rank_file(self._directory, self._world.rank)
            attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            end = rank_ends(self._directory).get(self._world.rank) if attempt and path.exists() else None
            if end is not None and end.start.trains and not end.is_running:
                path.rename(path.with_name(f"{path.name}.attempt-{attempt - 1}"))
                self._notes.append(f"torchrun restarted the ranks; restart {attempt} is recorded")
            is_first = not path.exists()
            if not is_first:
                path = path.with_name(f"{path.name}.process-{os.getpid()}")
                self._notes.append("several processes train as one rank; the first one is recorded")
            note_start(self._directory, self._world.rank, trains=is_first)
            self._events = GuestEventWriter(path)
            if is_first:
                threading.Thread(target=self._tell_when_still, daemon=True).start()
                if dist.is_initialized() and dist.get_backend() == "gloo":
                    self._crash = Crash(self._crashes)

    def _tell_when_still(self) -> None:
        """Note where this rank stands while it ends no step: what ends its script may leave it no time to."""
        ended, seconds = -1, 0
        while not self._is_over:
            with suppress(OSError):
                if (self._directory / CRASHING).exists():
                    self._note_place()
                    return
                if seconds % STILL_SECONDS == 0:
                    before, ended = ended, self._micro_steps.total()
                    rank_state(self._directory, self.world.rank).unlink(missing_ok=True)
                    if ended == before:
                        self._note_place()
            seconds += 1
            sleep(1.0)

    def _crashes(self) -> None:
        """C++ ends this rank: leave the others time to note where they stand, before torchrun ends them."""
        mark, seen = self._directory / CRASHING, 0
        self._note_place()
        mark.touch()
        while len([*self._directory.glob(KEPT)]) < self.world.world_size and seen < CRASH_LOOKS:
            seen += 1
            sleep(0.1)
        mark.unlink()

    def _note_place(self) -> None:
        self._stand_still()
        write_where(self._directory, self.world.rank)

    def _stand_still(self) -> None:
        PositionWriter(self._directory, self.world.rank).enter("standing still")

    def draws_from_here(self, step: int) -> None:
        """The first training pass of a step begins: what dropout draws follows from this state."""
        if step < LOOKED_AT:
            state = random_state(self.world.device)
            self._random_state = self._random_state or state
            self._drawing = state, step

    def has_drawn(self) -> None:
        """A pass ends: whether it drew from a state that another step drew from, too."""
        if self._drawing is not None:
            state, step = self._drawing
            if random_state(self.world.device) != state:
                self._seen.masks_repeated += self._drawn_in.setdefault(state, step) < step
            self._drawing = None

    def begins_with(self, root: nn.Module) -> None:
        """The first training pass of a module begins: note what this rank holds of the weights."""
        if not self._share and self._seen.steps == 0:
            try:
                self._share = dict(digest_share(self._recognise([root], 1, 1).engine))
            except Exception as error:  # of tensors that a library keeps in another way: the script goes on
                self.note(f"initial weights are not read: {first_line(error)}")

    def are_gradients_gone(self) -> bool:
        """Whether no tensor of the optimizers that step has a gradient; ZeRO keeps its own elsewhere."""
        given = [p for group in self._optimizers.param_groups for p in group["params"]]
        given = given or [p for root in self._roots for p in root.parameters() if p.requires_grad]
        is_kept_elsewhere = "deepspeed" in self._seen.frameworks
        return bool(given) and not is_kept_elsewhere and all(p.grad is None for p in given)

    def step(self, step: Step, phases: dict[str, float], applied: tuple[float, float] | None) -> None:
        """Write a step; with the first one what trains."""
        assert self._events is not None
        if self._seen.has_form and step.has_several_losses:
            self._seen.has_form = False
            self.note("steps propagate several losses, each by itself: bytes and memory are not judged")
        if self.described is None and self._roots and step.group_rates:
            self.described = self._describe(step)
            self._held = self._roots
            self._events.write(self._setup_event(self.described))
        trained = self.described.trained_elements if self.described else 0
        event, loss = step.event(phases, applied, trained)
        self._loss_is_known = self._loss_is_known and loss is not None
        self._loss_source = loss.source if loss else self._loss_source
        length = step.batches[0].length if step.batches else None
        size = step.batches[0].count if step.batches else None
        self._sizes[event.samples, size] += 1
        self._lengths.add(length)
        self._micro_steps[step.micro_steps] += 1
        for name in ("tokens", "target_tokens", "samples", "gradient_norm"):
            self._known[name] = self._known.get(name, True) and getattr(event, name) is not None
        self._events.write(event)
        if step.bits:
            self._bits = (*self._bits[:1], step.bits)
            self._looked_at = step.number
        self._seen.labels_ahead += step.labels_are_ahead()
        self._seen.world_left_out += step.lacks_world()
        if (ratio := step.backward_ratio()) is not None:
            self._seen.backward_ratios.append((step.micro_steps, ratio))
        if step.number == 0:
            self._write_observation()

    def synchronised(self, step: int) -> None:
        """Before this step ranks exchanged weights or gradients, which their passes do not."""
        self._synchronised_at = step
        self.note(
            f"passes exchange no gradients; ranks exchange weights or gradients between steps, seen after "
            f"step {step}"
        )

    def measured(self, probing: ProbedSteps) -> None:
        """The probed steps are over."""
        assert self._events is not None
        self._events.write(probing.measured(self.world.rank, overlap=[]))
        self._has_measured = True

    def end(self, failure: BaseException | None, under_way: Step | None, probing: ProbedSteps) -> None:
        """The process ends: everything that is known by now."""
        self._is_over = True
        if self._crash is not None:
            self._crash.forget()
        if self._events is None:
            return
        if failure is not None:
            self.fails(failure)
        if not self._has_measured:
            self.measured(probing)
        self._write_observation()
        if self.described is not None:
            observed = facts.observed_part(self.described.live, self._optimizers, self._seen)
            self._events.write(events.FinalEvent(weights=None, observed=observed, probe_loss=None))
        if failure is None:
            self._events.write(events.DoneEvent())
            return
        text = described(failure) or "".join(traceback.format_exception_only(failure)).strip()
        event = events.FailureEvent(
            status="oom" if events.is_out_of_memory(failure) else "failed", message=text, at=time(),
            error_kind=encodable(type(failure).__name__), step=under_way.number if under_way else None,
            phase=None,
        )  # fmt: skip
        self._events.write(event)

    def fails(self, failure: BaseException) -> None:
        """Note where this rank stands if it lost a peer: torchrun leaves it a tenth of a second."""
        gives_up = self._events and events.is_of_lost_peer(type(failure).__name__, str(failure))
        if gives_up and not read_state(self._directory, self.world.rank).has_answered:
            self._stand_still()
            write_collectives(self._directory, self.world.rank, failure)

    def note(self, text: str) -> None:
        """Have the record say what a reader must know of the figures."""
        self._notes.append(text)
        if self._events is not None:
            self._write_observation()

    def _recognise(self, roots: Sequence[nn.Module], size: int, micro_steps: int) -> facts.Live:
        return facts.recognise(
            roots, self._optimizers, self.world, clipping=self._seen.clipping, micro_batch_size=size,
            accumulation_steps=micro_steps, autocast=self._seen.autocast,
        )  # fmt: skip

    def _describe(self, step: Step) -> Described:
        size = step.batches[0].count if step.batches else 1
        live = self._recognise(self._roots, size, step.micro_steps)
        effective = facts.effective_of(live, self._optimizers, step.micro_steps, self._seen)
        layout = facts.observed_layout(live, self._optimizers, self._seen)
        return Described(
            live=live, effective=effective, layout=layout, model=facts.model_part(live, layout, effective),
            trained_elements=facts.trained_elements(live.whole),
        )  # fmt: skip

    def _setup_event(self, found: Described) -> events.SetupEvent:
        # Closed forms hold of one model, whose optimizer updates all that trains.
        has_form = found.live.has_form and self._seen.has_form and self._seen.updated_tensors != 0
        if self._others(found.live) or facts.left_out(found.live, self._optimizers, self._seen)[0]:
            has_form = False
        if facts.are_copies(found.live, self._optimizers):
            has_form = False
        return events.SetupEvent(
            rank=self.world.rank, effective=found.effective, layout=found.layout, model=found.model,
            native_config=found.live.engine.native_config(), initial_weights=None, share=self._share,
            versions={name: version(name) for name in PACKAGES if name in sys.modules},
            collectives=dist.get_backend() if dist.is_initialized() else "none",
            claim=strategy_of(found.live.base) if found.live.base and has_form else None,
            host=socket.gethostname(), device_name=device_name(self.world),
            placement=placement(self.world.device), accelerator=describe_accelerator(self.world.device),
            data=None, steps=None, setup_seconds=perf_counter() - self._started,
            random_state=self._random_state,
        )  # fmt: skip

    def _others(self, live: facts.Live) -> bool:
        """Whether a module trains, or has trained, parameters that are not of the described one."""
        known = {id(parameter) for parameter in live.bare.parameters()}
        trained = (p for root in self._roots for p in root.parameters() if p.requires_grad)
        self._has_others = self._has_others or any(id(parameter) not in known for parameter in trained)
        return self._has_others

    def _remarks(
        self, live: facts.Live | None, new: Sequence[str], others: int, left: Sequence[str]
    ) -> Iterator[str]:
        """What a reader must know of the script. new: tensors added after the wrapping; others: steps with a
        batch of another size; left: see `facts.left_out`."""
        if live is not None and live.note and self._synchronised_at is None:
            yield live.note
        if others > 0:
            yield f"{others} of {self._sizes.total()} steps had a batch of another size"
        if live is not None and self._others(live):
            yield "several models train; states are those of the largest that the first step called"
        if new:
            yield f"added after the model was wrapped: {', '.join(new)}; bytes and memory are not judged"
        if left:
            more = "" if len(left) == 1 else f" and {len(left) - 1} more"
            yield f"no optimizer has {left[0]}{more}, to which gradients are computed: they keep their values"
        for (group, name), changes in self._changes.items():
            if len(changes) == 1:  # else it follows a schedule
                yield f"{name} of group {group} of the optimizers changes from {changes[0]}"
        names = {one: bare_module_name(n) for n, one in live.bare.named_modules()} if live is not None else {}
        apart = sorted(names[one] for one in self._seen.beside_autocast if one in names)
        if apart:
            more = "" if len(apart) == 1 else f" and {len(apart) - 1} more"
            yield f"where others compute in {self._seen.autocast}, autocast is off: {apart[0]}{more}"
        if len(self._optimizers.each) > 1:
            count = len(self._optimizers.each)
            yield f"{count} optimizers step: a step ends with each that follows a backward pass"
        if not self._seen.steps and self._seen.bare_updates:
            yield (
                f"{self._seen.bare_updates} updates followed no call of backward(): torch.autograd.grad and "
                "torch.func are not seen"
            )
        if self._seen.discarded:
            yield f"gradients of {self._seen.discarded} micro-steps were zeroed without an update"

    def _write_observation(self) -> None:
        assert self._events is not None
        ((micro_steps, _), *_) = self._micro_steps.most_common(1) or [(1, 0)]
        found = self.described
        live = found.live if found else None
        unknown = dict(ALWAYS)
        for name, reason in REASONS.items():
            if not self._known.get(name, False):
                unknown[f"steps[].{name}"] = reason
        if not self._loss_is_known:
            unknown[LOSS] = (
                f"of {micro_steps} micro-steps only the scalars of backward() are seen; the script may have "
                "divided them"
                if micro_steps > 1
                else "no loss was seen"
            )
        seen = found and facts.settings_seen(found.live, found.effective, found.model, self._optimizers)
        ((samples, size), usual), *_ = self._sizes.most_common(1) or [((None, None), 0)]
        length = next(iter(self._lengths)) if len(self._lengths) == 1 else None
        new = facts.added(live) if live else []
        left, replaced = list[str](), False
        if live is not None and self._optimizers.each:
            left, replaced = facts.left_out(live, self._optimizers, self._seen)
        notes = [*self._notes, *self._remarks(live, new, self._sizes.total() - usual, left)]
        ratios = grouped(self._seen.backward_ratios)
        is_read = not self._habits.were_scaled
        known = ObservationPart.shared(self._seen) | ObservationPart.shared(self._habits)
        known |= {
            "command": list(self._command), "frameworks": list(self._seen.frameworks), "unknown": unknown,
            "base": live.base if live else None, "synchronised_at": self._synchronised_at,
            "loss": self._loss_source if LOSS not in unknown else "", "notes": notes, "added": new,
            "has_form": self._seen.has_form
            and self._synchronised_at is None
            and not (new or (live and self._others(live))),
            "unwrapped": facts.unwrapped(self._roots, live, self._seen)
            if live and live.base != "single"
            else {},
            "backward_ratio": alike(ratios.get(micro_steps, [])) if is_read and micro_steps > 1 else None,
            "shorter_ratios": {
                n: r for n, of in ratios.items() if is_read and n != micro_steps and (r := alike(of))
            },
            "stood_still": facts.stood_still(
                live, self._optimizers,
                (n for n, bits in self._bits[-1].items() if self._bits[0].get(n) == bits),
            ) if live and self._looked_at >= UPDATES else [],
            "evaluations_in_training": sorted(self._habits.left_in_training),
            "replaced": left if replaced else [],
        }  # fmt: skip
        event = events.ObservationEvent(
            observation=ObservationPart(**known),
            seen=(seen or {}) | {
                "training.global_batch_size": samples * self.world.world_size if samples else None,
                "training.micro_batch_size": size, "training.steps": self._seen.steps,
                "training.accumulation_steps": micro_steps if found else None,
                "data.sequence_length": length,
            },
            world_size=self.world.world_size, ranks_per_node=self.world.ranks_per_node,
            device=self.world.device, threads=torch.get_num_threads(), micro_batch_size=size,
            accumulation_steps=micro_steps, options=facts.asked_options(live, self._seen.frameworks),
        )  # fmt: skip
        self._events.write(event)
