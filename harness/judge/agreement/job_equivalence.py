"""Whether two runs trained the same job: every field that decides it, compared with both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress, count
from operator import attrgetter, itemgetter, ne
from typing import Any

from harness.judge.distance import sketch_distances
from harness.judge.wording import Digest, a_few, counted, differs
from harness.nested import differences
from harness.record import RankPart, Record, StepPart, WeightsPart
from harness.record.run import weights_differ

PER_STEP = (
    "step_seconds", "data_seconds", "sample_hashes", "samples", "target_tokens", "loss_sums",
    "gradient_norms", "batch_digests", "batch_hash_sums", "computed_loss_sums",
    "loss_gradients", "loss_factors",
)  # fmt: skip
"""Fields of a rank that hold a value of every step, or of each of the first steps."""


def first_step(record: Record) -> int:
    """Number of the first step that the record holds, or would hold."""
    if record.steps:
        return record.steps[0].step
    return record.resumed.step if record.resumed is not None else 0


def aligned_runs(reference: Record, record: Record) -> tuple[Record, Record]:
    """The two from the first step that both took, as if both had begun with the reference's weights.

    Initial weights differ by nature if only one continued a checkpoint. What `record` loaded is compared
    elsewhere, with the digest of what was saved.
    """
    if reference.resumed == record.resumed:
        return reference, record
    begin = max(first_step(reference), first_step(record))
    left, right = from_step(reference, begin), from_step(record, begin)
    return left, right.model_copy(update={"initial_weights": reference.initial_weights})


def from_step(record: Record, step: int) -> Record:
    """The record without the steps before this one; initial weights stay those of its beginning."""
    skipped = step - first_step(record)
    if skipped <= 0:
        return record
    ranks = []
    for rank in record.ranks:
        kept: dict[str, Any] = {name: getattr(rank, name)[skipped:] for name in PER_STEP}
        kept["phase_seconds"] = {phase: seconds[skipped:] for phase, seconds in rank.phase_seconds.items()}
        ranks.append(rank.model_copy(update=kept))
    return record.model_copy(update={"steps": record.steps[skipped:], "ranks": ranks})


@dataclass(frozen=True)
class Difference:
    """A field in which two runs that should be one job differ."""

    field: str
    reference: Any
    given: Any
    kind: str = "not-same-job"
    """Id of the finding that reports it."""
    _: KW_ONLY
    plural: bool = False
    """Whether the field's name is a plural."""

    @property
    def differs(self) -> str:
        return differs(self.field, plural=self.plural)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("field", "reference", "given", "kind")}


def job_differences(reference: Record, record: Record) -> list[Difference]:
    """Fields that must agree before two runs may be compared, the most telling first."""
    reference, record = aligned_runs(reference, record)
    return [
        difference
        for check in (_identity, _weights, _samples, _learning_rates, _steps, _determinism)
        for difference in check(reference, record)
    ]


UNSEEN = {"None", "auto"}
"""Values of a job that say nothing of what another program did."""


def _one_is_a_script(reference: Record, record: Record) -> bool:
    """Whether one is an observed script: its job is known in part, its samples by their contents."""
    return (reference.observation is None) != (record.observation is None)


LEAST_APART = 1e-5
"""Of a tensor's size. Another order of summation moves its projections less."""


def _identity(reference: Record, record: Record) -> Iterator[Difference]:
    if reference.job_id != record.job_id:
        half_seen = _one_is_a_script(reference, record)
        for keys, left, right in differences(reference.job.model_dump(), record.job.model_dump()):
            if not (half_seen and UNSEEN & {str(left), str(right)}):
                yield Difference(".".join(keys), left, right)
        yield Difference("job_id", reference.job_id, record.job_id)


def _weights(reference: Record, record: Record) -> Iterator[Difference]:
    left, right = reference.initial_weights, record.initial_weights
    if left and right and left.parameter_count != right.parameter_count:
        yield Difference("parameter count", left.parameter_count, right.parameter_count, "parameters-differ")
    seen, other = reference.observed, record.observed
    if seen and other and None not in (seen.tied_parameters, other.tied_parameters):
        if seen.tied_parameters != other.tied_parameters:
            counts = seen.tied_parameters, other.tied_parameters
            yield Difference("tied parameters", *counts, "parameters-differ", plural=True)
    same_tensors = seen is None or other is None or seen.tied_parameters == other.tied_parameters
    # What a rank gathered before its first step, against what the run that it continues had saved.
    loaded = record.ranks[0].initial_digest if record.ranks else None
    saved = record.resumed.weights_digest if record.resumed else None
    digests = {"weights after loading the checkpoint": (saved, loaded)}
    if left and right and same_tensors and _digests_compare(reference, record):
        digests = {f"initial weights{_which(left, right)}": (left.digest, right.digest)} | digests
    for name, (expected, given) in digests.items():
        if expected is not None and given is not None and weights_differ(expected, given):
            kind = "initial-weights-differ"
            yield Difference(name, Digest(expected), Digest(given), kind, plural=True)


