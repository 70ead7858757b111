"""Cells that take turns, most of them with ranks that need no torch."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from harness.errors import HarnessError
from harness.forms.activations import from_json
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.launch import STOPPING
from harness.launch import launcher as module
from harness.launch.cells import plan
from harness.launch.launcher import (
    OTHERS_RAN,
    OTHERS_TOOK_TURNS,
    groups,
    modules_to_preload,
    run_cell,
    running_cell,
    take_turns,
)
from harness.record import PredictionPart, Record, provenance
from harness.record.measured import TurnsPart
from harness.record.store import Store, read_record
from harness.run_directory.assemble import Outcome
from harness.run_directory.events import StepEvent, TurnEvent
from harness.run_directory.request import RunRequest
from tests.fake_ranks import STEP, Behaviour, FakeLauncher, Rank
from tests.forkserver import launcher
from tests.harness.cli.command_line import HARNESS, SHORT, SMALL, environment
from tests.patience import SECONDS, until
from tests.records import make_record
from tests.representatives import first

STEPS, TURNS = 2, 3
TURN_OF_BOTH = 2
"""The first call after both cells were set up."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A run that is interrupted lets no second signal through."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_turns(meanwhile: Callable[[Rank, int], None] = lambda _rank, _turn: None) -> Behaviour:
    """Trains in turns; `meanwhile` is called as each begins."""

    def behaves(rank: Rank) -> None:
        for turn in range(TURNS):
            rank.turns.send_bytes(b"")
            rank.events.write(TurnEvent.model_validate_json(rank.turns.recv_bytes()))
            meanwhile(rank, turn)
            for step in range(STEPS * turn, STEPS * (turn + 1)):
                rank.events.write(StepEvent(step=step, seconds=0.01, **STEP))
        rank.done()

    return behaves


def dies_in_its_second_turn(rank: Rank, turn: int) -> None:
    if turn == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def dies_as_it_waits(rank: Rank) -> None:
    rank.turns.send_bytes(b"")
    os.kill(os.getpid(), signal.SIGKILL)


def fails_in_setup(rank: Rank) -> None:
    rank.fail("no such kernel")


def planned(names: list[str], sizes: Sequence[int] = (2,), repeats: int = 1) -> list[RunRequest]:
    experiment = load_experiment(None, ["compare.turns=2", "compare.noise_runs=false"])
    return [cell for cell in plan(experiment, names, sizes, repeats, "cpu") if cell.backend in names]


def run(
    folder: Path, behaviours: dict[str, Behaviour], on_turn: Callable[[int], None] = lambda _: None
) -> dict[str, Record]:
    """Records by backend, whose rank 1 behaves as given; rank 0 takes all of its turns."""
    store, cells = Store(folder), planned([*behaviours])
    runs = {
        cell.key: running_cell(
            cell, store, FakeLauncher({0: in_turns(), 1: behaviours[cell.backend]}),
            command=["harness"], on_event=lambda _: None, takes_turns=True,
        )
        for cell in cells
    }  # fmt: skip
    calls = iter(range(100))
    names = {cell.key: cell.backend for cell in cells}
    ends = take_turns(runs, STEPS, lambda _: on_turn(next(calls)))
    return {names[key]: record for key, record in ends}


