"""Every check of a GPU machine is ok on sound evidence, and fails on the fault that it is for."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from harness.cli import doctor as command
from harness.doctor import gpu_runs
from harness.doctor.gpu_runs import (
    AGAIN,
    CHECKS,
    FULL,
    ON_CPU,
    OUT_OF_TIME,
    RUNS,
    SHARDED,
    SINGLE,
    ZERO,
    Answer,
    BackendMatrix,
    Compared,
    Evidence,
    answer_all,
    count_kernels,
    read_kernels,
)
from harness.doctor.packing import anonymous, anonymous_document, check_bundle, forget_names, write_bundle
from harness.errors import HarnessError
from harness.gpus.found import Gpu
from harness.record import ArtifactPart, ErrorPart, RankPart, Record
from harness.record.store import write_record
from harness.run_directory.request import trace_file
from tests.harness.cli.command_line import INTERRUPTED, SMALL, harness
from tests.harness.doctor.gpu_evidence import fabric_of, notes_of, sound
from tests.records import make_record

pytestmark = pytest.mark.long(seconds=30)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
Fault = Callable[[Evidence], Evidence]


def answers(evidence: Evidence) -> dict[str, Answer]:
    return {answer.check.id: answer for answer in answer_all(evidence)}


def with_record(name: str, change: Callable[[Record], dict[str, Any]]) -> Fault:
    """The evidence with fields of one record changed."""

    def planted(evidence: Evidence) -> Evidence:
        record = evidence.records[name]
        changed = record.model_copy(update=change(record))
        return replace(evidence, records={**evidence.records, name: changed})

    return planted


def with_ranks(name: str, change: Callable[[RankPart], dict[str, Any]]) -> Fault:
    """The evidence with fields of one record's ranks changed."""
    return with_record(name, lambda r: {"ranks": [p.model_copy(update=change(p)) for p in r.ranks]})


def with_notes(name: str, **changes: Any) -> Fault:
    return lambda evidence: replace(
        evidence, notes={**evidence.notes, name: notes_of(evidence.records[name], **changes)}
    )


def one_gpu_twice(evidence: Evidence) -> Evidence:
    notes = tuple(note.model_copy(update={"uuid": "GPU-0"}) for note in evidence.notes[ZERO])
    return replace(evidence, notes={**evidence.notes, ZERO: notes})


def old_gpu(evidence: Evidence) -> Evidence:
    v100 = Gpu(name="Tesla V100-SXM2-16GB", uuid="GPU-9", memory_bytes=2**34, capability=(7, 0))
    return replace(evidence, gpus=replace(evidence.gpus, devices=(v100, v100)))


def other_loss(record: Record) -> dict[str, Any]:
    first, *rest = record.steps
    assert first.loss is not None
    return {"steps": [replace(first, loss=first.loss * (1 + 2e-5)), *rest]}


def last_bit(record: Record) -> dict[str, Any]:
    *rest, last = record.steps
    assert last.loss is not None
    return {"steps": [*rest, replace(last, loss=last.loss * (1 + 2**-52))]}


def one_more_byte(record: Record) -> dict[str, Any]:
    index = next(i for i, row in enumerate(record.comm) if row.phase == "backward")
    more = record.comm[index].model_copy(update={"payload_bytes": record.comm[index].payload_bytes + 1})
    return {"comm": [*record.comm[:index], more, *record.comm[index + 1 :]]}


def larger_states(part: RankPart) -> dict[str, Any]:
    return {
        "memory": [
            m.model_copy(update={"kinds": m.kinds | {"optimizer": m.kinds["optimizer"] + 1}})
            if m.kinds and "optimizer" in m.kinds
            else m
            for m in part.memory
        ]
    }


def less_than_reserved(part: RankPart) -> dict[str, Any]:
    return {"memory": [m.model_copy(update={"device_used_bytes": m.reserved_bytes - 1}) for m in part.memory]}


def far_more_than_reserved(part: RankPart) -> dict[str, Any]:
    return {"memory": [m.model_copy(update={"device_used_bytes": 2**33}) for m in part.memory]}


