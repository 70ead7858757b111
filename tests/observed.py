"""Runs a training script in ranks forked from the tests' server, observed as by `harness observe`."""

import atexit
import faulthandler
import hashlib
import os
import pickle
import runpy
import shutil
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.job.experiment import MeasureSection
from harness.launch.bootstrap.sitecustomize import AfterImport
from harness.record import Record
from harness.run_directory.observed_record import ObserveRequest, assemble_observed, note_end
from tests import kept
from tests.forkserver import context, held_port
from tests.patience import SECONDS

MEASURE = MeasureSection(
    warmup_steps=3, probed_steps=2, traced_steps=0, cooldown_steps=1, weight_digests=False
)


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """A script that ran to its end."""

    record: Record | None
    """None: it was not observed, or nothing trained."""
    codes: list[int]
    printed: list[str]
    """Of each rank, standard output and error."""

    def lines(self, beginning: str) -> list[str]:
        """Rank 0's lines that begin so."""
        return [line for line in self.printed[0].splitlines() if line.startswith(beginning)]


def run_script(
    folder: Path, script: Path, *arguments: str, ranks: int = 2, observe: bool = True, threads: int = 1
) -> ScriptRun:
    """Run a script on ranks of this machine, in the working directory `folder`.

    A script that stands alone there, whose run an earlier session left, is not run again.
    """
    if [path.name for path in folder.iterdir()] != [script.name]:
        return _run_script(folder, script, *arguments, ranks=ranks, observe=observe, threads=threads)
    asked = f"{script.read_text()}\0{arguments} {ranks} {observe} {threads}"
    with kept.runs().place(f"script-{hashlib.sha256(asked.encode()).hexdigest()[:16]}") as place:
        if place.exists():
            shutil.copytree(place, folder, symlinks=True, dirs_exist_ok=True)
            return pickle.loads((folder / "seen").read_bytes())
        seen = _run_script(folder, script, *arguments, ranks=ranks, observe=observe, threads=threads)
        (folder / "seen").write_bytes(pickle.dumps(seen))
        kept.runs().fill(place, folder)
    return seen


def _run_script(
    folder: Path, script: Path, *arguments: str, ranks: int, observe: bool, threads: int
) -> ScriptRun:
    directory = folder / "run"
    directory.mkdir(parents=True)
    request = ObserveRequest(
        run_id="observed", created_at="2026-01-01T00:00:00.000+00:00", command=["harness", "observe"],
        observed=[str(script), *arguments], measure=MEASURE,
    )  # fmt: skip
    request.write(directory)
    processes = []
    with held_port() as port:
        for rank in range(ranks):
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            arguments_of_rank = (str(folder), str(script), arguments, variables, observe)
            server: Any = context()
            processes.append(server.Process(target=_enter, args=arguments_of_rank))
            processes[-1].start()
        _wait(directory, processes)
    codes = [process.exitcode for process in processes]
    record = assemble_observed(directory, request, max(codes, key=abs)) if observe else None
    printed = [(folder / f"log-{rank}").read_text(errors="replace") for rank in range(ranks)]
    return ScriptRun(record=record, codes=codes, printed=printed)


def _wait(directory: Path, processes: list[Any]) -> None:
    """Note the ends in the order in which they come, as a launcher does."""
    deadline = time.monotonic() + SECONDS
    running = list(processes)
    while running and wait([p.sentinel for p in running], max(0.0, deadline - time.monotonic())):
        for process in [p for p in running if not p.is_alive()]:
            process.join()
            note_end(directory, process.pid, process.exitcode)
            running.remove(process)
    for process in running:
        process.kill()
        process.join()


def _enter(
    folder: str, script: str, arguments: tuple[str, ...], variables: dict[str, str], observe: bool
) -> None:
    """One rank: the process ends as the script ends it."""
    atexit.unregister(os._exit)  # the server leaves so, with 0 (harness/rank/preload.py)
    log = os.open(f"{folder}/log-{variables['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    if observe:
        from harness.rank.observing.session import start_observing

        finder = AfterImport()
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
        start_observing(Path(folder) / "run", finder.on_import)
    faulthandler.dump_traceback_later(SECONDS - 30)  # a rank that hangs says where, in its log
    import deepspeed

    # DeepSpeed would compile it first: a minute of g++ for every fresh machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
