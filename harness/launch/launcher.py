"""Runs one cell on this machine: starts its ranks, each in a fresh process, and watches them to their end."""

from __future__ import annotations

import atexit
import errno
import math
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal, TypeVar

from harness.backends import registry
from harness.backends.libraries.facts import absent
from harness.errors import HarnessError, JobError
from harness.files import name_multiprocessing_folder, scratch_folder
from harness.job.experiment import Experiment
from harness.job.pairs import why_refused
from harness.launch import STOPPING, ending, open_standard_streams
from harness.launch.cells import begin_run
from harness.launch.owner import forget_owner, keep_outcome, note_owner
from harness.launch.rank_main import enter_question, enter_rank
from harness.launch.watch import Watch, ask_where
from harness.nested import grouped
from harness.record import PredictionPart, Record
from harness.record.provenance import has_changed, load_average
from harness.record.store import Store, keep_record
from harness.run_directory import assemble
from harness.run_directory.events import Event, Tail, TurnEvent, has_ended_well
from harness.run_directory.request import LOCAL_RENDEZVOUS, RunRequest, rank_file, rank_log, rank_state
from harness.safe_text import described, harmless, redacted

EVERY_RANK = ("torch", "transformers")
"""Distributions that each rank imports, whatever its backend."""
EXTRA = "pip install 'sharding-harness[train]'"


def require_libraries(what: str, packages: tuple[str, ...] = EVERY_RANK) -> None:
    """Raise HarnessError where one of these distributions is not installed. what: who needs them, plural."""
    if missing := absent(packages):
        are = "is" if len(missing) == 1 else "are"
        raise HarnessError(f"{' and '.join(missing)} {are} not installed, which {what} need: {EXTRA}")


POLL_SECONDS = 0.25
SILENT_SECONDS = 10.0
"""After these a function of the user's own that has not returned is named."""
GRACE_SECONDS = 10.0
"""After one rank failed, the others may say what they saw before they are ended."""

EventHandler = Callable[[Event], None]
Stopped = Literal["timeout", "stuck", "interrupted"] | None
Result = TypeVar("Result")
InTurns = Generator[str, TurnEvent, Result]
"""Goes on until all ranks of a run wait for their turn, yields the run's id, and is sent the turn."""


def whole(run: InTurns[Result]) -> Result:
    """The result of a run that takes no turns; leaves no process behind."""
    with ending.leaving_none_behind():
        try:
            next(run)
        except StopIteration as end:
            return end.value
    raise RuntimeError("a run that takes no turns waits for one")


UNSEEN = 255
"""Exit code of a process whose fork server is gone (multiprocessing, popen_forkserver.py)."""


class ForkServerLost(HarnessError):
    """The fork server was killed."""


