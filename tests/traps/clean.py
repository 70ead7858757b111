"""The clean matrix: which cells there are, and what must hold of them, since nothing is wrong."""

from collections.abc import Sequence

from harness.backends import registry
from harness.backends.base import World
from harness.judge.facts import BY_KEY
from harness.judge.quantities import rank_states, volume_differences, why_unknown
from harness.judge.rows import JudgedRun
from harness.record import Record
from tests.built_in import MULTIPLYING

from .matrix import Matrix

ACCUMULATIONS = (1, 4)
PRECISIONS = ("fp32", "bf16-mixed")
FORMS = (
    ("model_state_bytes", "expected_model_state_bytes"),
    ("sent_bytes_per_step", "expected_sent_bytes_per_step"),
)
"""Measured figures, each with its closed form."""
KINDS = ("weights", "gathered", "gradients", "masters", "optimizer", "communication", "buffers")
LABELS = {"tp": "tp:tensor=2", "pp": "pp:stages=2"} | {
    name: f"{name}:correct_gradients=True" for name in MULTIPLYING
}
"""Of backends that need an option to fit the job's two heads and two blocks, or to be right."""
AFTER_TRACE = "measure.warmup_steps=2"
"""In the first two forward passes ZeRO-3 compares its trace of modules between ranks: a mean has no form."""
FEW = ("ddp", "zero2", "zero3", "fsdp", "fsdp1", "ulysses-zero3", LABELS["pp"], LABELS["tp"])
"""One of each family."""
GROUPS = ("zero3:hpz=2", "fsdp:reshard=2")
"""Sharding that keeps weights within groups of ranks; it takes two such groups."""


def clean_labels(world_size: int) -> list[str]:
    """Built-in backends that run on this many CPU ranks.

    On one rank the sharding strategies of FSDP1 are left out: it takes NO_SHARD there, which is T14.
    """
    world = World(rank=0, world_size=world_size, local_rank=0, ranks_per_node=world_size, device="cpu")
    names = [
        LABELS.get(name, name)
        for name, entry in registry.entries().items()
        if name != registry.REFERENCE and entry.target.startswith("harness.backends.")
    ]
    further = [*(GROUPS if world_size >= 4 else ()), "pp:schedule=gpipe,stages=2", "cp:rotation=all-to-all"]
    return [
        label
        for label in (*names, *further)
        if not registry.unmet_requirements(registry.create(label), world)
        and not (world_size == 1 and label in ("fsdp1", "fsdp1-grad-op"))
    ]


def assert_no_finding(
    world_size: int, precision: str, accumulation: int, matrix: Matrix, tally: dict[str, list[int]],
    labels: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run these backends, or all, on so many ranks; none may raise a finding or differ from the reference."""
    settings = (
        f"training.precision={precision}", f"training.accumulation_steps={accumulation}",
        "training.global_batch_size=16", AFTER_TRACE,
    )  # fmt: skip
    assert_clean(labels or clean_labels(world_size), world_size, settings, matrix, tally)


def assert_clean(
    labels: Sequence[str], world_size: int, settings: Sequence[str], matrix: Matrix,
    tally: dict[str, list[int]] | None = None, *, true: Sequence[str] = (), derived: bool = True,
) -> dict[str, Record]:  # fmt: skip
    """Run these; each must end, raise no finding, train as the reference does, and equal its closed forms.

    `true`: kinds of findings that hold of this job; without `derived` closed forms may be unknown. Return the
    records by canonical label.
    """
    found = [f for f in matrix.findings(labels, world_size, settings) if f.id not in true]
    if tally is not None:
        tally["clean"][0] += len(found)
        tally["clean"][1] += len(labels)
    assert not found, [(f.id, f.message) for f in found]
    rows = matrix.compare(labels, world_size, settings).rows
    low = any(word in setting for setting in settings for word in ("bf16", "fp16", "8bit", "fp8"))
    wrong = not_as_wanted(rows, {"exact", "tight", *(["band"] if low else [])}, derived)
    assert not wrong, wrong
    return {row.record.backend.label: row.record for row in rows}


def not_as_wanted(rows: Sequence[JudgedRun], parity: set[str], derived: bool) -> dict[str, object]:
    """What is wrong with each row: its ending, its parity, or a figure that is not its closed form."""
    wrong: dict[str, object] = {}
    for row in rows:
        if row.record.status != "ok":
            wrong[row.label] = row.record.reasons or row.record.error
        elif row.judgement.parity not in parity:
            wrong[row.label] = row.judgement
        elif derived and (figures := differing_figures(row)):
            wrong[row.label] = figures
    return wrong


def differing_figures(row: JudgedRun) -> list[object]:
    """Figures of a row that are not as its closed forms say, of each rank; empty: all are, to the byte."""
    found, record = differing_bytes(row.record), row.record
    steady = record.world.world_size > 1 and record.windows.warmup > 1
    for names in FORMS if steady else ():
        measured, derived = (BY_KEY[name].read(row.run, row.judgement) for name in names)
        if None in (measured, derived) or measured != derived:
            found.append((names[0], measured, derived))
    return found


def differing_bytes(record: Record) -> list[object]:
    """What each rank holds and sends that is not derived, or not so."""
    assert record.status == "ok", record.reasons or record.error
    found = differing_states(record)
    if record.world.world_size == 1:
        return found
    unknown, differences = why_unknown(record), volume_differences(record)
    known = unknown is None and differences is not None
    return [*found, *(differences if known else [unknown or "nothing is expected of its bytes"])]


def differing_states(record: Record) -> list[object]:
    """Of each rank and kind, what is held and what is derived, where these are not equal."""
    found: list[object] = []
    assert len(rank_states(record)) == record.world.world_size
    for states in rank_states(record):
        expected = states.expected.kinds() if states.expected else {}
        found += [
            (states.rank, kind, states.measured.get(kind), expected.get(kind))
            for kind in KINDS
            if states.measured.get(kind, 0) != expected.get(kind, 0)
        ]
    return found