def slow_phase(part: RankPart) -> dict[str, Any]:
    return {"phase_seconds": part.phase_seconds | {"step": [1.5 * s for s in part.step_seconds]}}


def lost_phase(part: RankPart) -> dict[str, Any]:
    return {"phase_seconds": part.phase_seconds | {"backward": [0.0] * len(part.step_seconds)}}


def short_clock(part: RankPart) -> dict[str, Any]:
    return {"step_seconds": [0.97 * seconds for seconds in part.step_seconds]}


def no_kernels(part: RankPart) -> dict[str, Any]:
    return {"overlap": [o.model_copy(update={"compute_seconds": 0.0}) for o in part.overlap]}


def idle_twice(part: RankPart) -> dict[str, Any]:
    return {
        "overlap": [o.model_copy(update={"idle_seconds": o.idle_seconds + o.seconds}) for o in part.overlap]
    }


def one_kernel_less(evidence: Evidence) -> Evidence:
    kernels = {
        rank: {step: count - 1 for step, count in steps.items()}
        for rank, steps in evidence.kernels[SHARDED].items()
    }
    return replace(evidence, kernels={SHARDED: kernels})


def products_at(flops_per_second: float) -> Fault:
    return with_ranks(SHARDED, lambda part: {"matmul_flops_per_second": {"float32": flops_per_second}})


def too_fast(record: Record) -> dict[str, Any]:
    return {"steps": [replace(step, seconds=step.seconds / 1e9) for step in record.steps]}


FAULTS: Sequence[tuple[str, Fault]] = [
    ("devices", one_gpu_twice),
    ("transport", with_record(ZERO, lambda r: {"world": r.world.model_copy(update={"collectives": "gloo"})})),
    ("architecture", old_gpu),
    ("initial-weights", with_record(ZERO, lambda r: {"initial_weights": r.final_weights})),
    ("initial-weights", with_record(SHARDED, lambda r: {"initial_weights": None})),
    ("repeat", with_record(AGAIN, last_bit)),
    ("repeat", with_record(AGAIN, lambda r: {"final_weights": r.initial_weights})),
    ("cpu-loss", with_record(SINGLE, other_loss)),
    ("traffic", with_record(ZERO, one_more_byte)),
    ("traffic", with_record(SHARDED, one_more_byte)),
    ("states", with_ranks(ZERO, larger_states)),
    ("norm", with_notes(SHARDED, norm_peak_bytes=640_001)),
    ("driver-memory", with_ranks(SHARDED, less_than_reserved)),
    ("driver-memory", with_ranks(ZERO, far_more_than_reserved)),
    ("phases", with_ranks(ZERO, slow_phase)),
    ("phases", with_ranks(SHARDED, lost_phase)),
    ("step-time", with_ranks(SHARDED, short_clock)),
    ("step-time", with_notes(ZERO, event_step_seconds=[])),
    ("deepspeed-waits", with_notes(ZERO, synchronisations=[2] * 20)),
    ("trace", with_ranks(SHARDED, no_kernels)),
    ("trace", with_ranks(SHARDED, idle_twice)),
    ("trace", with_ranks(SHARDED, lambda part: {"overlap": []})),
    ("kernels", one_kernel_less),
    ("products", products_at(0.39 * 19.5e12)),
    ("products", products_at(1.06 * 19.5e12)),
    ("utilisation", with_record(SHARDED, too_fast)),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(seconds=0.1))),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(seconds=1e-6))),
    ("fabric", lambda evidence: replace(evidence, fabric=fabric_of(latency=2e-3))),
    ("out-of-memory", with_record(FULL, lambda r: {"status": "failed"})),
    ("out-of-memory", lambda evidence: replace(evidence, seconds_to_notice=15.1)),
    ("after-out-of-memory", with_record(
        SHARDED, lambda r: {"status": "failed", "error": ErrorPart(kind="Exit", message="gone")}
    )),
]  # fmt: skip


def test_a_sound_machine_has_no_failed_check() -> None:
    assert {name: a.detail for name, a in answers(sound()).items() if a.verdict != "ok"} == {}