class LocalLauncher:
    """Runs cells one after the other on this machine.

    On the CPU a fork server imports the libraries once and forks each rank. On CUDA every rank is a
    plain new process, since a server that touched the driver would spoil its children.
    """

    def __init__(self, device: str, preload: Iterable[str] = ()) -> None:
        require_libraries("ranks")
        self.device = device
        self._context: BaseContext
        if device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see
            # OpenMP threads that spin long stall each other where another process needs a core: steps of a
            # rank with two threads were seen to last 60 times longer. Read when torch is imported.
            os.environ.setdefault("GOMP_SPINCOUNT", "10000")
            os.environ["HARNESS_PRELOAD"] = ",".join(preload)
            open_standard_streams()
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["harness.rank.preload"])
            name_multiprocessing_folder()
            atexit.register(ending.kill_fork_server)
            # What is started meanwhile never meets these; one that comes is delivered afterwards.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            try:
                resource_tracker.ensure_running()  # its start would end a block of SIGINT
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                forkserver.ensure_running()  # it imports while this process goes on
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        else:
            self._context = multiprocessing.get_context("spawn")

    def check(self, job_json: str) -> dict[str, Any]:
        """Facts about a job, from a process of its own. Raises JobError if it cannot run."""
        return self.ask("harness.rank.job_check:check_text", job_json, "checking the job")

    def trace(self, request: str) -> str:
        """Profile of a model's activations (`rank.probes.activation_trace`), from a process of its own.

        Raises HarnessError if it cannot be traced.
        """
        return self.ask("harness.rank.probes.activation_trace:profile_text", request, "tracing the model")

    def ask(self, function: str, argument: str, what: str) -> Any:
        """What a function of a rank's code ('module:function') answers, in another process.

        what: is done, for an error. Raises JobError, and HarnessError where the process breaks off.
        """
        try:
            return self._ask(function, argument, what)
        except ForkServerLost:
            return self._ask(function, argument, what)  # of a new one

    def _ask(self, function: str, argument: str, what: str) -> Any:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        doing: str | None = None
        """Code of the user's own that runs."""
        with scratch_folder("check") as scratch, ending.leaving_none_behind():
            log = Path(scratch) / "log"
            process = self._begin(enter_question, function, argument, str(log), theirs)
            theirs.close()
            try:
                while True:
                    if doing and not ours.poll(SILENT_SECONDS):
                        _say(f"{doing} has not returned for {SILENT_SECONDS:.0f} s; press Ctrl-C if it hangs")
                    answer: dict[str, Any] = ours.recv()
                    if "note" in answer:
                        _say(answer["note"])
                    elif "doing" in answer:
                        doing = answer["doing"]
                    else:
                        break
            except EOFError as error:
                process.join()
                tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
                said = f": {''.join(tail)}" if tail else ""
                if process.exitcode == assemble.EVENTS_LOST and not log.exists():
                    said = f": {log} cannot be written (TMPDIR)"
                if doing:
                    raise HarnessError(
                        f"{doing} ended the process with exit code {process.exitcode}{said}; return what it "
                        "makes instead"
                    ) from error
                raise HarnessError(f"{what} failed with exit code {process.exitcode}{said}") from error
            except KeyboardInterrupt:
                ending.end_asked(process)
                raise
            process.join()
        if "error" in answer:
            raise JobError(answer["error"])
        return answer["answer"]

    def running(
        self, run_directory: Path, request: RunRequest, on_event: EventHandler, *, takes_turns: bool = False
    ) -> InTurns[assemble.Outcome]:
        """Start all ranks, pass rank 0's events on as they come, and return when all have ended.

        What ranks leave behind is ended by who drives it: `whole`, or `take_turns`.
        """
        started = time.time()
        processes: dict[int, Any] = {}
        running = _Running(
            run_directory=run_directory,
            processes=processes,
            watch=Watch(run_directory, request, lambda: _living(processes)),
            tail=Tail(rank_file(run_directory, 0)),
            on_event=on_event,
            run_id=request.run_id,
        )
        stopped: Stopped = None
        server: int | None = None
        try:
            # A port that was only looked up may be another program's when rank 0 listens.
            with socket.create_server(("127.0.0.1", 0), backlog=4096) as store:
                for rank in range(request.world_size):
                    ours, theirs = multiprocessing.Pipe() if takes_turns else (None, None)
                    processes[rank] = self._start(run_directory, request, rank, store, theirs)
                    if ours is not None and theirs is not None:
                        running.calls[rank] = ours
                        theirs.close()
            server = ending.fork_server()
            stopped = yield from running.follow()
        except KeyboardInterrupt:
            # The ranks are ended and the record is written in seconds: a second Ctrl-C must not lose it.
            for number in STOPPING:
                signal.signal(number, signal.SIG_IGN)
            stopped = "interrupted"
            if (note := running.watch.still()) is not None:
                ask_where(run_directory, _living(processes), note)
        except BaseException:  # the folder is gone or cannot be read any more, or another run failed so
            ending.end_all(list(processes.values()), started)
            raise
        running.note_ends()
        in_order_of_their_end = sorted(processes, key=lambda r: (running.ended_at.get(r, math.inf), r))
        codes = {rank: processes[rank].exitcode for rank in in_order_of_their_end}
        ending.end_all(list(processes.values()), started)
        running.pass_events_on()
        lost = ending.end_of_fork_server(server) if UNSEEN in codes.values() else None
        verdict = (
            assemble.Verdict(status="failed", kind=ForkServerLost.__name__, cause=lost) if lost else None
        )
        return assemble.Outcome(exit_codes=codes, ended_at=running.ended_at, stopped=stopped, verdict=verdict)

    def _start(
        self,
        run_directory: Path,
        request: RunRequest,
        rank: int,
        store: socket.socket,
        turns: Connection | None,
    ) -> Any:
        variables = self._variables(request, rank, store.getsockname()[1])
        state, log = (str(file(run_directory, rank)) for file in (rank_state, rank_log))
        return self._begin(
            enter_rank, str(run_directory), state, log, variables, turns, None if rank else store
        )

    def _begin(self, target: Callable[..., None], *arguments: Any) -> Any:
        """A new process. Raises ForkServerLost."""
        process = self._context.Process(target=target, args=arguments)  # type: ignore[attr-defined]
        try:
            process.start()
        except (EOFError, OSError) as error:
            if (end := ending.end_of_fork_server(ending.fork_server())) is None:
                raise
            raise ForkServerLost(f"{end}; a new one starts what follows") from error
        return process

    def _variables(self, request: RunRequest, rank: int, port: int) -> dict[str, str]:
        """What a rank adds to the environment of this process."""
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(request.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(request.threads_per_rank),
            LOCAL_RENDEZVOUS: "1",
        }
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return variables