def _which(left: WeightsPart, right: WeightsPart) -> str:
    """' of lm_head.weight': the tensors that differ, where not all of them do."""
    distances, sketch = sketch_distances(left, right), left.sketch or {}
    unlike = [name for name, distance in distances.items() if distance > LEAST_APART * sketch[name][0]]
    return f" of {a_few(unlike, 1)}" if 0 < len(unlike) < len(distances) else ""


def _digests_compare(reference: Record, record: Record) -> bool:
    """Whether digests of equal initial weights are equal: they hold names, which wrappers of a script change,
    and values, which at mixed precision DeepSpeed rounds for its masters, own runs round, and autocast keeps.
    """
    if reference.observation is None and record.observation is None:
        return True
    both = (reference, record)
    names = [run.layout and {part.name for part in run.layout.parameters} for run in both]
    dtypes = [run.backend.effective and run.backend.effective.parameter_dtype for run in both]
    is_mixed = record.job.training.precision in ("bf16-mixed", "fp16-mixed")
    is_rounded = dtypes[0] != dtypes[1] or (is_mixed and _one_is_a_script(*both))
    return names[0] == names[1] and not is_rounded


def _samples(reference: Record, record: Record) -> Iterator[Difference]:
    unlike = _unlike_peers(record)
    if unlike is not None:
        yield unlike
        return
    digests = _batch_digests(reference), _batch_digests(record)
    for step, (left, right) in enumerate(zip(*digests, strict=False), start=first_step(record)):
        missing, extra = left - right, right - left
        if missing or extra:
            kind = "samples-differ"
            if set(extra) <= set(left) and extra:
                kind = "samples-repeated"
            elif not extra:
                kind = "samples-missing"
            lost, more = missing.total(), extra.total()
            given = f"{more} of them repeated or foreign, {lost} of the reference's missing"
            if lost == more and not set(extra) & set(left) and _loaded_alike(reference, record, step):
                given = f"{more} of them loaded alike, but with other tokens or labels in the model"
            yield Difference(
                f"samples of step {step}", f"{left.total()} samples", f"{right.total()} samples, {given}",
                kind, plural=True,
            )  # fmt: skip
            return
    late = _late_samples(reference, record)
    if late is not None:
        yield late
        return
    fields: tuple[str, ...] = ("sample_hashes", "samples", "target_tokens")
    if _one_is_a_script(reference, record):
        fields = fields[1:]
    trained_on = attrgetter(*fields)
    unequal = _first_unequal(map(trained_on, reference.steps), map(trained_on, record.steps))
    if unequal is not None:
        left_step, right_step = reference.steps[unequal], record.steps[unequal]
        values = zip(fields, trained_on(left_step), trained_on(right_step), strict=True)
        field, expected, given = next((name, a, b) for name, a, b in values if a != b)
        yield Difference(
            f"{field} of step {left_step.step}", expected, given, "samples-differ", plural=field == "samples"
        )


def _loaded_alike(reference: Record, record: Record, step: int) -> bool:
    """Whether both loaded the same samples for a step, whatever reached the model."""
    left, right = ([of.sample_hashes for of in run.steps if of.step == step] for run in (reference, record))
    return left == right != [None]


def _first_unequal(left: Iterable[Any], right: Iterable[Any]) -> int | None:
    """Index of the first pair that differs; None: no pair does, as far as the shorter side goes."""
    return next(compress(count(), map(ne, left, right)), None)


def _late_samples(reference: Record, record: Record) -> Difference | None:
    """The first step in which other samples reached the model, by their sums over ranks."""
    for step, (left, right) in enumerate(
        zip(_batch_hash_sums(reference), _batch_hash_sums(record), strict=False), start=first_step(record)
    ):
        if left is not None and right is not None and sum(left) % 2**64 != sum(right) % 2**64:
            repeated = len(right) > 1 and len(set(right)) == 1
            sums = [f"sum of hashes {sum(of) % 2**64:016x}" for of in (left, right)]
            alike = _loaded_alike(reference, record, step) and ", of samples that were loaded alike"
            given = sums[1] + (", the same batch on every rank" if repeated else alike or "")
            kind = "samples-repeated" if repeated else "samples-differ"
            return Difference(f"samples of step {step}", sums[0], given, kind, plural=True)
    return None


def _batch_hash_sums(record: Record) -> list[list[int] | None]:
    """For each step, the data ranks' sums over what reached the model; None: not each of them has one."""
    per_rank = [rank.batch_hash_sums for rank in _data_ranks(record)]
    return [
        None if None in sums else [int(value, 16) for value in sums if value is not None]
        for sums in zip(*per_rank, strict=False)
    ]


def _batch_digests(record: Record) -> list[Counter[str]]:
    """For each of the first steps, how often each sample reached the model, over all ranks."""
    per_rank = [rank.batch_digests for rank in _data_ranks(record)]
    return [Counter(item for part in parts for item in part) for parts in zip(*per_rank, strict=False)]


