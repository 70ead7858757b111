"""Measured against expected communication of one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from harness.backends.mesh import Mesh
from harness.forms.terms import BUFFERS, STEP_PHASES, Volume
from harness.forms.textbook import TermDifference, term_differences, textbook_collectives
from harness.forms.workload import ELSEWHERE, Workload
from harness.judge.quantities.expected import expected_volume
from harness.judge.quantities.measures import sent_bytes_per_step
from harness.record import CommunicationPart, Record
from harness.record.workload import complex_parameters, known_strategy, of_record

Key = tuple[str, str, str, str]
"""(phase, collective, dtype, role of the group, or ELSEWHERE)."""
CLAIM_TOLERANCE = 0.01
"""Of the payload of the probed steps. Implementations of one strategy differ in norms, flags and handshakes,
and in whether they broadcast buffers, but not in gradients and weights."""


@dataclass(frozen=True, kw_only=True)
class VolumeDifference:
    """Payload of one kind of collective that is not as expected, on the rank where it differs most."""

    phase: str
    op: str
    dtype: str
    role: str
    rank: int
    measured_bytes: int
    expected_bytes: int
    group_ranks: tuple[int, ...] = ()
    """Ranks of that rank's group; () where the record does not say, or nothing was measured."""

    @property
    def group(self) -> str:
        """The role of the group, or its ranks where it has none."""
        return f"ranks {', '.join(map(str, self.group_ranks))}" if self.role == ELSEWHERE else self.role


def why_unknown(record: Record) -> str | None:
    """Why nothing, or nothing of the steps, is expected of a record; None: everything is."""
    if record.windows is None or not record.windows.probed:
        return "no step was probed (measure.probed_steps)"
    if record.layout is None or record.backend.effective is None:
        return "the record does not describe the model"
    if names := complex_parameters(record.layout):
        return f"{names[0]} is complex, which libraries count as one number here and as two there"
    pair = volume_of(record)
    if pair is None:
        return f"{record.backend.name} has no closed form here"
    return (
        "execution depends on data" if pair[1].unknown and record.layout.depends_on_data else pair[1].unknown
    )


def volume_of(record: Record) -> tuple[Workload, Volume] | None:
    """What the record's run is expected to communicate; None for a backend or run without an answer."""
    if record.backend.effective is None or record.windows is None or not record.windows.probed:
        return None
    workload = of_record(record)
    if workload is None:
        return None
    volume = expected_volume(record, workload)
    return None if volume is None else (workload, volume)


def measured_payload(record: Record, workload: Workload) -> dict[int, dict[Key, int]]:
    """Payload bytes by rank and kind of collective, over the probed steps or the whole run."""
    found: dict[int, dict[Key, int]] = {rank.rank: {} for rank in record.ranks}
    for row in record.comm:
        if row.of_job:
            continue
        kinds = found.setdefault(row.rank, {})
        key = _key(row, workload)
        kinds[key] = kinds.get(key, 0) + row.payload_bytes
    return found


def _key(row: CommunicationPart, workload: Workload) -> Key:
    """A role holds for the ranks that it has in this workload; a record that names no ranks is believed."""
    known = row.role != ELSEWHERE and (
        not row.group_ranks or sorted(row.group_ranks) == workload.group_ranks(row.role, row.rank)
    )
    return row.phase, row.op, row.dtype, row.role if known else ELSEWHERE


def expected_payload(volume: Volume, mesh: Mesh | None = None) -> dict[Key, int]:
    """Payload bytes that every rank is expected to hand to each kind of collective."""
    sums: dict[Key, int] = {}
    for collective in volume.collectives:
        role = collective.role
        if mesh is not None and mesh.shares_samples:
            role = mesh.canonical(role)
        key = (collective.phase, collective.op, collective.dtype, role)
        sums[key] = sums.get(key, 0) + collective.payload_bytes
    return sums


def is_derived(volume: Volume, phase: str, dtype: str) -> bool:
    """Whether a volume says what collectives of a phase and dtype move, be it nothing: within steps only."""
    if volume.unknown or phase not in STEP_PHASES:
        return False
    return not any(part.covers(phase, dtype) for part in volume.underived)


