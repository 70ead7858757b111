"""Draws of few rounds from many, judged by what all of them say."""

import random
from pathlib import Path

from benchmarks.false_orders import TWIN, judge, table
from harness.record.store import write_record
from tests.records import make_record, make_steps

ROUNDS = 12


def keep(folder: Path, *, twin: float) -> None:
    """Two names of one backend, the second so much slower, and one that takes four times as long."""
    chance = random.Random(0)
    for number in range(ROUNDS):
        drift = chance.uniform(1, 3)
        for place, (label, seconds) in enumerate((("ddp", 0.5), (TWIN, 0.5 * twin), ("zero3", 2.0))):
            steps = make_steps(seconds=seconds * drift * chance.uniform(0.98, 1.02))
            directory = folder / f"{number}-{place}"
            directory.mkdir(parents=True)
            name = f"{place}-{number}"
            write_record(directory, make_record(label=label, repeat=number, run_id=name, steps=steps))


def found(folder: Path) -> dict[str, float]:
    return {s.what: s.value for s in judge(folder, folder, 7, 20, 0.1) if s.clock == "wall time"}


def test_a_backend_under_two_names_has_no_order_and_what_differs_has_one(tmp_path: Path) -> None:
    keep(tmp_path, twin=1.0)
    assert found(tmp_path) == {
        "false orders, the two alone": 0.0,
        "false orders, among all": 0.0,
        "settled: pairs that differ by 10 % or more": 1.0,
        "false answers: pairs that differ by 10 % or more": 0.0,
    }


def test_an_order_of_the_two_is_counted(tmp_path: Path) -> None:
    keep(tmp_path, twin=1.2)
    assert found(tmp_path)["false orders, the two alone"] == 1.0
    assert "20 of 20" in table(judge(tmp_path, tmp_path, 7, 20, 0.1))
