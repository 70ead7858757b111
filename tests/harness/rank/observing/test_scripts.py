"""Unchanged scripts: their results stay, and their figures equal those of the harness's own run."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.observed_scripts.figures import collectives, sample_sums, states
from harness.cli import harness
from harness.record import Record
from harness.record.store import read_record, write_record
from tests.observed import ScriptRun, run_script
from tests.representatives import cheap, first

EXAMPLES = Path(__file__).parents[4] / "examples" / "observe"
pytestmark = pytest.mark.long(seconds=25)
STEPS = 8
JOB = {
    "model.name": "model", "model.dropout": "null", "data.source": "text", "data.path": "text.txt",
    "data.tokenizer": "bytes", "data.sequence_length": "32", "data.shuffle": "false",
    "optimizer.decay": "all", "schedule.kind": "constant", "schedule.warmup_steps": "0",
    "training.steps": str(STEPS),
    "training.global_batch_size": "8", "training.micro_batch_size": "4", "training.deterministic": "false",
    "measure.traced_steps": "0", "runtime.preset": "library-defaults",
    "runtime.threads_per_rank": "1", "runtime.loading": "full",
}  # fmt: skip
"""What the examples train with these arguments, as a job of the harness."""
LOSS_BYTES = 4 * 32 * 257 * 4
"""Logits of a micro-batch: the model's own loss keeps another copy of a part of them than the harness's."""
ARGUMENTS = ("--model", "model", "--text", "text.txt", "--length", "32", "--steps", str(STEPS))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and a text."""
    folder = tmp_path_factory.mktemp("job")
    make_job(folder)
    return folder


def make_job(folder: Path) -> None:
    """Write the small model and the text that the examples are given."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=257, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)


@pytest.fixture(scope="module")
def runs(job: Path) -> "Runs":
    return Runs(job)


class Runs:
    """Runs of scripts and of the harness, each once."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self._known: dict[Any, Any] = {}

    def script(self, name: str, *arguments: str, observe: bool = True) -> ScriptRun:
        key = (name, arguments, observe)
        if key not in self._known:
            folder = self._job / f"script-{len(self._known)}"
            folder.mkdir()
            for given in ("model", "text.txt"):
                (folder / given).symlink_to(self._job / given)
            self._known[key] = run_script(folder, EXAMPLES / name, *ARGUMENTS, *arguments, observe=observe)
        return self._known[key]

    def observed(self, name: str, *arguments: str) -> Record:
        run = self.script(name, *arguments)
        assert run.codes == [0, 0], run.printed
        assert run.record.status == "ok"
        return run.record

    def own(self, backend: str, settings: dict[str, str]) -> Record:
        key = (backend, *settings.items())
        if key not in self._known:
            folder = self._job / f"own-{len(self._known)}"
            places = {"model.name": str(self._job / "model"), "data.path": str(self._job / "text.txt")}
            given = JOB | places | settings
            sets = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
            done = CliRunner().invoke(
                harness, ["run", "--backend", backend, "--nproc", "2", "--runs", str(folder), *sets]
            )
            assert done.exit_code == 0, done.output + done.stderr
            (path,) = folder.glob("*/record.json")
            self._known[key] = read_record(path)
        return self._known[key]


def peaks(record: Record) -> list[int]:
    """What a step needs at most beyond what lives after it, by rank."""
    found = []
    for rank in record.ranks:
        of_step = [part for part in rank.memory if part.moment != "after_setup"][-3:]
        found.append(max(p.peak_bytes or 0 for p in of_step) - (of_step[-1].allocated_bytes or 0))
    return found


def test_a_script_prints_the_same_losses_observed_or_not(runs: Runs) -> None:
    alone = runs.script("torch_ddp.py", observe=False)
    assert alone.codes == [0, 0], alone.printed
    losses = alone.lines("step ")
    assert len(losses) == STEPS
    assert runs.script("torch_ddp.py").lines("step ") == losses