def volume_differences(record: Record) -> list[VolumeDifference] | None:
    """Every kind of collective of the steps whose payload is not as expected; None where nothing is."""
    pair = volume_of(record)
    if pair is None:
        return None
    workload, volume = pair
    measured = measured_payload(record, workload)
    volumes = _volume_by_rank(record, volume, measured)
    expected = {rank: expected_payload(of_rank, workload.mesh) for rank, of_rank in volumes.items()}
    everything = {key for sums in (*expected.values(), *measured.values()) for key in sums}
    kinds = {key for key in everything if is_derived(volume, key[0], key[2])}
    kinds -= _within_one_rank(record, workload) - {key for sums in expected.values() for key in sums}
    leeway = {id(of_rank): _leeway(record, of_rank) for of_rank in volumes.values()}
    found = []
    for key in sorted(kinds):
        rank, sent, wanted = max(
            ((rank, sums.get(key, 0), expected[rank].get(key, 0)) for rank, sums in measured.items()),
            key=lambda found: abs(found[1] - found[2]),
        )
        least, most = leeway[id(volumes[rank])](key)
        if not least <= sent <= most:
            phase, op, dtype, role = key
            found.append(
                VolumeDifference(
                    phase=phase, op=op, dtype=dtype, role=role, rank=rank, measured_bytes=sent,
                    expected_bytes=wanted, group_ranks=_group_ranks(record, workload, rank, key),
                )
            )  # fmt: skip
    return found


def _within_one_rank(record: Record, workload: Workload) -> set[Key]:
    """Collectives in groups of one rank alone: they send nothing, whoever calls them."""
    sizes: dict[Key, int] = {}
    for row in record.comm:
        key = _key(row, workload)
        sizes[key] = max(row.group_size, sizes.get(key, 0))
    return {key for key, size in sizes.items() if size == 1}


def _volume_by_rank(record: Record, of_first: Volume, ranks: Iterable[int]) -> dict[int, Volume]:
    """What each rank is expected to communicate: the same as rank 0, unless ranks share samples."""
    found: dict[int, Volume] = {}
    for rank in ranks:
        workload = of_record(record, rank) if record.world.dimensions and rank else None
        volume = expected_volume(record, workload) if workload is not None else None
        found[rank] = volume or of_first
    return found


def _leeway(record: Record, volume: Volume) -> Callable[[Key], tuple[int, int]]:
    """The least and the most payload of each kind that is as expected: one figure, unless it is claimed."""
    payload = expected_payload(volume, record.world.mesh)
    if record.backend.claim is None or record.backend.own_forms is not None:
        return lambda key: (payload.get(key, 0), payload.get(key, 0))
    buffers = expected_payload(Volume(collectives=tuple(c for c in volume.collectives if c.term == BUFFERS)))
    small = int(CLAIM_TOLERANCE * sum(payload.values()))

    def bounds(key: Key) -> tuple[int, int]:
        wanted = payload.get(key, 0)
        return wanted - buffers.get(key, 0) - small, wanted + small

    return bounds


def _group_ranks(record: Record, workload: Workload, rank: int, key: Key) -> tuple[int, ...]:
    """Ranks of the first group in which `rank` did this."""
    rows = (row for row in record.comm if row.rank == rank and _key(row, workload) == key)
    return next((tuple(sorted(row.group_ranks)) for row in rows), ())


def expected_sent_bytes_per_step(record: Record) -> float | None:
    """Ring bytes that a rank is expected to send per probed step, those of the job's own code as counted.

    Mean over the ranks; None: not known.
    """
    pair = volume_of(record)
    if pair is None:
        return None
    volumes = _volume_by_rank(record, pair[1], range(record.world.world_size))
    sent = [sent_per_step(pair[0], volume) for volume in volumes.values()]
    of_job = sent_bytes_per_step(record, [row for row in record.comm if row.of_job])
    return None if None in sent else fmean(part for part in sent if part is not None) + (of_job or 0)


def sent_per_step(workload: Workload, volume: Volume) -> float | None:
    """Ring bytes that a rank sends per step of the window; None where the volume of a step is not known."""
    if volume.unknown or volume.underived:
        return None
    total = sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in STEP_PHASES)
    return total / len(workload.steps)


def textbook_differences(record: Record) -> list[TermDifference] | None:
    """Expected minus textbook, term by term; None where one of them is not known."""
    pair, effective = volume_of(record), record.backend.effective
    strategy = known_strategy(record)
    if pair is None or pair[1].unknown or effective is None or strategy is None or strategy.facts.cuts_layers:
        return None
    if record.world.dimensions:
        return None  # the papers count data-parallel strategies
    workload, volume = pair
    weights = effective.parameter_dtype
    textbook = textbook_collectives(
        workload, weight_dtype=weights, reduce_dtype=effective.reduce_dtype or weights
    )
    return term_differences(workload, volume, textbook)
