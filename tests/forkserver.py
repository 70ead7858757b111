"""The one fork server of a test process, and a port for its ranks.

Whoever starts it first decides what every rank inherits, so it is given all that any test's ranks import:
without, each rank of DeepSpeed would import torch's compiler again, more than half of its time. Python 3.11
looks for the tests' own modules in the current directory only: elsewhere ranks import those themselves.
"""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from harness.backends.base import World
from harness.job.config import load_experiment
from harness.launch.launcher import LocalLauncher, modules_to_preload

NEEDED_BY_TESTS = (
    "peft", "peft.tuners.lora.bnb", "tests.contract.deeds",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bloom.modeling_bloom", "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.resnet.modeling_resnet",
    "transformers.models.t5.modeling_t5", "transformers.models.vit.modeling_vit",
)  # fmt: skip


@cache
def launcher() -> LocalLauncher:
    """Starts the server."""
    experiment = load_experiment(None, [])
    return LocalLauncher(
        "cpu", [*modules_to_preload(experiment, ["zero1", "accelerate-ddp", "fsdp"]), *NEEDED_BY_TESTS]
    )


def context() -> BaseContext:
    """Processes of it are forked from the server."""
    launcher()
    return multiprocessing.get_context("forkserver")


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is given to nobody else meanwhile; a server that asks for SO_REUSEADDR can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def on_ranks(
    work: Callable[[World], object], world_size: int, folder: Path, seconds: float = 400.0, **variables: str
) -> list[Any]:
    """What `work`, which must be picklable, returns on each rank of one process group of gloo, in order.

    All ranks must end within `seconds`; `folder` is theirs alone, `variables` are of their environment.
    """
    server: Any = context()
    with held_port() as port:
        of_rank = (work, world_size, port, folder, variables)
        ranks = [server.Process(target=_rank, args=(rank, *of_rank)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world_size, f"exit codes {codes}\n{logs}"
    return [pickle.loads((folder / f"{rank}.done").read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int, work: Callable[[World], object], world_size: int, port: int, folder: Path,
    variables: dict[str, str],
) -> None:  # fmt: skip
    code = 1
    try:
        _work(rank, work, world_size, port, folder, variables)
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    os._exit(code)


def _work(
    rank: int, work: Callable[[World], object], world_size: int, port: int, folder: Path,
    variables: dict[str, str],
) -> None:  # fmt: skip
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        **variables,
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = World(rank=rank, world_size=world_size, local_rank=rank, ranks_per_node=world_size, device="cpu")
    # A file, since a port that was free may be another test's by now.
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
    (folder / f"{rank}.done").write_bytes(pickle.dumps(work(world)))
    dist.barrier()
