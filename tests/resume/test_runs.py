"""`harness run` and `harness compare` continue the kept checkpoint of another run."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from harness.backends import registry
from harness.judge.agreement.job_equivalence import job_differences
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.record.run import DIGEST_KIND
from harness.record.store import Store
from tests.harness.cli.command_line import harness, refused, succeeds
from tests.records import changed
from tests.resume.engines import BACKENDS

pytestmark = pytest.mark.long(seconds=12)

JOB = (
    "model.config={hidden_size: 36, intermediate_size: 52, num_hidden_layers: 2, num_attention_heads: 3, "
    "num_key_value_heads: 3}",
    "training.steps=9", "training.global_batch_size=8", "data.sequence_length=16", "data.limit=64",
    "measure.warmup_steps=2", "measure.probed_steps=1", "measure.traced_steps=0",
    "compare.noise_runs=false",
)  # fmt: skip
KEEP = ("measure.checkpoint=neutral", "measure.keep_checkpoint=true")
SAVED_AT = 3
FEW = ("ddp", "zero2", "zero3", "fsdp")
"""`python -m tests.resume.table` has every pair."""


def settings(*more: str) -> list[str]:
    return [part for setting in (*JOB, *more) for part in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Record:
    """Of FSDP1 on 4 ranks, which trained on to the end."""
    succeeds("run", "--backend", "fsdp1", "--nproc", "4", *settings(*KEEP), cwd=folder)
    (record,) = Store(folder / "runs").records()[0]
    return record


@pytest.fixture(scope="module", params=[FEW, pytest.param(BACKENDS, marks=pytest.mark.exhaustive)], ids=len)
def records(request: pytest.FixtureRequest, folder: Path, saved: Record) -> dict[str, Record]:
    """Of another folder, into which the run was brought."""
    elsewhere = folder / str(len(request.param))
    shutil.copytree(folder / "runs" / saved.run_id, elsewhere / "brought")
    backends = ",".join(request.param)
    command = ["compare", "--backends", backends, "--nproc", "2", "--resume-from", "brought"]
    succeeds(*command, *settings(), cwd=elsewhere)
    return {record.backend.label: record for record in Store(elsewhere / "runs").records()[0]}


def resumed(records: dict[str, Record]) -> Iterator[Record]:
    yield from (record for record in records.values() if record.backend.name != registry.REFERENCE)


def test_the_record_says_where_the_run_began(saved: Record, records: dict[str, Record]) -> None:
    for record in resumed(records):
        assert record.resumed is not None
        begun = record.resumed
        assert (begun.run_id, begun.backend, begun.world_size) == (saved.run_id, "fsdp1", 4)
        assert (begun.format, begun.step, begun.updates) == ("neutral", SAVED_AT, SAVED_AT)
        assert record.initial_weights.digest == begun.weights_digest
        assert [step.step for step in record.steps] == list(range(SAVED_AT, 9))
        assert record.observed.optimizer_steps == 9
    assert records["single"].resumed is None


def test_every_backend_goes_on_like_the_uninterrupted_reference(saved, records) -> None:
    comparison = Comparison([*records.values(), saved])
    parities = [row.judgement.parity for row in comparison.rows if not row.is_reference]
    assert len(parities) == len(list(resumed(records))) + 1
    assert set(parities) <= {"tight", "exact"}
    wrong = {"parity", "samples", "learning-rate", "initial-weights", "optimizer-steps", "communication"}
    assert [f.id for f in comparison.findings if f.id.startswith(tuple(wrong))] == []


def test_learning_rates_and_samples_are_those_of_the_same_steps(saved, records) -> None:
    for record in resumed(records):
        assert job_differences(saved, record) == []
        assert [s.learning_rate for s in record.steps] == [s.learning_rate for s in saved.steps[SAVED_AT:]]


def test_time_size_and_memory_of_saving_and_loading_are_recorded(saved, records) -> None:
    assert saved.model is not None
    for rank in saved.ranks:
        assert [(part.operation, part.format, part.step) for part in rank.checkpoints] == [
            ("save", "neutral", SAVED_AT), ("load", "neutral", SAVED_AT),
        ]  # fmt: skip
    first = saved.ranks[0].checkpoints[0]
    assert first.file_bytes is not None
    assert first.file_bytes >= 3 * 4 * saved.model.parameters
    assert first.host_peak_bytes is not None
    assert {row.payload_bytes for row in saved.comm if row.phase == "checkpoint"} == {0}
    for record in resumed(records):
        assert [part.operation for part in record.ranks[0].checkpoints] == ["load"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"updates": 2}, "optimizer-steps-differ"),
        ({"weights_digest": "0" * 64 + DIGEST_KIND}, "initial-weights-differ"),
    ],
)
def test_what_was_lost_is_named(change: dict[str, object], kind: str, saved: Record, records) -> None:
    doctored = changed(records["ddp"], resumed=change)
    assert [difference.kind for difference in job_differences(saved, doctored)] == [kind]


def test_a_wrong_place_in_the_data_is_named(saved: Record, records) -> None:
    record = records["ddp"]
    steps = [replace(step, step=step.step - 1) for step in record.steps]
    doctored = changed(record, steps=steps, resumed={"step": SAVED_AT - 1})
    kinds = {difference.kind for difference in job_differences(saved, doctored)}
    assert kinds >= {"samples-differ", "learning-rate-differs"}


def test_hugging_face_reads_the_weights(folder: Path, saved: Record) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / saved.run_id / "checkpoint")
    assert sum(p.numel() for p in model.parameters()) == saved.model.parameters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume-from", "nowhere"], "no checkpoint in"),
        (["--resume-from", "RUN", "--set", "optimizer.learning_rate=0.5"], "optimizer.learning_rate is 0.5"),
    ],
)
def test_what_cannot_be_continued_is_refused(arguments, words, folder: Path, saved: Record) -> None:
    given = [saved.run_id if part == "RUN" else part for part in arguments]
    assert words in refused(folder, "run", "--backend", "ddp", *settings(), *given)


def resume_on_one_rank(kept: Path | str, cwd: Path, *more: str) -> CompletedProcess[str]:
    words = ("run", "--backend", "ddp", "--nproc", "1", *settings(), "--resume-from", str(kept), *more)
    return harness(*words, cwd=cwd)


def flip_a_bit(file: Path, place: int = -1000) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, "the moments of Adam after loading are not those that run"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "exp_avg_sq.safetensors' is damaged or incomplete",
        ),
    ],
)
def test_damaged_moments_are_noticed(damage, words, folder: Path, saved: Record, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint"
    shutil.copytree(folder / "runs" / saved.run_id / "checkpoint", kept)
    damage(kept / "exp_avg_sq.safetensors")
    done = resume_on_one_rank(kept, tmp_path)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.fixture(scope="module")
def native(folder: Path) -> Path:
    """The native checkpoint of a run of DDP on one rank."""
    keep = settings("measure.checkpoint=native", "measure.keep_checkpoint=true")
    succeeds("run", "--backend", "ddp", "--nproc", "1", *keep, "--runs", "native", cwd=folder)
    (record,) = Store(folder / "native").records()[0]
    return folder / "native" / record.run_id / "checkpoint"


@pytest.mark.parametrize(
    ("damaged", "words"),
    [(None, ""), ("exp_avg_sq", "the moments of Adam after loading are not those that run")],
)
def test_native_checkpoints_have_a_checksum_of_moments(damaged, words, native: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    kept = tmp_path / "checkpoint"
    shutil.copytree(native, kept)
    if damaged is not None:
        places = FileSystemReader(kept).read_metadata().storage_data
        place = next(p for index, p in places.items() if damaged in index.fqn and "down_proj" in index.fqn)
        flip_a_bit(kept / place.relative_path, place.offset + place.length // 2)
    done = resume_on_one_rank(kept, tmp_path, "--trust-checkpoint")
    assert done.returncode == int(damaged is not None)
    assert words in done.stderr


def test_a_job_in_epochs_that_has_no_step_left_is_refused(tmp_path: Path) -> None:
    """How many steps an epoch has is known to the ranks only."""
    one = settings("training.steps=null", "training.epochs=0.1", "measure.warmup_steps=0")
    done = succeeds("run", "--backend", "ddp", "--nproc", "1", *one, *settings(*KEEP)[-4:], cwd=tmp_path)
    (run,) = Store(tmp_path / "runs").records()[0]
    again = ["--backend", "ddp", "--nproc", "1", *one, "--resume-from", run.run_id]
    done = harness("run", *again, cwd=tmp_path)
    assert done.returncode != 0
    assert "saved after 1 of 1 steps: none is left" in done.stderr


def test_a_native_checkpoint_executes_code_so_it_needs_trust(native: Path, tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(native, checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Code()))
    description = json.loads((checkpoint / "checkpoint.json").read_text())
    of_an_older_version = description | {"files": {".metadata": "0"}, "seal": "0"}
    (checkpoint / "checkpoint.json").write_text(json.dumps(of_an_older_version))
    resumed = ["run", "--backend", "ddp", "--nproc", "1", *settings(), "--resume-from", str(checkpoint)]
    assert "loading a native checkpoint executes code in it; give a neutral one" in refused(
        tmp_path, *resumed
    )
    assert not (tmp_path / "executed").exists()
    trusted = resume_on_one_rank(checkpoint, tmp_path, "--trust-checkpoint")
    assert (trusted.returncode, (tmp_path / "executed").exists()) == (1, True)
