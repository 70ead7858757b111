"""`harness doctor --gpu --full`: the package that a user sends, made on CPU ranks in place of GPUs."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from harness.cli import doctor as command
from harness.doctor import gpu_runs
from harness.doctor.gpu_runs import AGAIN, OUT_OF_TIME, SINGLE, BackendMatrix, Compared
from harness.doctor.packing import anonymous, anonymous_document, forget_names
from tests.harness.cli.command_line import INTERRUPTED, SMALL, harness
from tests.harness.doctor.gpu_evidence import sound

pytestmark = pytest.mark.long(seconds=30)

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = (
    *SMALL[1::2], "compare.noise_runs=false", "training.steps=5", "measure.warmup_steps=1",
    "measure.probed_steps=1", "measure.traced_steps=1",
)  # fmt: skip
SMALL_MATRIX = BackendMatrix(
    name="default", config="@default", backends=("ddp", "fsdp"), ranks=2, device="cpu", settings=SETTINGS
)
ENDLESS = replace(
    SMALL_MATRIX, name="at-size", backends=("ddp",), settings=(*SETTINGS, "training.steps=1000000")
)
PLANTED = {
    "HOSTNAME": "node17x", "USER": "anneliese", "NCCL_HOSTID": "node17x.site.edu",
    "NCCL_DEBUG_FILE": "anneliese.log", "NCCL_TOPO_FILE": "/opt/of site/topology.xml",
}  # fmt: skip
"""Records keep every variable of NCCL."""
FIGURES = ("predicted_peak_bytes", "peak_bytes", "predicted_step_seconds", "step_seconds")


def unpacked(data: bytes, name: str = "") -> Iterator[tuple[str, bytes]]:
    """Every file of a bundle, those within its archives and compressed files too."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            found = tar.extractfile(member)
            if found is None:
                continue
            content = found.read()
            yield f"{name}{member.name}", content
            if member.name.endswith(".tar.xz"):
                yield from unpacked(content, f"{name}{member.name}/")
            elif member.name.endswith(".gz"):
                yield f"{name}{member.name} unpacked", gzip.decompress(content)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The command on evidence in place of the checks' runs; its first comparison goes on until its limit."""
    folder = tmp_path_factory.mktemp("sent")
    bundle = folder / "sent.tar.xz"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLANTED.items():
            patch.setenv(name, value)
        forget_names()
        evidence = sound()
        patch.setattr(command, "find_gpus", lambda: evidence.gpus)
        patch.setattr(command, "gather", lambda *_: evidence)
        patch.setattr(command, "matrices", lambda *_: [ENDLESS, SMALL_MATRIX])
        made = command.compare_all

        def until_it_trains(asked: list[BackendMatrix], *words: Any) -> Iterator[Compared]:
            with pytest.MonkeyPatch.context() as first:
                first.setattr(threading, "Timer", partial(WhenItTrains, folder=words[0] / "at-size"))
                yield from made(asked[:1], *words)
            yield from made(asked[1:], *words)

        patch.setattr(command, "compare_all", until_it_trains)
        return CliRunner().invoke(
            command.doctor, ["--gpu", "--full", "--bundle", str(bundle), "--json"]
        ), bundle


class WhenItTrains(threading.Thread):
    """The time is up once the first run has trained some steps."""

    def __init__(self, seconds: float, then: Callable[[], None], folder: Path) -> None:
        super().__init__()
        self._then, self._folder, self._is_over = then, folder, threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            if list(self._folder.glob("*/trace-*.gz")):
                self._then()
                return

    def cancel(self) -> None:
        self._is_over.set()


@pytest.mark.costly
def test_a_package_holds_reports_traces_and_predictions(sent: tuple[Result, Path]) -> None:
    result, bundle = sent
    assert result.exit_code == 0, result.output
    names = {name for name, _ in unpacked(bundle.read_bytes())}
    assert {
        "doctor/doctor.json", "doctor/doctor.txt", "doctor/fabric.json", "doctor/default/report.md",
        "doctor/default/runs.tar.xz", "doctor/default/ddp-2-0.trace.md", "doctor/default/predictions.json",
        "doctor/default/raw/fsdp-2-0-trace-00001.json.gz", "doctor/nvidia-smi-topology.txt",
    } <= names  # fmt: skip
    document = json.loads(result.stdout)
    assert list(document["comparisons"]) == ["at-size", "default"]
    assert set(document["comparisons"]["default"]["runs"].values()) == {"ok"}


def test_its_comparisons_are_those_of_compare_under_six_strategies() -> None:
    small, large = gpu_runs.matrices(8)
    assert [(m.config, m.ranks, m.device) for m in (small, large)] == [
        ("@default", 8, "cuda"),
        ("@gpu-node", 8, "cuda"),
    ]
    assert small.backends == large.backends == ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp")