@dataclass(kw_only=True)
class _Running:
    run_directory: Path
    processes: Mapping[int, Any]
    watch: Watch
    tail: Tail
    on_event: EventHandler
    run_id: str
    calls: dict[int, Connection] = field(default_factory=dict)
    """To ranks that take turns."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that wait for their turn."""
    ended_at: dict[int, float] = field(default_factory=dict)

    def follow(self) -> InTurns[Stopped]:
        """Return when all have ended or must be ended; why they must, else None."""
        deadline: float | None = None
        """Once one has failed."""
        while alive := [p for p in self.processes.values() if p.exitcode is None]:
            calls = [call for rank, call in self.calls.items() if rank not in self.waiting]
            ready = wait([*(p.sentinel for p in alive), *calls], timeout=POLL_SECONDS)
            require_folder(self.run_directory)
            self.pass_events_on()
            for rank in [rank for rank, call in self.calls.items() if call in ready]:
                try:
                    self.calls[rank].recv_bytes()
                    self.waiting.add(rank)
                except (EOFError, OSError):  # the rank has ended
                    del self.calls[rank]
            if self.note_ends() and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None:
                if time.monotonic() + POLL_SECONDS >= deadline:
                    ask_where(self.run_directory, _living(self.processes))
                    return None
            elif (note := self.watch.must_end()) is not None:
                ask_where(self.run_directory, _living(self.processes), note)
                return "timeout" if note.kind == "Timeout" else "stuck"
            elif len(self.waiting) == len(self.processes):
                self.watch.rest()
                turn = yield self.run_id
                self.watch.go_on()
                self.waiting.clear()
                for call in self.calls.values():
                    with suppress(OSError):  # who ended while it waited is seen with the next look
                        call.send_bytes(turn.model_dump_json().encode())
        return None

    def pass_events_on(self) -> None:
        """Tell of rank 0's events as they come."""
        for event in self.tail.read():
            self.watch.note(event)
            self.on_event(event)

    def note_ends(self) -> bool:
        """Note which ranks have ended by now; whether any did so before it was done."""
        for rank, process in self.processes.items():
            if process.exitcode is not None:
                self.ended_at.setdefault(rank, time.time())
        return any(
            self.processes[rank].exitcode != 0 or not has_ended_well(self.run_directory, rank)
            for rank in self.ended_at
        )


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{harmless(redacted(text))}\n")
        sys.stderr.flush()


class FolderLost(HarnessError):
    """A run's folder went away while its ranks trained."""


def require_folder(run_directory: Path) -> None:
    """Raises FolderLost where a run's folder is gone."""
    if not run_directory.is_dir():
        raise FolderLost(f"{run_directory} was removed, moved or replaced while its ranks ran")


def _living(processes: Mapping[int, Any]) -> dict[int, int]:
    return {rank: process.pid for rank, process in processes.items() if process.exitcode is None}


PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""`accelerate/utils/launch.py`, accelerate 1.15."""
OF_THE_PROCESS = ("ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE")
"""They say nothing of the job and stay."""


def launcher_settings(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(PREFIXES) and name not in OF_THE_PROCESS)
    return {name: environment[name] for name in sorted(names)}


FOLDER_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""What writing into the folder of a run says that was removed, replaced or closed: others can be written."""


def run_cell(
    cell: RunRequest,
    store: Store,
    launcher: LocalLauncher,
    *,
    command: list[str],
    on_event: EventHandler = lambda _: None,
) -> Record:
    """Run one cell alone; raises KeyboardInterrupt where it was interrupted."""
    record = whole(running_cell(cell, store, launcher, command=command, on_event=on_event))
    if record.was_interrupted:
        raise KeyboardInterrupt
    return record


def running_cell(
    cell: RunRequest,
    store: Store,
    launcher: LocalLauncher,
    *,
    command: list[str],
    on_event: EventHandler,
    prediction: PredictionPart | None = None,
    refusal: str | None = None,
    takes_turns: bool = False,
) -> InTurns[Record]:
    """Run one cell on this machine, in turns with others if `takes_turns`; its record is then in the store.

    `refusal`: why its ranks are not started, which the record then says.
    """
    load = load_average()
    more = {"prediction": prediction, "launcher_settings": launcher_settings(os.environ)}
    request = begin_run(cell, command).model_copy(update=more)
    directory = _new_folder(store, request)
    held = os.open(directory, os.O_RDONLY)
    refusal = refusal or why_refused(cell.backend, cell.world_size, cell.job)
    outcome = None
    try:
        if refusal is not None:
            record = assemble.assemble_refused(directory, request, refusal)
        else:
            for extension in registry.parse(cell.backend)[1].extensions():
                # Before ranks begin: it may take minutes. Where it cannot be tried, ranks say why.
                builder = "harness.backends.zero.extension_builds:build"
                launcher.ask(builder, extension, f"compiling the extension {extension}")
            outcome = yield from launcher.running(directory, request, on_event, takes_turns=takes_turns)
            require_folder(directory)
            record = assemble.assemble(directory, request, outcome)
    except FolderLost as error:
        moved = Path(f"/proc/self/fd/{held}")  # wherever it is now
        verdict = assemble.Verdict(status="failed", kind=FolderLost.__name__, cause=f"{described(error)},")
        try:
            for rank in range(request.world_size):
                rank_file(moved, rank).stat()  # without it the steps are not known
            record = assemble.assemble(moved, request, assemble.Outcome(exit_codes={}, verdict=verdict))
        except Exception:  # whatever it is, none of it can be read
            record = assemble.record_of_fault(moved, request, error)
        record = record.model_copy(update={"artifacts": []})  # they stay there
        forget_owner(moved)
    except Exception as error:  # whatever it is, this cell failed, and the others go on
        record = assemble.record_of_fault(directory, request, error)
    finally:
        os.close(held)
    assemble.clean_up(directory, request)
    # What the run found, not what it left.
    seen = {"load_average": load, "code_changed": refusal is None and has_changed()}
    record = record.model_copy(update={"environment": record.environment.model_copy(update=seen)})
    try:
        try:
            record = keep_record(directory, record)
        except OSError as error:
            if error.errno not in FOLDER_LOST:
                raise
            if os.path.lexists(directory):  # something has taken its name
                request = request.model_copy(
                    update={"run_id": f"{request.run_id[:-6]}{secrets.token_hex(3)}"}
                )
            lost, directory = directory, _new_folder(store, request)
            record = keep_record(directory, record.model_copy(update={"run_id": request.run_id}))
            if lost != directory:
                forget_owner(lost)
                _say(f"run '{lost}' cannot be written: {error.strerror}; its record is in {directory}")
    except OSError as error:
        if outcome is not None:
            keep_outcome(directory, outcome)
        raise HarnessError(f"record of run '{directory}' cannot be written: {error.strerror}") from error
    forget_owner(directory)
    return record