@pytest.mark.parametrize(
    ("check", "fault"), FAULTS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(FAULTS)]
)
def test_a_fault_fails_its_check(check: str, fault: Fault) -> None:
    found = answers(fault(sound()))[check]
    assert found.verdict == "failed", found.detail


def test_each_check_has_a_fault() -> None:
    assert {check.id for check in CHECKS} == {name for name, _ in FAULTS}


def test_the_page_lists_the_checks() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## GPU check")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0], row[1]) for row in rows] == [(f"| `{check.id}`", check.question) for check in CHECKS]


def test_a_stub_is_never_ok_where_it_cannot_answer() -> None:
    evidence = sound()
    stub = Gpu(name="CUDA stub NVIDIA A100-SXM4-80GB", uuid="0", memory_bytes=2**34, capability=(8, 0))
    found = answers(replace(evidence, gpus=replace(evidence.gpus, devices=(stub, stub))))
    unanswerable = {
        "architecture", "cpu-loss", "norm", "driver-memory", "phases", "step-time", "trace", "kernels",
        "products", "utilisation", "fabric",
    }  # fmt: skip
    assert {name for name, answer in found.items() if answer.verdict == "n/a"} == unanswerable
    assert all("CUDA stub" in found[name].detail for name in unanswerable)


def test_one_gpu_skips_what_needs_two() -> None:
    found = answers(replace(sound(), ranks=1))
    assert {name for name, a in found.items() if a.verdict == "skipped"} == {"devices", "kernels", "fabric"}


def test_a_run_that_was_not_made_skips_its_checks_with_the_reason() -> None:
    reasons = dict.fromkeys(RUNS, "deepspeed is not installed")
    found = answers(replace(sound(), records={}, missing=reasons))
    assert {a.verdict for name, a in found.items() if name != "architecture" and name != "fabric"} == {
        "skipped"
    }
    assert found["traffic"].detail == "deepspeed is not installed"


def test_a_run_that_failed_fails_its_checks() -> None:
    failed = with_record(
        ZERO, lambda r: {"status": "failed", "error": ErrorPart(kind="RuntimeError", message="no luck")}
    )
    found = answers(failed(sound()))
    assert found["states"].verdict == "failed"
    assert "no luck" in found["states"].detail


def test_unknown_devices_and_a_silent_driver_are_not_failures() -> None:
    unknown = with_ranks(SHARDED, lambda part: {"device_name": "NVIDIA X1"})(sound())
    assert {answers(unknown)[name].verdict for name in ("products", "utilisation")} == {"n/a"}
    silent: dict[str, Any] = {"device_used_bytes": None, "device_used_unknown": "in a container"}
    evidence = sound()
    for name in (ON_CPU, SINGLE, AGAIN, ZERO, FULL, SHARDED):
        evidence = with_ranks(
            name, lambda part: {"memory": [m.model_copy(update=silent) for m in part.memory]}
        )(evidence)
    driver = answers(evidence)["driver-memory"]
    assert (driver.verdict, driver.detail) == ("n/a", "in a container")


def test_a_check_that_cannot_be_judged_costs_no_other() -> None:
    damaged = replace(sound(), kernels={SHARDED: {0: 5}})  # type: ignore[dict-item]
    broken = [name for name, a in answers(damaged).items() if "cannot be judged: " in a.detail]
    assert broken == ["kernels"]


def test_kernels_belong_to_the_step_in_which_they_begin(tmp_path: Path) -> None:
    def event(name: str, begin: float, category: str = "kernel") -> dict[str, Any]:
        return {"name": name, "cat": category, "ts": begin, "dur": 10.0}

    step = "harness::step 7"
    trace = {
        "traceEvents": [
            event(step, 100, "user_annotation"), event(step, 100, "gpu_user_annotation"),
            event("ncclDevKernel_AllGather_RING_LL", 99), event("ncclDevKernel_AllGather_RING_LL", 101),
            event("ncclDevKernel_ReduceScatter_Sum_f32", 105), event("gemm", 103),
            event("ncclDevKernel_AllReduce_Sum_f64", 110),
        ]
    }  # fmt: skip
    assert count_kernels(trace) == {7: 2}
    file = trace_file(tmp_path, 0)
    file.write_bytes(gzip.compress(json.dumps(trace).encode()))
    part = ArtifactPart(kind="trace", rank=0, path=file.name)
    record = make_record().model_copy(update={"artifacts": [part]})
    assert read_kernels(record, tmp_path) == {0: {7: 2}}