@pytest.mark.costly
def test_predictions_stand_beside_measurements(sent: tuple[Result, Path]) -> None:
    files = dict(unpacked(sent[1].read_bytes()))
    rows = json.loads(files["doctor/default/predictions.json"])
    assert [row["backend"] for row in rows] == ["single", "ddp", "fsdp"]
    for row in rows[1:]:
        assert all(row[figure] > 0 for figure in FIGURES), row


@pytest.mark.costly
def test_it_ends_by_itself_once_all_is_done(sent: tuple[Result, Path]) -> None:
    """Its last comparison has minutes left."""
    document = json.loads(sent[0].stdout)["comparisons"]["default"]
    assert document["missing"] is None
    files = dict(unpacked(sent[1].read_bytes()))
    assert json.loads(files["doctor/doctor.json"])["comparisons"]["default"] == document


@pytest.mark.costly
def test_at_the_limit_what_exists_is_written(sent: tuple[Result, Path]) -> None:
    result, bundle = sent
    compared = json.loads(result.stdout)["comparisons"]["at-size"]
    assert compared["missing"] == OUT_OF_TIME
    assert compared["runs"]
    files = dict(unpacked(bundle.read_bytes()))
    assert json.loads(files["doctor/doctor.json"])["comparisons"]["at-size"]["missing"] == OUT_OF_TIME
    assert "doctor/at-size/report.md" in files


@pytest.mark.costly
def test_no_host_user_or_folder_is_in_it(sent: tuple[Result, Path]) -> None:
    """Looked for in every file, those within archives too"""
    folders = {Path.home(), Path.cwd(), ROOT, Path(tempfile.gettempdir()), Path(sys.prefix), sent[1].parent}
    private = {"node17x", "site.edu", "anneliese", "/opt", *map(str, folders)}
    files = dict(unpacked(sent[1].read_bytes()))
    assert any(b"NCCL_HOSTID" in data for data in files.values())
    for name, data in files.items():
        if not name.endswith((".xz", ".gz")):
            found = [word for word in private if word.encode() in data or word in name]
            assert not found, f"{name}: {found}"


@pytest.mark.costly
def test_its_reports_can_be_verified(sent: tuple[Result, Path], tmp_path: Path) -> None:
    with tarfile.open(sent[1]) as tar:
        tar.extractall(tmp_path, filter="data")
    done = harness("verify", "report.md", cwd=tmp_path / "doctor" / "default")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('File "/opt/site/lib/thing.py", line 3', 'File "thing.py", line 3'),
        ("-I/usr/local/cuda/include --data=/scratch/me/set.json", "-Iinclude --data=set.json"),
        ("LD_LIBRARY_PATH=/a/b/lib:/c/d/lib64", "LD_LIBRARY_PATH=lib:lib64"),
        ("cat\\n/home/me/x", "cat\\nx"),
        ("2 GB/s of 3 tokens/s, https://pytorch.org/memory_viz/x", "2 GB/s of 3 tokens/s, https://pytorch.org/memory_viz/x"),
        ("node17x.site.edu:29500 refused anneliese", "host:29500 refused user"),
        ("GPU-8f6d8ae4-8a36-11d1-b5b1-0000f8051515 lost", "GPU-11a6a1ff lost"),
    ],
)  # fmt: skip
def test_paths_and_hosts_are_masked_and_figures_are_not(
    text: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOSTNAME", "USER"):
        monkeypatch.setenv(name, PLANTED[name])
    forget_names()
    found = anonymous(text), anonymous_document({"a": [text, 1], "/b/c/d": None})
    forget_names()
    assert found == (kept, {"a": [kept, 1], "d": None})


def test_options_that_would_be_ignored_are_refused() -> None:
    result = CliRunner().invoke(command.doctor, ["--full"])
    assert (result.exit_code, "add --gpu" in result.stderr) == (1, True)


def test_what_was_measured_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evidence = sound()

    def run(self: Any, name: str, *_: object) -> None:
        if name not in (SINGLE, AGAIN):
            raise KeyboardInterrupt
        self.found.records[name] = evidence.records[name]

    monkeypatch.setattr(gpu_runs._Gathering, "_run", run)
    monkeypatch.setattr(gpu_runs._Gathering, "_start_on_cpu", lambda _: subprocess.Popen(["true"]))
    monkeypatch.setattr(gpu_runs._Gathering, "_take_from_cpu", lambda *_: None)
    monkeypatch.setattr(command, "find_gpus", lambda: evidence.gpus)
    bundle = tmp_path / "sent.tar.xz"
    result = CliRunner().invoke(command.doctor, ["--gpu", "--full", "--bundle", str(bundle)])
    assert result.exit_code == INTERRUPTED
    document = json.loads(dict(unpacked(bundle.read_bytes()))["doctor/doctor.json"])
    verdicts = {check["id"]: (check["verdict"], check["detail"]) for check in document["checks"]}
    assert verdicts["repeat"][0] == "ok"
    assert verdicts["traffic"] == ("skipped", "interrupted")
    assert "comparisons" not in document