def _new_folder(store: Store, request: RunRequest) -> Path:
    """The folder of a run with its request. Raises HarnessError."""
    try:
        directory = store.run_directory(request.run_id)
        note_owner(directory)
        request.write(directory)
    except OSError as error:
        folder = store.root / request.run_id
        if not isinstance(error, FileExistsError):
            store.discard(request.run_id)
        raise HarnessError(f"run '{folder}' cannot be written: {error.strerror}") from error
    return directory


def modules_to_preload(experiment: Experiment, backends: Iterable[str]) -> list[str]:
    """Modules that these runs import besides torch and transformers, for the fork server."""
    needed = {package for label in backends for package in registry.parse(label)[0].packages}
    modules = [*sorted(needed & {"deepspeed", "accelerate"}), "torch.profiler._cupti_monitor"]
    if "transformers" in needed:
        modules.append("transformers.trainer")
    if "deepspeed" in needed:
        modules.append("harness.backends.zero.preload")
    if experiment.adapter.is_present:
        modules += ["peft", "peft.tuners.lora.bnb"]
    if experiment.model.compile != "none":
        modules.append("torch._inductor.compile_fx")
    if experiment.model.name is None:
        model_type = experiment.model.config_values()["model_type"]
        modules.append(f"transformers.models.{model_type}.modeling_{model_type}")
    return modules


PROCESS_BYTES = 300 * 2**20
"""Of a rank on the CPU beside what is predicted: the interpreter, and what libraries write to."""
FILLED = 0.8
"""The most of a machine's free memory that cells alive at once may take."""
UNKNOWN = 2
"""A cell whose memory is not predicted is counted as so many times what the nearest other one needs."""
AUTO = 1
"""Timed steps of a turn where `compare.turns` is auto."""


def take_turns(
    runs: Mapping[str, InTurns[Record]], steps: int, on_turn: Callable[[str], None]
) -> Generator[tuple[str, Record]]:
    """The record of each cell as it ends, by its key; `on_turn` is told which one goes on.

    Where one is interrupted, all that have begun are, each with its record.
    """
    waiting: dict[str, str] = {}
    interrupted: KeyboardInterrupt | None = None
    with ending.leaving_none_behind():
        try:
            for key, place in _order(runs, waiting):
                on_turn(key)
                record = _go_on(runs[key], key, waiting, steps, place)
                if record is not None:
                    yield key, record
                    if record.was_interrupted:
                        break
        except KeyboardInterrupt as error:  # between two turns, or where a cell begins or ends
            interrupted = error
        except BaseException:
            for run in runs.values():
                run.close()
            raise
        for key in waiting:
            try:
                runs[key].throw(KeyboardInterrupt())
            except StopIteration as end:
                interrupted = None
                yield key, end.value
        if interrupted is not None:  # no record says so
            raise interrupted