def _data_ranks(record: Record) -> list[RankPart]:
    """The first rank that saw samples in each group that shares them, by data rank."""
    parts = {rank.rank: rank for rank in record.ranks}
    groups = ([parts[rank] for rank in group] for group in record.world.mesh.sample_groups(parts))
    return [next((part for part in group if any(part.batch_digests)), group[0]) for group in groups]


def _unlike_peers(record: Record) -> Difference | None:
    """The first step in which ranks that should share samples were fed different ones."""
    parts = {rank.rank: rank for rank in record.ranks}
    for group in record.world.mesh.sample_groups(parts) if record.world.dimensions else ():
        fed = {rank: parts[rank].batch_hash_sums for rank in group}
        for step, sums in enumerate(zip(*fed.values(), strict=False), start=first_step(record)):
            if len({value for value in sums if value is not None}) > 1:
                name, due = f"samples of step {step} on ranks that share samples", ", ".join(map(str, fed))
                given = f"sums of hashes {', '.join(value or 'n/a' for value in sums)}"
                kind = "peers-fed-differently"
                return Difference(name, f"the same on ranks {due}", given, kind, plural=True)
    return None


def _learning_rates(reference: Record, record: Record) -> Iterator[Difference]:
    by_name = _rates_by_parameter(reference), _rates_by_parameter(record)
    if all(by_name) and any(len(set(rates.values())) > 1 for rates in by_name):
        yield from _rates_of_groups(reference.steps, *by_name)
        return
    asked = [step.learning_rate for step in reference.steps]
    recorded = [step.learning_rate for step in record.steps]
    beyond = [
        (step, rates)
        for rates in (recorded, _applied_rates(record))
        if (step := _first_unequal(asked, rates)) is not None
    ]
    if beyond:
        step, rates = min(beyond, key=itemgetter(0))
        late = 0 < step < len(rates) - 1 and rates[step:] == asked[step - 1 : len(rates) - 1]
        name = f"learning rate of step {reference.steps[step].step}{' (a step late)' * late}"
        yield Difference(name, asked[step], rates[step], "learning-rate-differs")


def _applied_rates(record: Record) -> list[float | None]:
    """The rate of each step: as an optimizer held it, else as it was recorded."""
    return [
        step.learning_rate if step.applied_learning_rate is None else step.applied_learning_rate
        for step in record.steps
    ]


def _rates_by_parameter(record: Record) -> dict[str, tuple[float | None, ...]]:
    """Learning rate of each parameter in every step; {}: it is not known which parameters a group holds."""
    if record.observed is None or any("parameters" not in g for g in record.observed.optimizer_groups):
        return {}
    rates = record.observation.learning_rates if record.observation else record.observed.learning_rates
    groups = record.observed.optimizer_groups
    of_groups = rates or [_applied_rates(record)] * len(groups)
    return {
        name: tuple(of_group)
        for group, of_group in zip(groups, of_groups, strict=False)
        for name in group["parameters"]
    }


def _rates_of_groups(
    steps: Sequence[StepPart],
    asked: Mapping[str, tuple[float | None, ...]],
    given: Mapping[str, tuple[float | None, ...]],
) -> Iterator[Difference]:
    """The first step in which a parameter has another rate than in the reference."""
    for place, step in enumerate(steps):
        rates = {n: (asked[n], given[n]) for n in sorted(asked.keys() & given.keys())}
        other = [n for n, of in rates.items() if place < min(map(len, of)) and of[0][place] != of[1][place]]
        if other:
            (due, used), of = rates[other[0]], f"{counted(len(other), 'parameter')}, such as {other[0]}"
            name = f"learning rate of step {step.step} for {of}"
            yield Difference(name, due[place], used[place], "learning-rate-differs")
            return


def _steps(reference: Record, record: Record) -> Iterator[Difference]:
    if reference.status != "ok" or record.status != "ok":
        return
    if any(part.odd_update and part.odd_update.kind == "begun-anew" for part in record.ranks):
        return  # its count is none of updates
    if any(run.environment.broken_event_lines for run in (reference, record)):
        return  # steps were lost
    if len(reference.steps) != len(record.steps):
        yield Difference("number of steps", len(reference.steps), len(record.steps), "optimizer-steps-differ")
    made = record.observed.optimizer_steps if record.observed else None
    before = 0 if record.resumed is None else record.resumed.updates
    if before is None:
        return
    due = before + len(record.steps) - record.skipped_steps
    if made is not None and made != due:
        yield Difference("optimizer steps", due, made, "optimizer-steps-differ", plural=True)


def _determinism(reference: Record, record: Record) -> Iterator[Difference]:
    seen, other = reference.observed, record.observed
    asked = [run.job.training.deterministic for run in (reference, record)]
    if seen and other and asked != [seen.deterministic, other.deterministic] != [seen.deterministic] * 2:
        yield Difference("deterministic kernels", seen.deterministic, other.deterministic, plural=True)