BUCKET = "100000"
ACCUMULATED = {"training.micro_batch_size": "2", "training.accumulation_steps": "2"}
CASES = {
    "torch DDP": ("ddp", "torch_ddp.py", (), {}),
    "torch DDP, 2 micro-steps": (
        "ddp", "torch_ddp.py", ("--batch-size", "2", "--accumulation", "2"), ACCUMULATED,
    ),
    "torch FSDP2": ("fsdp", "torch_ddp.py", ("--fsdp",), {}),
    "torch replicate": ("replicate", "torch_ddp.py", ("--replicate",), {}),
    "torch FSDP1": ("fsdp1", "torch_ddp.py", ("--fsdp1",), {}),
    "Accelerate": ("ddp", "accelerate_loop.py", (), {}),
    # The Trainer leaves biases and norms without decay.
    "Trainer": ("ddp", "hf_trainer.py", (), {"optimizer.decay": "matrices"}),
    "Lightning": ("ddp", "lightning_module.py", (), {}),
    "DeepSpeed": (
        f"zero2:reduce_bucket_size={BUCKET}", "deepspeed_zero.py", ("--bucket-size", BUCKET), {},
    ),
}  # fmt: skip
"""By framework: the backend that runs the same, the script, its arguments, what differs in the job."""
ALWAYS, LONG = ("torch FSDP2", "DeepSpeed"), ("torch FSDP1",)


@pytest.mark.parametrize(
    "case", [*cheap(ALWAYS, [case for case in CASES if case not in LONG]), *first([], LONG)]
)
def test_figures_of_a_script_equal_those_of_the_harness(runs: Runs, case: str) -> None:
    backend, script, arguments, settings = CASES[case]
    own, seen = runs.own(backend, settings), runs.observed(script, *arguments)
    assert seen.backend.name == f"observed-{backend.partition(':')[0]}"
    assert collectives(seen) == collectives(own)
    left_over = "gradients" if case == "Lightning" else None  # it zeroes them in the next step
    assert states(seen, left_over) == states(own, left_over)
    # fp32 means of each rank, against sums in fp64 over all ranks.
    losses = [step.loss for step in own.steps]
    assert [step.loss for step in seen.steps] == pytest.approx(losses, rel=1e-6)
    norms = [step.gradient_norm for step in own.steps]
    assert [step.gradient_norm for step in seen.steps] == pytest.approx(norms, rel=1e-5)
    assert [step.tokens for step in seen.steps] == [step.tokens for step in own.steps]
    assert [step.target_tokens for step in seen.steps] == [step.target_tokens for step in own.steps]
    assert sample_sums(seen) == sample_sums(own)
    begun = [record.initial_weights for record in (seen, own)]
    assert begun[0].parameter_count == begun[1].parameter_count
    # Lightning's module gives its parameters other names.
    assert (begun[0].digest == begun[1].digest) == (case != "Lightning")
    if left_over is None:
        assert peaks(seen) == pytest.approx(peaks(own), abs=LOSS_BYTES)


def test_no_finding_about_correctness_is_raised_of_a_sound_script(runs: Runs) -> None:
    from harness.judge.comparison import Comparison

    about_machine = {"busy-machine", "few-timed-steps", "noisy-timing"}
    found = {finding.id for finding in Comparison([runs.observed("torch_ddp.py")]).findings}
    assert found <= about_machine


LIMITED = "deepspeed_zero.py --stage 3 --persistence 100"


@pytest.mark.parametrize("script", ["sft_lora.py", "packed_yaml.py", LIMITED])
def test_adapters_packed_samples_and_own_limits_have_closed_forms(
    runs: Runs, script: str, tmp_path: Path
) -> None:
    from harness.judge.comparison import Comparison
    from harness.judge.facts import SENT

    record = runs.observed(*script.split())
    seen = Comparison([record])
    assert {finding.id for finding in seen.findings} <= {"busy-machine", "few-timed-steps", "noisy-timing"}
    figures = seen.rows[0].as_json()
    assert figures["model_state_bytes"] == figures["expected_model_state_bytes"]
    assert 0 <= figures[SENT] - figures[f"expected_{SENT}"] < 100  # counts of tokens
    if script == LIMITED:
        assert record.backend.options == {"stage3_param_persistence_threshold": 100}
    if script != "sft_lora.py":
        return
    adapter = record.job.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha) == ("lora", 4, 8)
    unknown = adapter.model_copy(update={"rank": None, "alpha": None})  # of older records
    for place, (part, words) in enumerate([(adapter, "LoRA of rank 4, 3 %"), (unknown, "LoRA, 3 %")]):
        folder = tmp_path / str(place)
        job = record.job.model_copy(update={"adapter": part})
        (folder / record.run_id).mkdir(parents=True)
        write_record(folder / record.run_id, record.model_copy(update={"job": job}))
        done = CliRunner().invoke(harness, ["report", str(folder), "-o", str(folder / "r.md")])
        assert done.exit_code == 0, done.output + done.stderr
        assert words in (folder / "r.md").read_text()