def _order(runs: Mapping[str, object], waiting: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """Each cell without a place as it is set up; then those that wait, with the places of their turns."""
    yield from ((key, None) for key in runs)
    place = 0
    while waiting:
        for key in random.sample(list(waiting), len(waiting)):
            yield key, place
            place += 1


def _go_on(
    run: InTurns[Record], key: str, waiting: dict[str, str], steps: int, place: int | None
) -> Record | None:
    """Until the cell waits for its next turn, or has its record. `waiting`: run ids by cell."""
    beside = [run_id for other, run_id in waiting.items() if other != key]
    try:
        if place is None:
            waiting[key] = next(run)
        else:
            run.send(TurnEvent(steps=steps, place=place, beside=beside))
    except StopIteration as end:
        waiting.pop(key, None)
        return end.value
    except BaseException:  # it is over, without a record
        waiting.pop(key, None)
        raise
    return None


def groups(
    cells: Sequence[RunRequest], turns: int | None, device: str, parts: Mapping[str, PredictionPart],
    unknown: Collection[str], known: Iterable[Record], say: Callable[[str], None],
) -> list[list[RunRequest]]:  # fmt: skip
    """The cells in the order they run; those of one list take turns. `say` is told why some do not.

    All of a round do where they fit together, so that numbers of ranks can be compared too; else those of
    one number of ranks. `parts`: by cell, what its run is predicted to need; `unknown`: cells of which that
    cannot be predicted: they are counted as `UNKNOWN` times the same backend with fewer options, or the
    greediest cell. Others without a prediction will not run. `known`: records of other cells of these
    rounds, after which the rest of a round runs in the same way.
    """
    # The reference does not decide: a whole one stands for one in turns.
    timed = [
        record
        for record in known
        if record.status == "ok" and record.windows is not None and record.windows.timed
        and record.backend.name != registry.REFERENCE
    ]  # fmt: skip
    took_turns = {record.repeat for record in timed if record.turns is not None}
    ran_whole = {record.repeat for record in timed} - took_turns
    whole_before = {(r.job_id, r.world.world_size, r.repeat) for r in timed if r.turns is None}
    now = {(c.job_id, c.world_size, c.repeat) for c in cells
           if c.measure.timed and c.backend != registry.REFERENCE}  # fmt: skip
    if len(whole_before & now) > 1:
        say(f"{OTHERS_RAN}; --fresh runs all again")
    rounds: dict[object, list[RunRequest]] = {}
    told: dict[str, None] = {}
    needs = _needs(cells, parts, unknown)
    free = [part.host_limit_bytes for part in parts.values() if part.host_limit_bytes is not None]
    limit = min(free, default=None)
    for cell in cells:
        asked = turns is not None and cell.measure.timed
        is_one = asked and cell.key in needs
        rounds.setdefault(cell.repeat if is_one else cell.key, []).append(cell)
        if is_one and cell.repeat in took_turns:
            told[f"{OTHERS_TOOK_TURNS}; --fresh runs all again"] = None
        if asked and not needs and cell.key in unknown:
            told["cells do not take turns: the memory of none is known"] = None
    divided: list[list[RunRequest]] = []
    for together in rounds.values():
        of_size = grouped((cell.world_size, cell) for cell in together)
        fit = _why_whole(together, device, needs, limit, ran_whole) is None
        for group in [together] if fit else of_size.values():
            why = None if fit else _why_whole(group, device, needs, limit, ran_whole)
            divided += [group] if why is None else [[cell] for cell in group]
            if why is not None:
                size = group[0].world_size
                ranks = "1 rank" if size == 1 else f"{size} ranks"
                told[f"cells on {ranks} do not take turns: {why}"] = None
    for text in told:
        say(f"compare.turns: {text}")
    return divided


def _needs(
    cells: Sequence[RunRequest], parts: Mapping[str, PredictionPart], unknown: Collection[str]
) -> dict[str, int]:
    """Host memory of each cell that will run, bytes; without those that nothing is known of."""
    needs = {key: part.host_bytes for key, part in parts.items() if not part.refused}
    predicted = [cell for cell in cells if cell.key in needs]
    for cell in cells:
        if cell.key in unknown and predicted:
            name, size = cell.backend.partition(":")[0], cell.world_size
            alike = [c for c in predicted if (c.backend.partition(":")[0], c.world_size) == (name, size)]
            nearest = min(alike, key=lambda c: len(c.backend), default=None)
            found = needs[nearest.key] if nearest else max(needs[c.key] for c in predicted)
            needs[cell.key] = UNKNOWN * found
    return needs


OTHERS_TOOK_TURNS = "earlier cells took turns and are not compared in speed with those that run now"
OTHERS_RAN = "cells missing from earlier rounds are compared in speed in one of these rounds only"


def _why_whole(
    group: Sequence[RunRequest], device: str, needs: Mapping[str, int], limit: int | None,
    ran_whole: Collection[int],
) -> str | None:  # fmt: skip
    """Why cells are not kept alive at once; None: they are, or there is but one."""
    if len(group) < 2:
        return None
    if group[0].repeat in ran_whole:
        return f"other cells of round {group[0].repeat + 1} did not"
    if device != "cpu":
        return "on GPUs ranks that wait hold memory that the driver may count as that of others"
    needed = sum(needs[cell.key] + PROCESS_BYTES * cell.world_size for cell in group)
    if limit is not None and needed > FILLED * limit:
        return (
            f"alive at once they need {needed / 1e9:,.1f} GB, and {FILLED:.0%} of the free memory are "
            f"{FILLED * limit / 1e9:,.1f} GB"
        )
    return None