def test_the_record_says_which_turns_and_beside_whom(tmp_path: Path) -> None:
    records = run(tmp_path, {"ddp": in_turns(), "fsdp": in_turns(), "zero1": in_turns()})
    ids = {record.run_id for record in records.values()}
    turns = [record.turns for record in records.values() if record.turns is not None]
    assert sorted(place for part in turns for place in part.places) == list(range(3 * TURNS))
    # Each has its turn before any has another one.
    assert [[place // 3 for place in part.places] for part in turns] == [[0, 1, 2]] * 3
    for record in records.values():
        assert record.status == "ok"
        assert {record.run_id, *record.turns.beside} == ids
        assert len(record.steps) == STEPS * TURNS


@pytest.mark.parametrize(
    "behaviour",
    first([dies_as_it_waits], [in_turns(dies_in_its_second_turn), dies_as_it_waits, fails_in_setup]),
)
def test_a_rank_that_ends_takes_no_other_cell_with_it(tmp_path: Path, behaviour: Behaviour) -> None:
    records = run(tmp_path, {"ddp": behaviour, "fsdp": in_turns()})
    error = records["ddp"].error
    assert records["ddp"].status == "failed"
    assert error.rank == 1
    assert records["fsdp"].status == "ok"
    assert len(records["fsdp"].steps) == STEPS * TURNS


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_during_which_our_files_changed_says_so(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provenance.code_fingerprint()
    if changed:
        monkeypatch.setattr(provenance, "measuring_files", list)
    records = run(tmp_path, {"ddp": in_turns()})
    assert records["ddp"].status == "ok"
    assert records["ddp"].environment.code_changed is changed
    told = [finding.id for finding in Comparison(records.values()).findings]
    assert ("code-changed" in told) is changed


def test_an_interruption_keeps_the_steps_of_all(tmp_path: Path) -> None:
    def interrupts(call: int) -> None:
        if call == TURN_OF_BOTH + 2:
            raise KeyboardInterrupt

    records = run(tmp_path, {"ddp": in_turns(), "fsdp": in_turns()}, interrupts)
    assert [(r.error.kind, len(r.steps)) for r in records.values() if r.error] == [("Interrupted", STEPS)] * 2
    assert {record.run_id for _, record in Store(tmp_path).runs()[0]} == {r.run_id for r in records.values()}


def test_an_interrupt_while_a_record_is_made_costs_that_cell_alone() -> None:
    record = make_record(label="fsdp")

    def ends_badly() -> Generator[str, object, Record]:
        yield "ddp-run"
        raise KeyboardInterrupt

    def is_ended() -> Generator[str, object, Record]:
        try:
            yield "fsdp-run"
            yield "never"
        except KeyboardInterrupt:
            pass
        return record

    runs: Any = {"ddp": ends_badly(), "fsdp": is_ended()}
    assert list(take_turns(runs, 1, lambda key: None)) == [("fsdp", record)]
    alone: Any = {"ddp": ends_badly()}
    with pytest.raises(KeyboardInterrupt):
        list(take_turns(alone, 1, lambda key: None))


GLOO = "gloo_tcp_loop"
"""Its thread looks for events every 10 ms, whatever a rank does: a thousandth of a processor."""


SETTLED_AFTER = 3
"""Looks, 10 ms apart, that find the same."""
MOST_LOOKS = 6000


def settled() -> dict[str, tuple[int, int]]:
    """`switches_and_pages` once they stand still: threads that begin to wait go to sleep after a while."""
    same, found = 0, switches_and_pages()
    for _ in range(MOST_LOOKS):
        time.sleep(0.01)
        before, found = found, switches_and_pages()
        same = same + 1 if found == before else 0
        if same == SETTLED_AFTER:
            break
    return found


def switches_and_pages() -> dict[str, tuple[int, int]]:
    """Of the ranks of each cell: how often threads but gloo's went on or off a processor, and their pages."""
    found: dict[str, tuple[int, int]] = {}
    for process in psutil.Process().children(recursive=True):
        folder = Path(f"/proc/{process.pid}")
        runs = {name[1] for file in process.open_files() if (name := re.search(r"-(\w+)-n2-r0", file.path))}
        for backend in runs:
            threads = [
                text for path in folder.glob("task/*/status") if GLOO not in (text := path.read_text())
            ]
            switches = sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", "".join(threads))))
            pages = int((folder / "statm").read_text().split()[1])
            before = found.get(backend, (0, 0))
            found[backend] = before[0] + switches, before[1] + pages
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long(seconds=10)
@pytest.mark.costly
def test_ranks_that_wait_sleep_and_hold_no_more(tmp_path: Path) -> None:
    """Real ones, with two OpenMP threads each: no thread runs once, and no page is added."""
    chosen = [
        *SMALL[1::2], "compare.turns=1", "compare.noise_runs=false", "runtime.threads_per_rank=2",
        "training.steps=5", "measure.warmup_steps=1", "measure.probed_steps=1", "measure.traced_steps=0",
    ]  # fmt: skip
    experiment, store, names = load_experiment(None, chosen), Store(tmp_path), ("ddp", "fsdp", "fsdp1")
    cells = {cell.key: cell for cell in plan(experiment, names, [2], 1, "cpu") if cell.backend in names}
    runs = {
        key: running_cell(
            cell, store, launcher(), command=["harness"], on_event=lambda _: None,
            takes_turns=True,
        )
        for key, cell in cells.items()
    }  # fmt: skip
    looks: list[tuple[str, dict[str, tuple[int, int]]]] = []

    def look(key: str) -> None:
        looks.append((cells[key].backend, settled()))

    records = dict(take_turns(runs, 1, look))
    assert {record.status for record in records.values()} == {"ok"}
    calm = [
        (before[name], after[name])
        for (runs_now, before), (_, after) in pairwise(looks)
        for name in {*names} - {runs_now}
        if name in before and name in after
    ]
    assert len(calm) >= 4
    assert [before for before, _ in calm] == [after for _, after in calm]


def part(host_bytes: int, limit: int = 8 * 10**9) -> PredictionPart:
    return PredictionPart(
        peak_bytes=1, moment="forward/backward", kinds={}, device_bytes=1, host_bytes=host_bytes,
        host_limit_bytes=limit, made_by="x",
    )  # fmt: skip


PAIR, WITH_OPTION = ["ddp", "fsdp"], ["ddp", "zero3", "zero3:leaf_module=blocks"]
OF_TWO = "compare.turns: cells on 2 ranks do not take turns: "


@pytest.mark.parametrize(
    ("names", "gigabytes", "limit", "device", "why"),
    [
        (PAIR, [0.1, 0.1], 8, "cpu", None),
        (PAIR, [3, 3], 8, "cpu", f"{OF_TWO}alive at once they need 7.3 GB"),
        (PAIR, [0.1, 0.1], 8, "cuda", f"{OF_TWO}on GPUs"),
        # Whose memory is not known is counted as its backend twice.
        (WITH_OPTION, [3, 1], 24, "cpu", None),
        (WITH_OPTION, [3, 1], 9, "cpu", f"{OF_TWO}alive at once they need 7.9 GB"),
        (PAIR, [], 8, "cpu", "compare.turns: cells do not take turns: the memory of none is known"),
    ],
)
def test_cells_take_turns_where_they_fit_together(
    names: list[str], gigabytes: list[float], limit: int, device: str, why: str | None
) -> None:
    said: list[str] = []
    cells = planned(names)
    sizes = zip(cells, gigabytes, strict=False)
    parts = {cell.key: part(int(size * 10**9), limit * 10**9) for cell, size in sizes}
    unknown = [cell.key for cell in cells if cell.key not in parts]
    found = groups(cells, 2, device, parts, unknown, (), said.append)
    assert [[cell.backend for cell in group] for group in found] == (
        [names] if why is None else [[name] for name in names]
    )
    assert len(said) == (why is not None)
    assert "".join(said).startswith(why or "")


def test_the_rest_of_a_round_runs_as_its_first_cells_did() -> None:
    said: list[str] = []
    cells = planned(["ddp", "fsdp"])
    parts = {cell.key: part(1) for cell in cells}
    whole = make_record(label="zero1", repeat=cells[0].repeat)
    failed = whole.model_copy(update={"status": "failed"})
    assert [len(g) for g in groups(cells, 3, "cpu", parts, (), [failed], said.append)] == [2]
    assert [len(g) for g in groups(cells, 3, "cpu", parts, (), [whole], said.append)] == [1, 1]
    assert said == ["compare.turns: cells on 2 ranks do not take turns: other cells of round 1 did not"]
    turns = TurnsPart(steps=3, places=[0], beside=[], waited_seconds=0.0, waited_process_seconds=0.0)
    in_turns = whole.model_copy(update={"turns": turns})
    assert [len(g) for g in groups(cells, 3, "cpu", parts, (), [whole, in_turns], said.append)] == [2]
    assert said[1:] == [f"compare.turns: {OTHERS_TOOK_TURNS}; --fresh runs all again"]


@pytest.mark.parametrize("turns", [1, None])
def test_that_cells_join_rounds_of_others_is_told(turns: int | None) -> None:
    said: list[str] = []
    cells = planned(["fsdp"], repeats=2)
    parts = {cell.key: part(1) for cell in cells}
    before = [make_record(label="ddp", repeat=n, job_id=cells[0].job_id) for n in range(2)]
    groups(cells, turns, "cpu", parts, (), before[:1], said.append)
    assert said == []
    groups(cells, turns, "cpu", parts, (), before, said.append)
    assert said == [f"{OTHERS_RAN}; --fresh runs all again"]


@pytest.mark.parametrize(("host_bytes", "sizes"), [(1, [4]), (2 * 10**9, [2, 2]), (4 * 10**9, [1, 1, 1, 1])])
def test_several_numbers_of_ranks_take_turns_where_they_fit(host_bytes: int, sizes: list[int]) -> None:
    cells = planned(["ddp", "fsdp"], sizes=[1, 2])
    parts = {cell.key: part(host_bytes) for cell in cells}
    found = groups(cells, 1, "cpu", parts, (), (), lambda text: None)
    assert [len(group) for group in found] == sizes


def test_the_load_of_a_record_is_what_the_run_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.25, 9.0, 9.0])
    monkeypatch.setattr(module, "load_average", lambda: next(loads))

    class Launcher:
        device = "cpu"

        def running(self, *_: Any, **__: Any) -> Iterator[str]:
            next(loads)
            return Outcome(exit_codes={0: 1})
            yield ""

    store, launcher = Store(tmp_path), cast(Any, Launcher())
    record = run_cell(*planned(["single"], sizes=[1]), store, launcher, command=["x"])
    assert record.environment.load_average == 0.25
    assert read_record(store.record_path(record)) == record


def test_the_fork_server_imports_peft_where_a_job_has_adapters_and_nowhere_else() -> None:
    plain, adapted = (
        modules_to_preload(load_experiment(None, settings), ["ddp"])
        for settings in ([], ["adapter.kind=lora"])
    )
    assert [name for name in adapted if name not in plain] == ["peft", "peft.tuners.lora.bnb"]


def test_a_forked_process_traces_a_model_or_says_why_not() -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    profile = from_json(json.loads(launcher().trace(json.dumps({"config": config, "variant": {}}))))
    assert profile.block.saved
    request = json.dumps({"config": {"model_type": "no such model"}, "variant": {}})
    with pytest.raises(HarnessError, match=r"activations of a no such model cannot be traced without data"):
        launcher().trace(request)


ASKS = """\
import multiprocessing, os, signal, sys, threading
from harness.launch.ending import end_of_fork_server, fork_server
from harness.launch.launcher import LocalLauncher

def kill():
    os.kill(fork_server(), signal.SIGKILL)

def main():
    launcher = LocalLauncher.__new__(LocalLauncher)  # one whose server imports nothing
    launcher._context = multiprocessing.get_context("forkserver")
    ask = lambda text: print(launcher.ask("json:loads", text, "asking"))
    ask("1")
    for text in ("2", "3"):
        kill()
        ask(text)
    os.kill(fork_server(), signal.SIGSTOP)  # it accepts a connection and answers nothing
    threading.Timer(0.2, kill).start()
    ask("4")
    server = fork_server()
    print(end_of_fork_server(None))
    kill()
    print(end_of_fork_server(server).replace(str(server), "N"))

if __name__ == "__main__":
    main()
"""


def test_an_import_that_fails_in_the_fork_server_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise MemoryError('no room')")
    command = [sys.executable, "-c", "import harness.rank.preload"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == "harness: imports: MemoryError no room\n"


def test_a_killed_fork_server_is_replaced_and_its_end_is_said(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    done = subprocess.run(
        [sys.executable, "asks.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=SECONDS
    )
    *answers, end = done.stdout.splitlines()
    assert answers == ["1", "2", "3", "4", "None"]
    assert end == "the fork server (process N), which starts processes, was killed by SIGKILL"


@pytest.mark.costly
def test_a_fork_server_that_is_killed_costs_the_cell_that_runs(tmp_path: Path) -> None:
    """The cheaper test is the one above."""
    process = subprocess.Popen(
        [*HARNESS, "compare", "--backends", "ddp,fsdp", "--nproc", "2", *SHORT, "--set", "training.steps=100",
         "--set", "compare.turns=1"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(lambda: list(tmp_path.glob("runs/*-ddp-*/rank-00001.jsonl")), process)
    (server,) = [
        child for child in psutil.Process(process.pid).children()
        if any("multiprocessing.forkserver" in word for word in child.cmdline())
    ]  # fmt: skip
    server.kill()
    out, _ = process.communicate(timeout=SECONDS)
    found = {record.backend.name: record for record in map(read_record, tmp_path.glob("runs/*/record.json"))}
    assert (found["fsdp"].status, found["ddp"].status) == ("ok", "failed"), out
    assert "fork server" in found["ddp"].error.message
    assert "SIGKILL" in found["ddp"].error.message


STREAMS = """\
import os
from harness.launch import open_standard_streams
open_standard_streams()
print("lost")
with open("found", "w") as found:
    print(found.fileno() > 2, [os.get_inheritable(number) for number in range(3)], file=found)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_numbers_of_closed_streams_are_given_to_nothing(closed: str, tmp_path: Path) -> None:
    subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, STREAMS], cwd=tmp_path, check=True
    )
    assert (tmp_path / "found").read_text() == "True [True, True, True]\n"


STARTS = """\
import os, subprocess, sys, time
from harness.launch.ending import leaving_none_behind

spared = subprocess.Popen(["sleep", "600"])
with leaving_none_behind():
    rank = os.fork()
    if rank == 0:
        own = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            open("daemon.part", "w").write(str(os.getpid()))
            os.rename("daemon.part", "daemon")
            time.sleep(600)
        while not os.path.exists("daemon"):
            time.sleep(0.01)
        open("own", "w").write(str(own.pid))
        os._exit(0)
    os.waitpid(rank, 0)
print(spared.poll())
spared.kill()
"""


def test_daemons_and_sessions_of_their_own_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.stdout == "None\n"
    numbers = [int((tmp_path / name).read_text()) for name in ("own", "daemon")]
    until(lambda: not any(map(psutil.pid_exists, numbers)))