TOKEN = "hf_" + "a" * 34
MORE = "credentials=word https://s3/x?X-Amz-Signature=word sshpass -p word ssh node"


def packed(tmp_path: Path) -> dict[str, str]:
    run = tmp_path / "scratch" / "fsdp" / "run"
    run.mkdir(parents=True)
    write_record(run, make_record(label="fsdp"))
    (run / "rank-00000.log").write_text(f"started\nHF_TOKEN={TOKEN}\nhttps://me:word@host/x\n{MORE}\n")
    (run / "request.json").write_text(json.dumps({"command": ["run", "--hub-token", "word"]}))
    (run / "trace-00000.json.gz").write_text("large")
    (tmp_path / "scratch" / "cpu.log").write_text("harness: no memory\n")
    bundle = tmp_path / "out.tar.xz"
    write_bundle(bundle, tmp_path / "scratch", {"failed": ["norm"], "note": TOKEN}, ["norm  failed"])
    with tarfile.open(bundle) as tar:
        return {
            member.name: found.read().decode()
            for member in tar
            if (found := tar.extractfile(member)) is not None
        }


def test_it_holds_records_logs_answers_and_the_topology(tmp_path: Path) -> None:
    files = packed(tmp_path)
    assert set(files) == {
        "doctor/doctor.json", "doctor/doctor.txt", "doctor/checks/fsdp/run/record.json",
        "doctor/checks/fsdp/run/request.json",
        "doctor/checks/cpu.log", "doctor/checks/fsdp/run/rank-00000.log", "doctor/nvidia-smi.txt",
        "doctor/nvidia-smi-topology.txt",
    }  # fmt: skip
    assert json.loads(files["doctor/doctor.json"])["failed"] == ["norm"]
    assert files["doctor/doctor.txt"] == "norm  failed\n"


def test_it_holds_no_secret(tmp_path: Path) -> None:
    text = "\n".join(packed(tmp_path).values())
    assert "started" in text
    assert TOKEN not in text
    assert "word" not in text


@pytest.mark.parametrize("name", ["out.tar", "missing/out.tar.xz"])
def test_a_file_that_cannot_be_written_is_refused_before_any_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(HarnessError, match="--bundle"):
        check_bundle(tmp_path / name)


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
        patch.setattr(gpu_runs, "gather", lambda *_: evidence)
        patch.setattr(gpu_runs, "matrices", lambda *_: [ENDLESS, SMALL_MATRIX])
        made = gpu_runs.compare_all

        def until_it_trains(asked: list[BackendMatrix], *words: Any) -> Iterator[Compared]:
            with pytest.MonkeyPatch.context() as first:
                first.setattr(threading, "Timer", partial(WhenItTrains, folder=words[0] / "at-size"))
                yield from made(asked[:1], *words)
            yield from made(asked[1:], *words)

        patch.setattr(gpu_runs, "compare_all", until_it_trains)
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
def test_a_package_holds_reports_and_traces(sent: tuple[Result, Path]) -> None:
    result, bundle = sent
    assert result.exit_code == 0, result.output
    names = {name for name, _ in unpacked(bundle.read_bytes())}
    assert {
        "doctor/doctor.json", "doctor/doctor.txt", "doctor/fabric.json", "doctor/default/report.md",
        "doctor/default/runs.tar.xz", "doctor/default/ddp-2-0.trace.md",
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
    assert (verdicts["repeat"][0], verdicts["traffic"]) == ("ok", ("skipped", "interrupted"))
    assert "comparisons" not in document
