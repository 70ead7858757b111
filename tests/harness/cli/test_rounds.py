"""`harness compare --within` and `--max-minutes`: which cells run again, and until when."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.compare import FIRST_LOOK, Until, add_rounds, parse_within
from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.record import Record
from tests.harness.cli.command_line import refused
from tests.records import make_record, make_steps

SECONDS = {"ddp": 1.0, "zero0": 1.001, "fsdp": 1.1, "zero3": 4.0}
DRIFT = (1.0, 1.4, 0.7, 1.2, 2.0)


class Machine:
    """In place of ranks: a speed that drifts, and noise of a tenth in fsdp's runs."""

    def __init__(self) -> None:
        self.interrupted = False
        self.ran: list[tuple[str, int]] = []

    def cells(self, rounds: int) -> list[Any]:
        return [
            SimpleNamespace(
                job_id="0123456789ab", backend=label, world_size=2, repeat=repeat, key=f"{label}-{repeat}"
            )
            for repeat in range(rounds)
            for label in ("single", *SECONDS)
        ]

    def run(self, cells: list[Any], known: object) -> dict[str, Record]:
        self.ran += [(cell.backend, cell.repeat) for cell in cells]
        return {cell.key: self.record(cell.backend, cell.repeat) for cell in cells}

    def record(self, label: str, repeat: int) -> Record:
        noise = 1 + 0.1 * math.sin(7.0 * repeat) if label == "fsdp" else 1 + 0.01 * math.sin(5.0 * repeat)
        seconds = SECONDS.get(label, 1.0) * DRIFT[repeat % len(DRIFT)] * noise
        record = make_record(
            label=label, repeat=repeat, run_id=f"{label}-{repeat}", steps=make_steps(seconds=seconds)
        )
        return record.model_copy(update={"cell": f"{label}-{repeat}"})

    def rounds_of(self, label: str) -> int:
        return 1 + max((repeat for name, repeat in self.ran if name == label), default=0)


def added(machine: Machine, until: Until, said: list[str]) -> list[Record]:
    begin = [machine.record(label, 0) for label in ("single", *SECONDS)]
    made: Any = machine
    view: Any = SimpleNamespace(say=said.append)
    return add_rounds(machine.cells, made, {}, begin, until, view)


def test_rounds_are_added_for_the_cells_that_are_open_and_their_base_until_all_are_settled() -> None:
    machine, said = Machine(), list[str]()
    records = added(machine, Until(), said)
    assert machine.rounds_of("zero3") == machine.rounds_of("zero0") == FIRST_LOOK
    assert machine.rounds_of("fsdp") == machine.rounds_of("ddp") > FIRST_LOOK
    assert "single" not in {label for label, _ in machine.ran}
    assert said[0] == "round 2; open: zero0 on 2, zero3 on 2 and fsdp on 2"
    assert said[-1] == f"speeds are settled after {machine.rounds_of('ddp')} rounds"
    assert len(records) == 5 + len(machine.ran)


def test_a_precision_takes_more_rounds_than_an_order() -> None:
    coarse, fine = Machine(), Machine()
    added(coarse, Until(), [])
    added(fine, Until(precision=0.02), [])
    assert fine.rounds_of("fsdp") > coarse.rounds_of("fsdp")


def test_no_round_begins_after_the_time_and_what_is_open_is_told() -> None:
    machine, said = Machine(), list[str]()
    added(machine, Until(deadline=0.0), said)
    assert machine.ran == []
    assert said == ["no further round after 1 round; open: zero0 on 2, zero3 on 2 and fsdp on 2"]


def test_what_the_report_shows_in_order_is_not_told_as_open_when_time_is_up() -> None:
    machine, said = Machine(), list[str]()
    view: Any = SimpleNamespace(say=said.append)
    begin = [machine.record(label, n) for n in range(7) for label in ("single", "ddp", "zero3")]
    made: Any = machine
    add_rounds(machine.cells, made, {}, begin, Until(deadline=0.0), view)
    assert said == ["no further round after 7 rounds; open: none"]


