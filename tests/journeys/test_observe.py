"""An observed script, every command that reads its record, and our run of its job."""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from harness.record import Record
from harness.record.store import write_record
from tests.forkserver import held_port
from tests.harness.rank.observing.test_scripts import ARGUMENTS, EXAMPLES, JOB, make_job
from tests.journeys.conftest import PLAIN, VARIABLES, WINDOWS
from tests.journeys.journey import Journey
from tests.observed import run_script
from tests.representatives import cheap, first

pytestmark = pytest.mark.long(seconds=15)
AS_ON_GPUS = PLAIN.with_name("as_on_gpus.py")
PYTHON = (sys.executable,)
FORKED = ("ranks of the tests' server",)
"""They have their imports behind them. tests/harness/cli/test_run.py has what torchrun starts."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = (
    sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
# Without GPUs, accelerate launch starts several processes only so (docs/observe.md).
ACCELERATE = (*LAUNCH, "--multi_gpu")
ACCELERATE_FSDP = (
    *LAUNCH, "--use_fsdp", "--fsdp_sync_module_states", "false", "--fsdp_cpu_ram_efficient_loading", "false",
    "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_version",
)  # fmt: skip
ACCELERATE_ZERO = (*LAUNCH, "--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "1.0")
BUILD = "from deepspeed.ops.op_builder import ShareMemCommBuilder as Builder; Builder().load(verbose=False)"
"""What DeepSpeed's ranks on the CPU compile where it is not there yet."""
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""DeepSpeed looks for MPI where nobody sets these."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, who starts it, and the backend that trains the same."""

    starts: tuple[str, ...]
    script: Path
    arguments: tuple[str, ...] = ()
    backend: str
    settings: dict[str, str] = field(default_factory=dict)
    said: str = ""
    """What the report must say."""

    @property
    def ranks(self) -> int:
        return 1 if self.starts == PYTHON else 2


def example(
    starts: tuple[str, ...], name: str, backend: str, *more: str, said: str = "", **settings: str
) -> Script:
    return Script(
        starts=starts, script=EXAMPLES / name, arguments=(*ARGUMENTS, *more), backend=backend, said=said,
        settings={name.replace("__", "."): value for name, value in settings.items()},
    )  # fmt: skip


ALONE = {"training__global_batch_size": "4"}
"""Of one process with the examples' batch of 4."""
TRAINERS = {"optimizer__decay": "matrices"}
BARE, ON_RANKS = "a bare model by python", "torch DDP on ranks"
FIRST = {
    ON_RANKS: example(FORKED, "torch_ddp.py", "ddp"),
    "torch DDP by torchrun": example(TORCHRUN, "torch_ddp.py", "ddp"),
    "Accelerate by accelerate launch": example(ACCELERATE, "accelerate_loop.py", "ddp"),
    BARE: Script(
        starts=PYTHON, script=PLAIN, arguments=("--bare",), backend="single",
        settings={"training.micro_batch_size": "8"},
    ),
}  # fmt: skip
OTHERS = {
    "torch FSDP2 by torchrun": example(TORCHRUN, "torch_ddp.py", "fsdp", "--fsdp"),
    "torch FSDP1 by torchrun": example(TORCHRUN, "torch_ddp.py", "fsdp1", "--fsdp1"),
    "torch FSDP1 of flat parameters by torchrun": Script(
        starts=TORCHRUN, script=PLAIN, arguments=("--flat",), backend="fsdp1"
    ),
    "torch DDP by accelerate launch": example(ACCELERATE, "torch_ddp.py", "ddp"),
    "Accelerate by torchrun": example(TORCHRUN, "accelerate_loop.py", "ddp"),
    "Accelerate with DeepSpeed by accelerate launch": example(ACCELERATE_ZERO, "accelerate_loop.py", "zero2"),
    "Accelerate with FSDP by accelerate launch": example(
        (*ACCELERATE_FSDP, "2"),
        "accelerate_loop.py",
        "ddp",
        said="runs DistributedDataParallel, although FSDP through Accelerate was requested",
    ),
    **{
        f"Accelerate with FSDP{version} as on GPUs": example(
            (*ACCELERATE_FSDP, version, str(AS_ON_GPUS)), "accelerate_loop.py", backend
        )
        for version, backend in (("1", "fsdp1"), ("2", "fsdp"))
    },
    "Accelerate by python": example(PYTHON, "accelerate_loop.py", "single", **ALONE),
    "the Trainer by torchrun": example(TORCHRUN, "hf_trainer.py", "ddp", **TRAINERS),
    "the Trainer by accelerate launch": example(ACCELERATE, "hf_trainer.py", "ddp", **TRAINERS),
    "the Trainer by python": example(PYTHON, "hf_trainer.py", "single", **ALONE, **TRAINERS),
    "Lightning by torchrun": example(TORCHRUN, "lightning_module.py", "ddp"),
    "torch FSDP2 by accelerate launch": example(ACCELERATE, "torch_ddp.py", "fsdp", "--fsdp"),
    "torch FSDP1 by accelerate launch": example(ACCELERATE, "torch_ddp.py", "fsdp1", "--fsdp1"),
    "torch FSDP1 of flat parameters by accelerate launch": Script(
        starts=ACCELERATE, script=PLAIN, arguments=("--flat",), backend="fsdp1"
    ),
    "Lightning by accelerate launch": example(ACCELERATE, "lightning_module.py", "ddp"),
    "Lightning by python": example(PYTHON, "lightning_module.py", "single", **ALONE),
    "DeepSpeed by torchrun": example(TORCHRUN, "deepspeed_zero.py", "zero2"),
    "DeepSpeed by accelerate launch": example(ACCELERATE, "deepspeed_zero.py", "zero2"),
    "DeepSpeed by python": example(PYTHON, "deepspeed_zero.py", "zero2", **ALONE),
}
SCRIPTS = FIRST | OTHERS
FEW = (ON_RANKS, BARE)
"""The first is costly."""


