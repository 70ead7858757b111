"""Makes the runs of a search, one per size, through the launcher and the store of every other run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from harness.errors import HarnessError
from harness.job.batch import batch_layout
from harness.job.experiment import Experiment
from harness.judge.rows import reason
from harness.launch.cells import Cell, make_cell, reusable
from harness.launch.launcher import EventHandler, LocalLauncher, run_cell
from harness.plan.alternatives import Alternative, alternatives
from harness.plan.coverage import why_memory_unknown
from harness.plan.fit.limit import Limit
from harness.plan.fit.search import FITTING, OutOfTrials, Trial, trial_experiment, trial_of
from harness.plan.job import data_bytes, planned_model, scenario_of
from harness.plan.memory import MemoryPrediction
from harness.plan.model import PlannedModel
from harness.plan.prediction import Predictors, predict
from harness.plan.preflight import UNKNOWN_STRATEGY
from harness.plan.scenario import Scenario
from harness.plan.trust import Trust, trust_in
from harness.record import Record
from harness.record.store import Store


@dataclass(kw_only=True)
class Runner:
    """Tries sizes under one backend and remembers each trial."""

    experiment: Experiment
    label: str
    world_size: int
    limit: Limit
    launcher: LocalLauncher
    store: Store
    command: list[str]
    most_runs: int
    fresh: bool
    on_event: Callable[[Cell], EventHandler]
    """Given a cell, returns what follows the events of its run."""
    on_trial: Callable[[Trial], None]
    on_prediction: Callable[[], object] = lambda: None
    trials: list[Trial] = field(default_factory=list)
    _runs: int = 0

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return self.launcher.check(self._cell(self._trial_experiment(1, None)).job.model_dump_json())

    @cached_property
    def model(self) -> PlannedModel:
        """The model of the job. Raises JobError if no backend could run it."""
        return planned_model(self._facts, self.experiment.job())

    def predicted_bytes(self, micro_batch_size: int, sequence_length: int | None = None) -> int | None:
        """Predicted peak of the allocator; None where nothing is known of the backend's strategy, and for a
        job whose activations are not predicted."""
        found = self._peaks(micro_batch_size, sequence_length)
        return found[0] if len(found) == 1 else None

    def bytes_between(
        self, micro_batch_size: int, sequence_length: int | None = None
    ) -> tuple[int, int] | None:
        """The least and the most that a peak can be which is not predicted; None: that is not known."""
        found = self._peaks(micro_batch_size, sequence_length)
        return (found[0], found[1]) if len(found) == 2 else None

    def _peaks(self, micro_batch_size: int, sequence_length: int | None) -> list[int]:
        """The peak, its two bounds, or nothing."""
        cell = self._cell(self._trial_experiment(micro_batch_size, sequence_length))
        scenario = scenario_of(cell, self.model, self.launcher.device)
        if scenario is None:
            return []
        data = data_bytes(self._facts, cell.job, self.launcher.device)
        found = predict(scenario, self._predictors, timed=False)
        known = [found.memory] if found.memory else found.memory_bounds or ()
        if not known and why_memory_unknown(scenario) is None:
            raise HarnessError(str(found.memory_unknown))
        return [memory.peak_bytes + data for memory in known]

    @cached_property
    def _predictors(self) -> Predictors:
        traced = Predictors.traced_by(self.launcher.trace)

        def memory(scenario: Scenario) -> MemoryPrediction:
            self.on_prediction()
            return traced.memory(scenario)

        return replace(traced, memory=memory)

    def why_unpredicted(self) -> str | None:
        """Why no size has a prediction; None: they have."""
        return UNKNOWN_STRATEGY if self._smallest is None else why_memory_unknown(self._smallest)

    def trust(self) -> Trust | None:
        """How wrong such predictions have been; None: nothing is predicted."""
        if self._smallest is None or why_memory_unknown(self._smallest):
            return None
        return trust_in(self._smallest, speed=False)

    def alternatives(self) -> list[Alternative]:
        """What people do where not even one sample fits, by prediction; empty where nothing is predicted."""
        if self._smallest is None or why_memory_unknown(self._smallest):
            return []
        return alternatives([self._smallest], limit_bytes=self.limit.limit_bytes, by=self._predictors)

    @cached_property
    def _smallest(self) -> Scenario | None:
        """Of one sample; None: nothing is known of the backend's strategy."""
        return scenario_of(self._cell(self._trial_experiment(1, None)), self.model, self.launcher.device)

    def run(self, micro_batch_size: int, sequence_length: int | None = None) -> Trial:
        """Try one size, or return the trial of it. Raises OutOfTrials, and HarnessError if a run fails."""
        wanted = sequence_length or self.experiment.data.sequence_length
        for trial in self.trials:
            if (trial.micro_batch_size, trial.sequence_length) == (micro_batch_size, wanted):
                return trial
        if self._runs >= self.most_runs:
            raise OutOfTrials
        experiment = self._trial_experiment(micro_batch_size, sequence_length)
        record = self._record(self._cell(experiment), experiment)
        if record.status not in (*FITTING, "oom"):
            raise HarnessError(
                f"the trial of micro-batch {micro_batch_size} and sequence {wanted} ended as "
                f"{record.status}: {reason(record)} (record and logs: {self.store.root / record.run_id})"
            )
        trial = trial_of(record, self.predicted_bytes(micro_batch_size, sequence_length))
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def _record(self, cell: Cell, experiment: Experiment) -> Record:
        """The run of a cell: one that there is already, or a new one."""
        known = {} if self.fresh else reusable(self.store.records()[0], cell.key.__eq__)
        if cell.key in known:
            return known[cell.key]
        self._runs += 1
        on_event = self.on_event(cell)
        return run_cell(cell, experiment, self.store, self.launcher, command=self.command, on_event=on_event)

    def _trial_experiment(self, micro_batch_size: int, sequence_length: int | None) -> Experiment:
        return trial_experiment(
            self.experiment,
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            limit_bytes=self.limit.limit_bytes if self.limit.imposed else None,
        )

    def _cell(self, experiment: Experiment) -> Cell:
        layout = batch_layout(experiment.training, self.world_size)
        return make_cell(experiment, self.label, self.world_size, layout, 0, self.launcher.device)
