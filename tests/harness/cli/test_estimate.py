"""`harness estimate` and `recommend` as people type them, with and without --calibrate."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.backends.registry import BUILT_IN
from harness.cli.estimate import estimate, recommend
from harness.plan.calibration import Calibration, CellFit, write_calibration
from tests.representatives import EXHAUSTIVE

from .command_line import SMALL, harness, records, succeeds

pytestmark = pytest.mark.long(seconds=25)

MIXED = ("--set", "training.precision=bf16-mixed")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(estimate, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_the_answer_comes_first() -> None:
    code, text, _ = run(
        "--model", "bloom-560m", "--backends", "ddp,fsdp", "--world-size", "8,16", "--gpu", "A100-80",
        "--fabric", "HDR200", *MIXED,
    )  # fmt: skip
    lines = text.splitlines()
    assert code == 0
    assert lines[0].startswith("8 ranks, micro-batch 1, accumulation 1: ddp fits, ")
    assert " of 85.1 GB, about " in lines[0]
    assert "; fsdp fits, " in " ".join(lines[:2])
    assert any(line.startswith("16 ranks, micro-batch 1") for line in lines[:4])
    assumed = lines.index("bloom-560m: 559,214,592 parameters (catalogue: bigscience/bloom-560m)")
    assert assumed > max(n for n, line in enumerate(lines) if line.startswith("per step"))


def test_what_fits_instead_says_what_it_changes_and_has_a_command_that_runs_as_pasted() -> None:
    words = ("--model", "llama-3.2-1b", "--gpu", "L4", "--set", "data.sequence_length=2048")
    code, text, _ = run(*words, "--backends", "single", "--world-size", "1", "--set", "loss.chunk_tokens=128")
    assert code == 0
    found = re.findall(r"^- ([^\n]+(?:\n(?!- |  )[^\n]+)*)\n  (harness .+)$", text, re.MULTILINE)
    offers = {" ".join(offer.split()): command for offer, command in found}
    assert len(offers) >= 2
    for offer, command in offers.items():
        assert command.startswith("harness estimate ")
        name, _, figures = offer.partition(": ")
        checkpoints = "training.activation_checkpointing=true" in command
        assert checkpoints == ("activation checkpointing" in name)
        again, shown, _ = run(*shlex.split(command)[2:])
        size = re.search(r"micro-batch 1: (.+? of [\d.]+ GB)", figures)
        assert again == 0
        assert size[1] in " ".join(shown.split()), command


def test_nothing_is_said_of_the_error_of_what_is_not_predicted() -> None:
    words = ("--config", "@t5", "--backends", "ddp,fsdp", "--gpu", "H100-80")
    _, text, _ = run(*words)
    assert "memory and speed n/a" in text
    assert "typical error" not in text
    assert json.loads(run(*words, "--json")[1])["trust"] is None
    _, text, _ = run("--model", "gpt2", "--backends", "ddp,fsdp")
    assert "typical error, full training under ddp and fsdp: memory" in text


@pytest.mark.parametrize(
    ("words", "assumption"),
    [
        # 64 samples of 512 tokens keep the GPU busy; the hooks of ZeRO-3 outlast one sample of 1,024.
        (("--backends", "ddp", "--set", "data.sequence_length=512", "--set", "training.micro_batch_size=64"),
         "matmul rate of H100-80"),
        (("--backends", "ddp,zero3"), "the host takes 8 us to start a kernel"),
    ],
)  # fmt: skip
def test_the_host_is_the_largest_assumption_where_steps_wait_for_it(
    words: tuple[str, ...], assumption: str
) -> None:
    _, text, _ = run("--model", "gpt2", "--gpu", "H100-80", *words)
    assert assumption in " ".join(text.partition("largest assumption:")[2].split())


def test_the_largest_assumption_is_that_of_the_rows_that_are_shown() -> None:
    """Ulysses over ZeRO-3, which waits for the host, is none of the six."""
    words = (
        "--model", "llama-3.1-8b", "--world-size", "64", "--gpu", "H100-80", "--fabric", "NDR400",
        "--set", "training.micro_batch_size=1",
    )  # fmt: skip
    _, text, _ = run(*words)
    assert "NDR400 gives its line rate" in " ".join(text.partition("largest assumption:")[2].split())
    assert "ulysses-zero3 " not in text


def test_details_name_formula_and_source() -> None:
    _, text, _ = run("--model", "bloom-560m", "--backends", "ddp", "--details", *MIXED)
    assert "ddp on 8 ranks, line by line" in text
    assert "2 x (8 - 1) / 8 x 2,236,858,368 bytes" in text
    assert "harness.forms.ddp" in text


def test_json_is_alone_on_standard_output_and_the_job_decides_the_model_where_none_is_named() -> None:
    code, text, errors = run("--backends", "ddp", "--json", "--set", "model.name=bloom-560m", *MIXED)
    assert code == 0
    document = json.loads(text)
    assert (document["rows"][0]["backend"], document["parameters"]) == ("ddp", 559_214_592)
    assert "bloom-560m" in errors


def test_with_a_gpu_the_defaults_are_those_of_recommend() -> None:
    _, text, _ = run("--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80")
    assert "sequence 4096, bf16-mixed" in text
    assert "note: training.precision=bf16-mixed, since none is given\nnote: data.sequence_length=4096" in text
    _, plain, _ = run("--model", "bloom-560m", "--backends", "ddp")
    assert "sequence 128, fp32" in plain


def test_a_network_by_another_name_is_named() -> None:
    _, _, errors = run("--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80", "--fabric", "NDR")
    assert errors == (
        "fabric 'NDR' is taken as NDR400, 50 GB/s per GPU; estimate --list hardware shows others\n"
    )
    assert (
        run("--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80", "--fabric", "ndr400")[2] == ""
    )


def test_lists_of_models_and_hardware() -> None:
    assert "meta-llama/Llama-3.1-405B" in run("--list", "models")[1]
    assert "Slingshot-11" in run("--list", "hardware")[1]


@pytest.mark.costly
@pytest.mark.parametrize("asked", [("ddp", "zero3", "fsdp"), pytest.param((), marks=EXHAUSTIVE)], ids=len)
def test_405_billion_on_4096_gpus_needs_no_torch_and_little_memory(asked: tuple[str, ...]) -> None:
    """Closed forms alone; `benchmarks/estimate.py` measures the time."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "sys.argv = ['harness', 'estimate', '--model', 'llama-3.1-405b', '--world-size', '4096', '--json',"
        " '--gpu', 'H100-80', '--fabric', 'NDR400', '--set', 'training.precision=bf16-mixed',"
        f" '--set', 'training.micro_batch_size=1', *{['--backends', ','.join(asked)] if asked else []}]\n"
        "from harness.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    loaded = {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "    # ru_maxrss would be that of the process that forked this one, where that is larger.\n"
        "    used = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "    print(sorted(loaded), used, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    names = [row["backend"] for row in rows]
    assert {name.partition(":")[0] for name in names} == (set(asked) or BUILT_IN.keys() - {"single"})
    each = ["fsdp-cp:sync_each_batch=True", "fsdp-tp:sync_each_batch=True"]  # whose gradients do not fit
    assert [name for name in names if "sync_each_batch" in name] == ([] if asked else each)
    assert all(row["weights_bytes"] or row["unsupported"] for row in rows)
    (zero3,) = (row for row in rows if row["backend"] == "zero3")
    head = 128_256 * 16_384 * 2  # bytes in bf16: gathered whole, beyond what stage3_max_live_parameters keeps
    assert zero3["moments"]["forward/backward"]["gathered"] >= head
    last = done.stderr.splitlines()[-1]
    assert last.startswith("[] ")
    assert int(last.split()[-1]) * 1024 < 2 * 2**30


MACHINE = ["--gpus", "4", "--gpu", "H100-80", "--tokens-per-step", "40k"]
PLAIN = ["--set", "training.precision=fp32", "--set", "training.activation_checkpointing=false"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recommend")
    done = succeeds("recommend", "--model", "llama-3.2-1b", *MACHINE, *PLAIN, "--json", cwd=folder)
    assert "Why not the others" in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_model_that_fits_many_times_over_is_not_sharded(document: dict[str, Any]) -> None:
    assert document["data_parallel_is_right"]
    assert len(document["best"]) == 3
    assert document["remarks"] == [
        "data.sequence_length=4096, since none is given",
        "runtime.preset=library-defaults, since none is given",
        "32,768 tokens per step instead of 40,000: 8 samples of 4,096, 2 for each of 4 GPUs",
    ]
    assert {row["backend"] for row in document["fitting"]} >= {"zero1", "zero3", "fsdp"}


def test_a_mixture_of_experts_is_answered_by_its_states(document: dict[str, Any], tmp_path: Path) -> None:
    words = ("recommend", "--model", "mixtral", "--gpu", "H100-80", "--fabric", "NDR400", "--json")
    few, many = (harness(*words, "--gpus", gpus, cwd=tmp_path) for gpus in ("8", "64"))
    assert (few.returncode, many.returncode) == (0, 0)
    lines = [line for line in few.stderr.splitlines() if not line.startswith("harness")]  # without progress
    said, shown = (" ".join(" ".join(text).split()) for text in (lines, many.stderr.splitlines()))
    ways = said.partition(" GB per rank ")[0]
    assert ways.startswith(
        "nothing fits; more GPUs: zero3 on 16 ranks, micro-batch 1: model states take 46.7 of"
    )
    assert " LoRA: fsdp on 8 ranks, micro-batch 1: model states take 11.7 of 84.9 GB" in ways
    assert " zero3 does not fit: model states take 93.4 of 84.9 GB" in said
    assert any("adapter.targets=" in one["command"] for one in json.loads(few.stdout)["alternatives"])
    assert "Use zero3, micro-batch 1, accumulation 8: model states take 11.7 of 84.9 GB, activations" in shown
    assert "fsdp holds 90.6 GB of states and zero3 11.7: FSDP2 cuts" in shown
    answer = json.loads(many.stdout)
    assert answer.keys() == document.keys()
    assert answer["best"][0].keys() == document["best"][0].keys()
    assert (answer["best"][0]["backend"], answer["best"][0]["tokens_per_second_per_gpu"]) == ("zero3", None)
    assert (document["data_parallel_is_right"], answer["data_parallel_is_right"]) == (True, False)
    assert "activations, speed: they depend on which tokens go to which expert" in answer["uncertain"]
    assert "they depend on which tokens go to which expert" in shown


def test_cells_that_no_rate_is_known_for_say_why_and_exposed_shares_at_which_rate(tmp_path: Path) -> None:
    words = ("recommend", "--model", "gpt2", "--gpus", "2", "--gpu")
    ranged, known = (
        " ".join(harness(*words, gpu, cwd=tmp_path).stdout.split()) for gpu in ("V100-32", "A100-40")
    )
    assert "what of its rates training sustains, so comp. s and exposed are n/a" in ranged
    assert "% of the step, at the assumed matmul rate, is exposed communication" in ranged
    assert " n/a" not in known
    assert "assumed matmul rate" not in known
    assert "% of the step is exposed communication" in known


def test_the_model_may_be_that_of_the_job_and_ranks_have_one_name(tmp_path: Path) -> None:
    words = ("recommend", "--config", "@default", "--gpu", "H100-80", "--json")
    answer = json.loads(harness(*words, "--gpus", "2", cwd=tmp_path).stdout)
    assert (answer["gpus"], bool(answer["best"])) == (2, True)
    of_runs = harness(*words, "--nproc", "8", cwd=tmp_path)
    assert of_runs.returncode == 2
    assert "the number of ranks is --gpus or --world-size" in of_runs.stderr


QUESTION = ("--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80", "--json")
RUNS = Path(__file__).parents[3] / "reports" / "shaped-links" / "200mbit" / "runs.tar.xz"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    cell = CellFit(
        cell="ddp", group="here", measured_seconds=1.0, spread=0.1, fitted_seconds=1.0, left_out_seconds=1.05
    )
    calibration = Calibration(
        device="A100-80", transport="nccl", constants={"step_overhead_seconds": 5.0}, cells=[cell]
    )
    write_calibration(calibration, path)
    return path


def test_a_saved_calibration_replaces_constants_and_its_error_is_said(saved: Path) -> None:
    before, after = (
        CliRunner().invoke(estimate, [*QUESTION, *more]) for more in ((), ("--calibrate", str(saved)))
    )
    assert (before.exit_code, after.exit_code) == (0, 0)
    assert "median error 5.0%" in after.stderr
    steps = [json.loads(result.stdout)["rows"][0]["step_seconds"] for result in (before, after)]
    assert steps[1] == pytest.approx(steps[0] + 5)


def test_recommend_takes_it_too(saved: Path) -> None:
    question = ["--model", "bloom-560m", "--gpus", "1", "--gpu", "A100-80", "--tokens-per-step", "8192"]
    result = CliRunner().invoke(recommend, [*question, "--json", "--calibrate", str(saved)])
    assert result.exit_code == 0, result.stderr
    assert "median error 5.0%" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--save-calibration", "c.json"], "--save-calibration needs --calibrate RUNS"),
        (["--calibrate", "missing.json"], "calibration missing.json cannot be read"),
        (["--calibrate", "missing"], "missing"),
        (["--calibrate", str(RUNS)], ", not A100-80; calibrate with records of A100-80"),
        (["--calibrate", "SAVED", "--calibrate", str(RUNS)], "is a saved calibration and stands alone"),
    ],
)
def test_what_goes_wrong_is_one_line(saved: Path, arguments: list[str], line: str) -> None:
    given = [str(saved) if word == "SAVED" else word for word in arguments]
    result = CliRunner().invoke(estimate, [*QUESTION, *given])
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("harness: ")
    assert line in last


def test_without_a_gpu_there_is_nothing_to_calibrate(saved: Path) -> None:
    result = CliRunner().invoke(estimate, ["--model", "bloom-560m", "--calibrate", str(saved)])
    assert result.exit_code == 1
    assert "--calibrate needs the GPU that the runs were made on; name it with --gpu" in result.stderr


LIMIT_BYTES = 3_000_000
ARGUMENTS = ["fit", "--backend", "zero2", "--nproc", "2", *SMALL, "--set", "training.global_batch_size=96"]


@dataclass
class Fit:
    folder: Path
    done: subprocess.CompletedProcess[str]
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    folder = tmp_path_factory.mktemp("fit")
    done = succeeds(*ARGUMENTS, "--limit", str(LIMIT_BYTES), "--json", cwd=folder)
    return Fit(folder, done, json.loads(done.stdout))


@pytest.mark.costly
def test_the_largest_fits_and_the_next_runs_out_of_memory(fit: Fit) -> None:
    found = fit.answer["micro_batch"]
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    largest = found["largest"]["micro_batch_size"]
    assert found["too_large"] == sizes[sizes.index(largest) + 1]
    assert found["complete"]
    assert found["largest"]["peak_bytes"] <= LIMIT_BYTES
    assert {trial["global_batch_size"] for trial in fit.answer["trials"]} == {96}


@pytest.mark.costly
def test_every_trial_is_a_record_with_its_limit(fit: Fit) -> None:
    found = {record.run_id: record for record in records(fit.folder / "runs")}
    assert found.keys() == {trial["run_id"] for trial in fit.answer["trials"]}
    assert {record.status for record in found.values()} == {"ok", "oom"}
    assert {record.world.memory_limit_bytes for record in found.values()} == {LIMIT_BYTES}
    refusals = [record.error.message for record in found.values() if record.error]
    assert all(f"of a limit of {LIMIT_BYTES} bytes" in message for message in refusals)


@pytest.mark.costly
def test_how_wrong_such_predictions_were_is_said(fit: Fit) -> None:
    known = fit.answer["trust"]
    assert known["speed"] is None
    assert known["memory"]["whose"] == "runs on CPU ranks"
    assert f"({known['memory']['runs']} runs on CPU ranks)" in fit.done.stderr
    assert f"largest assumption: {known['assumption']}" in fit.done.stderr


@pytest.mark.costly
def test_the_fastest_is_one_of_several(fit: Fit) -> None:
    rates = {trial["micro_batch_size"]: trial["tokens_per_second"] or 0 for trial in fit.answer["trials"]}
    assert len([rate for rate in rates.values() if rate]) > 1
    assert fit.answer["micro_batch"]["fastest"]["tokens_per_second"] == max(rates.values())


@pytest.mark.costly
def test_asking_again_runs_nothing(fit: Fit) -> None:
    before = set((fit.folder / "runs").iterdir())
    done = harness(*ARGUMENTS, "--limit", str(LIMIT_BYTES), cwd=fit.folder)
    assert done.stdout.startswith("largest micro-batch: ")
    assert set((fit.folder / "runs").iterdir()) == before


@pytest.mark.costly
def test_adapters_are_predicted(tmp_path: Path) -> None:
    asked = [*ARGUMENTS[:-2], "--set", "adapter.kind=lora", "--set", "adapter.targets=[q_proj,v_proj]"]
    done = succeeds(*asked, "--gpu", "3MB", "--most-runs", "1", "--json", cwd=tmp_path)
    (trial,) = json.loads(done.stdout)["trials"]
    assert abs(trial["prediction_error"]) < 0.005


@pytest.mark.costly
def test_where_nothing_fits_the_commands_of_what_does_hold(tmp_path: Path) -> None:
    asked = ("fit", "--backend", "ddp", "--nproc", "2", *SMALL, "--limit", "1.2MB", "--json")
    done = succeeds(*asked, cwd=tmp_path)
    ways = {one["name"]: one for one in json.loads(done.stdout)["alternatives"]}
    for name in ("activation checkpointing", "fsdp", "bf16 without fp32 masters"):
        command = ways[name]["command"]
        assert f"what fits: {name}: peak " in done.stderr
        assert command in done.stderr
        found = succeeds(*shlex.split(command)[1:], "--most-runs", "1", "--json", cwd=tmp_path)
        (trial,) = json.loads(found.stdout)["trials"]
        assert trial["status"] == "ok"