class Failing(Machine):
    """One cell has no result in some rounds."""

    def __init__(self, label: str, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.label, self.fails = label, fails

    def record(self, name: str, repeat: int) -> Record:
        record = super().record(name, repeat)
        return record.model_copy(update={"status": "failed"}) if self.failed(name, repeat) else record

    def failed(self, name: str, repeat: int) -> bool:
        return name == self.label and self.fails(repeat)


@pytest.mark.parametrize("label", ["fsdp", "ddp"])
def test_a_round_in_which_a_cell_failed_is_left_out_and_the_others_settle_it(label: str) -> None:
    machine, said = Failing(label, lambda repeat: repeat in (3, 5)), list[str]()
    records = added(machine, Until(), said)
    assert said[-1] == f"speeds are settled after {machine.rounds_of('ddp')} rounds"
    (order,) = Comparison(records).rankings.values()
    assert order.base == "ddp"
    assert {order.to_base[name].order for name in ("fsdp", "zero3")} == {"slower"}
    assert order.to_base["fsdp"].rounds == machine.rounds_of("fsdp") - 2
    assert order.to_base["zero3"].rounds == machine.rounds_of("zero3") - (2 if label == "ddp" else 0)


def test_a_cell_that_fails_from_some_round_on_is_run_no_more() -> None:
    machine, said = Failing("fsdp", lambda repeat: repeat >= 3), list[str]()
    added(machine, Until(), said)
    assert machine.rounds_of("fsdp") == 5
    assert machine.rounds_of("zero3") == FIRST_LOOK
    assert "no further round of fsdp on 2: failed or diverged" in said


def test_where_the_base_fails_from_some_round_on_it_ends() -> None:
    machine, said = Failing("ddp", lambda repeat: repeat >= 3), list[str]()
    added(machine, Until(), said)
    assert {machine.rounds_of(name) for name in SECONDS} == {5}
    assert said[-1] == (
        "no further round of ddp on 2: failed or diverged; nor of cells that are compared with it"
    )


def test_a_base_that_diverges_gives_its_place_to_the_next_one() -> None:
    class Diverging(Failing):
        def record(self, name: str, repeat: int) -> Record:
            record = Machine.record(self, name, repeat)
            return record.model_copy(update={"status": "diverged"}) if self.failed(name, repeat) else record

    machine, said = Diverging("ddp", lambda repeat: repeat == 3), list[str]()
    added(machine, Until(), said)
    assert machine.rounds_of("ddp") == FIRST_LOOK
    # fsdp is compared with zero0, the first that is listed.
    assert {name for name in SECONDS if machine.rounds_of(name) > FIRST_LOOK} == {"zero0", "fsdp"}
    assert "no further round of ddp on 2: failed or diverged" in said


def test_no_cell_joins_rounds_that_an_earlier_command_ran_without_it() -> None:
    """An earlier command left fsdp out after eight rounds of twelve; the newest round may be an open one."""
    machine, said = Machine(), list[str]()
    earlier = [
        machine.record(label, n) for label in SECONDS for n in range(FIRST_LOOK if label == "fsdp" else 12)
    ]
    known = {record.cell: record for record in earlier}
    begin = [machine.record("single", 0), *(record for record in earlier if record.repeat == 0)]
    made: Any = machine
    view: Any = SimpleNamespace(say=said.append)
    add_rounds(machine.cells, made, known, begin, Until(), view)
    assert {repeat for _, repeat in machine.ran} == set(range(11, machine.rounds_of("fsdp")))
    assert {label for label, _ in machine.ran} == {"ddp", "fsdp"}


def test_a_round_that_was_interrupted_is_completed() -> None:
    machine = Machine()
    earlier = [machine.record(label, n) for n in range(3) for label in ("ddp", "zero0")]
    known = {record.cell: record for record in earlier}
    begin = [machine.record(label, 0) for label in ("single", *SECONDS)]
    made: Any = machine
    view: Any = SimpleNamespace(say=lambda _: None)
    add_rounds(machine.cells, made, known, begin, Until(), view)
    assert ("fsdp", 2) in machine.ran
    assert ("ddp", 2) not in machine.ran


def test_that_there_is_nothing_to_compare_is_told() -> None:
    machine, said = Machine(), list[str]()
    view: Any = SimpleNamespace(say=said.append)
    alone: Any = machine
    add_rounds(machine.cells, alone, {}, [machine.record("ddp", 0)], Until(precision=0.03), view)
    assert machine.ran == []
    assert said == ["no round is added: no two cells are compared in speed"]


def test_an_interruption_ends_it() -> None:
    machine = Machine()
    machine.interrupted = True
    added(machine, Until(), [])
    assert machine.ran == []


def test_a_precision_is_percent() -> None:
    assert parse_within("3%") == 0.03
    for text in ("3", "0%", "x%", "100 %"):
        with pytest.raises(HarnessError, match="give half the width of an interval, such as 3%"):
            parse_within(text)


def test_what_excludes_each_other_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "compare", "--within", "3%", "--batch", "largest")
    assert "--batch largest and --within or --max-minutes exclude each other" in error
