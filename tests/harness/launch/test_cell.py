from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.job.config import load_experiment
from harness.launch import launcher as module
from harness.launch.cells import plan
from harness.launch.launcher import modules_to_preload, run_cell
from harness.record.store import Store, read_record
from harness.run_directory.assemble import Outcome


def test_the_load_of_a_record_is_what_the_run_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.25, 9.0, 9.0])
    monkeypatch.setattr(module, "load_average", lambda: next(loads))

    class Launcher:
        device = "cpu"

        def running(self, *_: Any, **__: Any) -> Iterator[str]:
            next(loads)
            return Outcome(exit_codes={0: 1})
            yield ""

    experiment = load_experiment(None, ["compare.noise_runs=false"])
    (cell,) = plan(experiment, ["single"], [1], 1, "cpu")
    store = Store(tmp_path)
    launcher: Any = Launcher()
    record = run_cell(cell, store, launcher, command=["x"])
    assert record.environment.load_average == 0.25
    assert read_record(store.record_path(record)) == record


def test_the_fork_server_imports_peft_where_a_job_has_adapters_and_nowhere_else() -> None:
    plain, adapted = (
        modules_to_preload(load_experiment(None, settings), ["ddp"])
        for settings in ([], ["adapter.kind=lora"])
    )
    assert [name for name in adapted if name not in plain] == ["harness.rank.models.peft_preload"]
