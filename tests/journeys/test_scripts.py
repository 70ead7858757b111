"""One script of the user's own under each strategy, from the comparison to a verified report."""

import json
import subprocess
import sys
from contextlib import suppress
from itertools import chain

import psutil
import pytest

from tests.harness.cli.command_line import HARNESS, environment
from tests.harness.rank.observing.test_scripts import ARGUMENTS, EXAMPLES, make_job
from tests.journeys.conftest import PLAIN, VARIABLES, WINDOWS
from tests.journeys.journey import Journey
from tests.journeys.test_observe import BUILD
from tests.patience import until
from tests.representatives import cheap

OF_THE_MACHINE = {
    "busy-machine", "slow-rank", "slow-data", "few-timed-steps", "noisy-timing", "warmup-too-short"
}  # fmt: skip
DEEPSPEED = {
    "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
}  # fmt: skip
"""A file of the user's own, given as it is."""
pytestmark = [pytest.mark.long(seconds=40), pytest.mark.costly]


@pytest.mark.parametrize("script", cheap(["hf_trainer.py"], ["hf_trainer.py", "accelerate_loop.py"]))
def test_a_script_as_it_is_trains_alike_under_each_strategy(journey: Journey, script: str) -> None:
    make_job(journey.folder)
    journey.program("python", "-c", BUILD)
    is_trainer = script == "hf_trainer.py"
    strategies = "zero2,ddp,fsdp" if is_trainer else "ddp,zero3,fsdp1"
    (journey.folder / "mine.json").write_text(json.dumps(DEEPSPEED))
    files = ("--from-deepspeed", "mine.json") if is_trainer else ()
    words = ("--backends", strategies, *files, "--nproc", "2", *WINDOWS[:-1])
    after = ("--", EXAMPLES / script, *ARGUMENTS)
    # A variable that would have Accelerate train DDP under DeepSpeed's name.
    document = json.loads(
        journey.harness("compare", *words, "--json", "--report", "r.md", *after, **VARIABLES).stdout
    )
    rows = {row["backend"]: row for row in document["rows"]}
    assert next(iter(rows)) == "ddp"
    for name, row in rows.items():
        if name.startswith("fsdp"):
            assert row["status"] == "unsupported"
            assert "without an accelerator" in row["reason"]
            continue
        assert (row["status"], row["not_judged"]) == ("ok", [])
        assert row["parity"] == ("exact" if name == "ddp" else "tight")
    assert {finding["id"] for finding in document["findings"]} <= OF_THE_MACHINE
    records = {record.backend.label: record for record in journey.records()}
    (noise,) = document["noise"].values()
    assert noise["levels"][0]["repetitions"] == ["ddp, moved"]
    assert 0 < noise["levels"][0]["seen"]["loss"] < 1e-5
    assert records["ddp"].observation is not None
    assert {record.job_id for record in records.values()} == {records["ddp"].job_id}
    for name in rows.keys() - {"fsdp", "fsdp1"}:
        assert records[name].backend.name == f"observed-{'zero1' if name == 'mine' else name}"
        losses = [[step.loss for step in records[one].steps] for one in (name, "ddp")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "Same training as ddp?" in journey.read("r.md")
    planned = journey.harness("compare", *words, "--dry-run", *after, **VARIABLES).stdout
    assert " none " not in planned
    assert all(record.run_id in planned for record in records.values())
    assert "unsupported" in journey.harness("list").stdout
    assert records["ddp"].run_id in journey.harness("show", records["ddp"].run_id).stdout
    journey.harness("report", "runs", "-o", "again.md")
    assert "records unchanged" in journey.harness("verify", "again.md").stdout


def test_a_script_that_takes_no_strategy_is_no_row_of_it(journey: Journey) -> None:
    make_job(journey.folder)
    words = ("--backends", "ddp", "--nproc", "2", "--json", "--", PLAIN, "--bare")
    (row,) = json.loads(journey.harness("compare", *words, **VARIABLES).stdout)["rows"]
    assert row["status"] == "unsupported"
    assert row["reason"] == "the script trains each process alone where it was given ddp"
    assert row["tokens_per_second"] is None


def test_scripts_by_name_are_rows_and_a_failure_ends_its_row_only(journey: Journey) -> None:
    (journey.folder / "steps.py").write_text(STEPS)
    (journey.folder / "waits.py").write_text(WAITS)
    commands = {
        "fails": f"{sys.executable} -c \"import torch; raise ValueError('no such column')\"",
        "locked": f"{sys.executable} waits.py",
        "a": f"{sys.executable} steps.py x",
        "b": f"{sys.executable} steps.py y",
    }
    scripts = [word for name, command in commands.items() for word in ("--script", f"{name}={command}")]
    words = ("--json", "--report", "r.md")
    document = json.loads(journey.harness("compare", *words, *scripts, **VARIABLES).stdout)
    rows = {row["backend"]: row for row in document["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "a": "ok", "locked": "failed", "fails": "failed", "b": "ok"
    }  # fmt: skip
    assert (rows["a"]["parity"], rows["b"]["max_loss_difference"]) == ("exact", 0)
    assert rows["fails"]["reason"].endswith("no process of the script trained: ValueError: no such column")
    assert "a build of the extension op was killed" in rows["locked"]["reason"]
    assert all((journey.folder / path).exists() for path in document["records"])
    page = journey.read("r.md")
    assert "CPU rank: do these scripts train alike, and at what cost?" in page
    assert "| Compared | fails: failed, -c import torch" in page
    assert "b: no strategy, steps.py y |" in page
    assert "| Same training as a? | yes: 1 of 1 agree" in page


def test_a_base_that_fails_before_a_step_is_the_only_row(journey: Journey) -> None:
    (journey.folder / "train.py").write_text("import argparse, torch; argparse.ArgumentParser().parse_args()")
    words = ("--backends", "ddp,zero1", "--nproc", "2", "--", "train.py", "--nproc", "4", "--x")
    said = journey.harness("compare", *words, code=1, **VARIABLES).stderr
    assert (
        "trained: train.py: error: unrecognized arguments: --nproc 4 --x; given to the script, since" in said
    )
    assert "after `--`: --nproc; no other row runs" in said
    log = f"{journey.record().run_id}/launcher.log"
    assert said.strip().endswith(log)
    assert log in journey.harness("show", "latest").stdout


WAITS = """
import os
from torch.utils.file_baton import FileBaton
os.makedirs("op")
open("op/lock", "w").close()
for path in ("op/lock", "op"):
    os.utime(path, (0, 0))
FileBaton("op/lock").wait()
"""
STEPS = """
import os, sys, time
from torch import manual_seed, nn, ones, optim

manual_seed(0)
model = nn.Linear(4, 4)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    model(ones(2, 4) * step).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and sys.argv[1] == "b":
        open("waits", "w").write(str(os.getpid()))
        while not os.path.exists("goes-on"):
            time.sleep(0.01)
"""


def test_a_killed_comparison_that_is_called_again_loses_and_repeats_nothing(journey: Journey) -> None:
    (journey.folder / "steps.py").write_text(STEPS)
    rows = [("--script", f"{name}={sys.executable} steps.py {name}") for name in "ab"]
    words = ["compare", "--json", "--set", "compare.noise_runs=false", *chain.from_iterable(rows)]
    killed = subprocess.Popen(
        [*HARNESS, *words], cwd=journey.folder, env=environment(**VARIABLES),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    waits = journey.folder / "waits"
    script = psutil.Process(int(until(lambda: waits.exists() and waits.read_text(), killed)))
    killed.kill()
    killed.wait()
    with suppress(psutil.NoSuchProcess):  # it is told to end as its parent is gone
        until(lambda: script.status() == psutil.STATUS_ZOMBIE)
    (first,) = (path for path in (journey.folder / "runs").glob("*/record.json"))
    before = first.read_bytes()
    (journey.folder / "goes-on").touch()
    document = json.loads(journey.harness(*words, **VARIABLES).stdout)
    assert [(row["backend"], row["status"], row["repeat"]) for row in document["rows"]] == [
        (name, "ok", 0) for name in "ab"
    ]
    assert str(first.relative_to(journey.folder)) in document["records"]
    assert first.read_bytes() == before
    made = {record.backend.label: record for record in journey.records() if record.status == "ok"}
    assert sorted(made) == ["a", "b"]
    again = json.loads(journey.harness(*words, **VARIABLES).stdout)
    assert again["records"] == document["records"]