class Observations:
    """One folder of a job; each script is observed once, each own run made once."""

    def __init__(self, journey: Journey, bare_model_observed: Path) -> None:
        self.journey = journey
        shutil.copytree(bare_model_observed, journey.folder / f"observed-{list(SCRIPTS).index(BARE)}")
        self.observed = cache(self._observed)
        self.own = cache(self._own)

    def _observed(self, name: str) -> Record:
        script = SCRIPTS[name]
        runs = f"observed-{list(SCRIPTS).index(name)}"
        if name == BARE:
            return self.journey.record(runs)
        if script.starts == FORKED:
            return self._on_ranks(script, runs)
        variables = dict(VARIABLES)
        if script.starts == ACCELERATE_ZERO:
            variables["ACCELERATE_USE_CPU"] = "false"  # with it Accelerate runs DDP
            subprocess.run([sys.executable, "-c", BUILD], check=True)  # a busy machine takes minutes
        with held_port() as port:
            launched = ("--main_process_port", str(port)) if script.starts[: len(LAUNCH)] == LAUNCH else ()
            words = (*script.starts, *launched, script.script, *script.arguments)
            if script.script.name == "deepspeed_zero.py" and script.starts == PYTHON:
                variables |= ONE_RANK | {"MASTER_PORT": str(port)}
            self.journey.harness("observe", "--runs", runs, *WINDOWS, *words, **variables)
        return self.journey.record(runs)

    def _on_ranks(self, script: Script, runs: str) -> Record:
        seen = run_script(self.journey.folder, script.script, *script.arguments)
        assert seen.codes == [0, 0], seen.printed
        folder = self.journey.folder / runs / seen.record.run_id
        folder.mkdir(parents=True)
        write_record(folder, seen.record)
        return seen.record

    def _own(self, name: str) -> Record:
        script = SCRIPTS[name]
        runs = f"own-{list(SCRIPTS).index(name)}"
        sets = [word for item in (JOB | script.settings).items() for word in ("--set", "=".join(item))]
        nproc = ("--nproc", str(script.ranks))
        self.journey.harness("run", "--backend", script.backend, *nproc, "--runs", runs, *sets)
        return self.journey.record(runs)


@pytest.fixture(scope="module")
def observations(shared_journey: Journey, bare_model_observed: Path) -> Observations:
    make_job(shared_journey.folder)
    return Observations(shared_journey, bare_model_observed)


def cases() -> list[object]:
    """One script always, another in continuous integration, the rest where all combinations are asked for."""
    return [*cheap(FEW[1:], FEW), *first((), [name for name in SCRIPTS if name not in FEW])]


@pytest.mark.parametrize("name", cases())
def test_every_command_reads_the_record_of_a_script(observations: Observations, name: str) -> None:
    journey, record = observations.journey, observations.observed(name)
    runs = f"observed-{list(SCRIPTS).index(name)}"
    assert (record.status, record.error, len(record.steps)) == ("ok", None, 8)
    assert record.world.world_size == SCRIPTS[name].ranks
    assert record.backend.name in journey.harness("list", "--runs", runs).stdout
    assert record.run_id in journey.harness("show", f"{runs}/{record.run_id}").stdout
    report, *_ = journey.reports(runs, name=runs)
    assert record.backend.name in report.read_text()
    assert SCRIPTS[name].said in report.read_text()
    assert "holds; 1 records unchanged" in journey.harness("verify", report).stdout


def test_a_script_is_reported_beside_our_run_of_its_job(observations: Observations) -> None:
    journey, name = observations.journey, BARE
    records, number = (observations.observed(name), observations.own(name)), list(SCRIPTS).index(name)
    said = journey.harness("report", f"observed-{number}", f"own-{number}", "-o", "both.md")
    assert "skipped" not in said.stderr
    shown = journey.read("both.md") + journey.read("both.details.md")
    assert all(record.run_id in shown for record in records)


@pytest.mark.parametrize("name", cases())
def test_a_script_has_the_losses_of_our_run_of_its_job(observations: Observations, name: str) -> None:
    seen, own = observations.observed(name), observations.own(name)
    losses = [step.loss for step in own.steps]
    assert [step.loss for step in seen.steps] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", first(FEW[1:], SCRIPTS))
def test_a_script_is_diagnosed_against_our_run_of_its_job(observations: Observations, name: str) -> None:
    seen, own = observations.observed(name), observations.own(name)
    number = list(SCRIPTS).index(name)
    said = observations.journey.harness(
        "diagnose", f"observed-{number}/{seen.run_id}", f"own-{number}/{own.run_id}"
    ).stdout
    assert "no difference beyond noise" in said
