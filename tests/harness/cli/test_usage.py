"""What the commands have in common: help, usage errors, tracebacks, what they load."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from harness import cli
from harness.bounds import MOST_MESSAGE_CHARACTERS
from harness.cli import COMMANDS, EXAMPLES, INSTEAD
from harness.cli.options import common
from tests.built_in import HYBRID
from tests.docs.markdown import ROOT

from . import command_line
from .command_line import environment, harness, harness_process, refused

pytestmark = pytest.mark.long(seconds=10)


@pytest.mark.parametrize(
    "arguments",
    [["run", "--backend", "ddp", "--nproc", "0"], ["run"], ["report"], ["nonsense"]],
    ids=" ".join,
)
def test_usage_error_exits_with_two(tmp_path: Path, arguments: list[str]) -> None:
    done = harness(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert not (tmp_path / "runs").exists()


RUN, RECOMMEND = "run --backend ddp", "recommend --gpus 4 --gpu H100-80 --tokens-per-step 40k"
LLAMA = f"{RECOMMEND} --model llama-3.1-8b"
FIT = "fit --backend ddp --limit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --backend zero3 --set runtime.device=gpu", "Did you mean 'runtime.device=cuda'?"),
        ("compare runs/text", "is not a file; give a Python file and its arguments after `--`"),
        ("compare --backends 'ddp zero4'", "backend 'zero4' is unknown"),
        ("run --backend zerro3", "backend 'zerro3' is unknown. Did you mean 'zero3'?"),
        ("run --backend zero3:ofload=cpu", "Did you mean 'offload'?"),
        ("run --backend zero3:offload=[x", "offload"),
        ("run --backend single --nproc 2", "'single' is one process"),
        *((f"run --backend {name}:shard_size=3 --nproc 2", "shard_size") for name in HYBRID),
        (f"{RUN} --set training.step=3", "Did you mean 'steps'?"),
        (f"{RUN} --set model.hidden_size=32", "Did you mean 'model.config.hidden_size'?"),
        (f"{RUN} --set data=x.jsonl", "Did you mean 'data.source' or 'data.path'?"),
        (f"{RUN} --set training.steps=0", "was given 0: it must be greater than 0"),
        ("observe -- train.py", "put python or torchrun in front of it"),
        *((f"observe -- {word}", "activate the environment") for word in ("nosuch", "checkpoints")),
        *((f"observe -- ./{word}", "make it executable, or put") for word in ("train.sh", "pipe")),
        *((f"observe -- {ROOT / file}", f"`harness list --runs {ROOT / file}`")
          for file in ("reports/default/runs.tar.xz", "reports")),
        (f"observe -- {ROOT / 'tests/harness/snapshots/stub.pickle'}", "dumps: `harness trace`, `snapshot`"),
        (f"{RUN} --config none.yaml",
         "none.yaml cannot be read: No such file or directory; `harness settings --write FILE`"),
        ("run --backend ddp,zero2", "unknown. For several: `harness compare --backends ddp,zero2`"),
        (f"{RUN} --nproc 3 --set training.global_batch_size=8", "do not fit: training.global_batch_size"),
        (f"{RUN} --set data.source=text --set data.path=none.txt",
         "data.path 'none.txt' does not exist in {folder}; give an existing file"),
        (f"{RUN} --set data.source=text --set data.path=empty", "gives no sample"),
        (f"{RUN} --set data.source=jsonl --set data.path=empty", "gives no sample"),
        (f"{RUN} --set data.sequence_length=1024", "longer than the model's context of 512"),
        (f"{RUN} --set 'model.config={{model_type: bert}}'", "is not a causal language model"),
        (f"{RUN} --set 'model.config={{model_type: lama}}'", "unknown to transformers"),
        ("compare --backends zero1,dpd", "Did you mean 'ddp'?"),
        ("compare --backends ''", "--backends is empty"),
        ("compare --backends ddp --nproc 2,3", "ranks 3, global_batch_size 8"),
        *((f"compare --backends ddp --nproc '{sizes}'", f"--nproc was given '{sizes}'")
          for sizes in ("0", "two", "2,,4", "2,-1", "")),
        ("compare --backends ddp --report report.pdf",
         "report 'report.pdf': '.pdf' names no format; end its name in .md"),
        ("compare --within 3% --batch largest",
         "--batch largest and --within or --max-minutes exclude each other"),
        ("compare --from-deepspeed ds.json --batch largest", "exclude each other"),
        ("doctor --gpu --backends ddp", "leave out --backends"),
        ("doctor --bundle x.tar.xz", "add --gpu"),
        ("doctor --backends zero4", "harness: backend 'zero4' is unknown"),
        ("fit --backend ddp", "ranks on the CPU share the memory of the machine"),
        (f"{FIT} plenty", "--limit takes bytes such as 2GB, or a GPU: GPU 'plenty' is unknown"),
        (f"{FIT} 900TB", "but this machine has"),
        (f"{FIT} 1GB --set training.global_batch_size=9", "does not divide"),
        ("fit --backend ddp --limit 24", "no run fits in 24 bytes; for gigabytes write 24GB"),
        ("verify binary", "report binary is not UTF-8 text; give what"),
        (f"{LLAMA} --gpus 8xA100", "numbers of ranks such as 2 or 2,4; the kind of GPU is --gpu"),
        ("estimate --model mistral --gpus 8 --gpu H100-80", "Did you mean 'mistral-7b'"),
        ("fit --backend zero4 --limit 1GB", "Did you mean 'zero3'"),
        (f"{RECOMMEND} --model llama-3.1-9b",
         "model 'llama-3.1-9b' is neither in the catalogue nor a folder or file"),
        (f"{RECOMMEND} --model bert-base", "`harness estimate --backends` gives its states"),
        (f"{LLAMA} --gpu H100-81", "Did you mean 'H100-80'"),
        (f"{LLAMA} --gpus 12", "12 ranks do not fill nodes of 8 GPUs"),
        (f"{LLAMA} --gpus 16 --fabric NDR401", "Did you mean 'NDR400'"),
        (f"{LLAMA} --tokens-per-step lots", "--tokens-per-step was given 'lots'"),
        (f"{LLAMA} --tokens-per-step 5", "less than one sample"),
        (f"{LLAMA} --set training.micro_batch_size=1", "training.micro_batch_size would be ignored"),
        ("estimate --model lama-3.1-8b",
         "harness: model 'lama-3.1-8b' is neither in the catalogue nor a folder or file."),
        ("estimate --model gpt-oss-20b", "harness: gpt-oss-20b is not covered: mixture of experts"),
        ("estimate --world-size 0", "harness: --world-size / --gpus was given '0'; give numbers of ranks"),
        ("recommend --model gpt2 --gpu H100-80 --gpus 0", "--gpus was given '0'; give numbers of ranks"),
        ("labs run llama", "Did you mean 'llama-finetuning'?"),
        ("trace nosuch.json.gz", "No such file or directory; give a trace of torch.profiler"),
        ("snapshot nosuch.pickle", "No such file or directory; give what torch.cuda.memory._dump_snapshot"),
        ("verify r.md", "No such file or directory; give what `harness report -o FILE` wrote"),
        ("slurm render --site my.yaml --backends ddp -o j", "No such file or directory; write 'name: mine'"),
        ("show runs.tar.xz/nosuch", "'runs.tar.xz' is missing"),
        ("show elsewhere/nosuch", "'elsewhere/nosuch' does not exist: give a record.json"),
        (f"show {ROOT}/reports/default/runs.tar.xz/nosuch", "runs.tar.xz/nosuch' holds no record"),
        ("estimate --world-size 12", "harness: 12 ranks do not fill nodes of 8 GPUs"),
        ("estimate --gpu H100-88", "harness: GPU 'H100-88' is unknown. Did you mean 'H100-80'"),
        ("estimate --fabric NDR-4000 --gpu H200",
         "harness: fabric 'NDR-4000' is unknown. Did you mean 'NDR400'"),
        ("estimate --backends zero5", "harness: backend 'zero5' is unknown"),
        ("estimate --hardware none.yaml", "No such file or directory; give a mapping with"),
        ("estimate --model gpt2 --backends fsdp-hybrid:shard_size=3", "harness: fsdp-hybrid:shard_size=3 "
         "cannot run on 8 ranks: shard_size 3 does not divide the world size 8"),
        ("estimate --set model.name=none/such", "harness: model 'none/such' is neither in the catalogue"),
        ("settings --write .", "harness: '.': Is a directory"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "train.sh").write_text("# in segments")
    os.mkfifo(tmp_path / "pipe")
    assert said.format(folder=tmp_path) in refused(tmp_path, *shlex.split(words))
    assert not list(tmp_path.glob("report*"))


@pytest.mark.parametrize("command", ["run", "compare"])
def test_runs_folder_below_a_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    what = ["--backend", "ddp"] if command == "run" else ["--backends", "ddp"]
    line = refused(tmp_path, command, *what, "--runs", "file/runs")
    assert "runs folder 'file/runs' cannot be written" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            "run --backend ddp --set data.sequence_length=1024",
            "longer than the model's context",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "compare --backends ddp,zero1 --nproc 2 --set 'model.config={model_type: bert}'",
            "not a causal",
            marks=pytest.mark.exhaustive,
        ),
        ("report none -o report.md", "'none' does not exist"),
    ],
)
def test_a_process_of_its_own_writes_one_line_too(tmp_path: Path, arguments: str, said: str) -> None:
    """Whatever its fork server and its libraries would write beside it."""
    words = shlex.split(arguments)
    assert said in refused(tmp_path, *words, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    "words",
    ["list --runs nosuch", "show --runs nosuch", "verify nosuch.md", "report nosuch -o x.md",
     "explain nosuch", "diagnose nosuch other", "compare --backends nosuch", "run --backend nosuch",
     "settings nosuch", "estimate --gpu nosuch", "clean --runs nosuch"],
)  # fmt: skip
@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}])
def test_an_error_is_shown_whatever_rank_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(command_line, "environment", lambda: {**environment(), **variables})
    assert "nosuch" in refused(tmp_path, *words.split())


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(36, "File name too long", "x" * 5000), OSError(28, "No space left")]
)
def test_what_the_machine_refuses_is_one_short_line(error: Exception) -> None:
    @click.command()
    @common
    def refused() -> int:
        raise error

    done = CliRunner().invoke(refused)
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert len(done.output) < 3200
    assert "unexpected" not in done.output


@pytest.mark.parametrize("words", ["--help", "--version", "compare --help"])
def test_help_on_a_full_disk_is_one_line(words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "harness", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "harness: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_an_interrupt_while_a_command_is_imported_ends_it_as_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    done = CliRunner().invoke(cli.harness, ["list"])
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "words", ["list RUNS EXTRA", "list --EXTRA", "EXTRA", "show run EXTRA", "slurm EXTRA"]
)
def test_long_words_are_quoted_in_part(words: str) -> None:
    done = CliRunner().invoke(cli.harness, words.replace("EXTRA", "x" * 5000).split())
    assert done.exit_code == 2
    assert "characters left out" in done.stderr
    assert max(map(len, done.stderr.splitlines())) < MOST_MESSAGE_CHARACTERS + 100


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = harness_process("--debug", "run", "--backend", "zerro3", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "backend 'zerro3' is unknown" in done.stderr


def test_files_in_the_folder_are_not_overwritten(tmp_path: Path) -> None:
    words = "program --backend ddp --set training.steps=3"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.py").write_bytes(b"mine")
    done = harness("export", *words.split(), "-o", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "'out' exists and is not empty" in done.stderr
    assert (tmp_path / "out" / "train.py").read_bytes() == b"mine"


HEAVY = {"numpy", "pydantic", "psutil", "tabulate", "torch", "tqdm", "transformers", "yaml"}
HELP = """
import sys, harness.cli
try:
    harness.cli.harness(["--help"])
except SystemExit:
    print("loaded:", *sys.modules)
"""
MOST_MODULES_OF_THE_HARNESS = 6
"""The package, its import path, its command line, what says that it works, what launchers tell."""


def test_help_loads_no_command_and_no_library_but_click() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("loaded: ")
    assert all(f"\n  {name} " in text for name in COMMANDS)
    loaded = modules.split()
    assert not HEAVY & set(loaded)
    assert len([name for name in loaded if name.split(".")[0] == "harness"]) <= MOST_MODULES_OF_THE_HARNESS


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_listed_with_the_first_sentence_of_its_help(name: str) -> None:
    command = cli.harness.get_command(click.Context(cli.harness), name)
    assert command.name == name
    assert command.get_short_help_str(limit=200) == COMMANDS[name]


def test_a_mistyped_command_is_corrected() -> None:
    done = CliRunner().invoke(cli.harness, ["rnu"])
    assert done.exit_code == 2
    assert "Did you mean 'run'?" in done.stderr


@pytest.mark.parametrize("gone", INSTEAD)
def test_what_is_gone_has_one_line_that_says_what_to_use(gone: str) -> None:
    words = ["compare", gone] if gone.startswith("--") else gone.split()
    words = ["slurm", "submit", "--poll-seconds"] if gone == "--poll-seconds" else words
    done = CliRunner().invoke(cli.harness, words, prog_name="harness")
    assert done.exit_code == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    assert line.endswith(f": use {INSTEAD[gone]}.")


def test_an_option_of_another_command_or_tool_is_named() -> None:
    for words, said in {
        "run --gpus 2": "the number of ranks is --nproc",
        "compare --bundle x": "it is an option of doctor",
        "compare --backend ddp": "use --backends",
        "run --backends ddp": "use --backend",
        "recommend --tokens 1B": "use --set training.steps=N",
        "compare --num_gpus 2": "the number of ranks is --nproc",
        "compare --use_fsdp": "use --backends: `harness backends` lists",
        "report --compare": "`harness compare` is a command",
        "compare --quite": "perhaps --quiet.",
        "compare --zzz 2": "No such option '--zzz'.",
        "submit jobs": "No such command 'submit': use `harness slurm submit`.",
        "run script.py": "use --backend script.py (a script: `harness compare -- script.py`).",
        "recommend --seq-len 4096": "use --set data.sequence_length=VALUE",
        "compare --lr 1e-3": "use --set optimizer.learning_rate=VALUE",
        "compare --batch-size 8": "use --set training.global_batch_size=VALUE or ",
        "estimate --price 2": "use --set compare.price_per_gpu_hour=VALUE",
        "estimate --precision bf16": "use --set training.precision=VALUE",
        "recommend --model llama-3.1-8b --gpu A100-40": "Missing option '--world-size' / '--gpus': for ",
        "diagnose r2": "Missing argument 'SECOND': for example harness diagnose runs/RUN_A runs/RUN_B.",
        "backends dpp": "extra argument (dpp): for example harness backends --json.",
        "labs list x": "extra argument (x): for example harness labs list.",
        "show a b": "extra argument (b): for example harness show runs/RUN.",
        "list --report x": "use `harness report RUNS -o FILE`.",
        "export r2": "No such command 'r2': for example harness export program",
        "run ddp": "use --backend ddp (a script: ",
        "run --stage 3": "use --backend: `harness backends` lists",
        "estimate --strategy zero3": "use --backends: ",
        "run --repeats 3": "it is an option of compare",
        "observe --nproc 2 -- a.py": "the command after `--` decides (torchrun --nproc-per-node N)",
        "observe --lr 2 -- a.py": "the command after `--` decides.",
        "observe --warmup-steps 2 -- a.py": "use --set measure.warmup_steps=VALUE",
        "run --backend ddp --model net.py": "give --set model.factory=net.py:CLASS",
        "estimate --model net.py:TinyLM": "give --set model.factory=net.py:TinyLM",
        "slurm submit jobs --qos high": "it is an option of slurm render.",
        "fabric --world-size 2": "the number of ranks is --nproc",
        "run --nproc two": "Invalid value for '--nproc': 'two'; give a whole number, 1 or more.",
        "fabric --nproc 1": "1; give a whole number, 2 or more.",
        "compare --max-minutes 1h": "'1h'; give a number of minutes above 0.",
        "clean --older-than 30": "`find RUNS -maxdepth 1 -mtime +DAYS`",
        "compare --output r.md": "use --report FILE",
        "compare --data my.txt": "use --set data.source=text --set data.path=FILE",
        "estimate --parameters 1.3B": "use --model NAME",
        "export tracking runs": "Missing option '--to'. Choose from: tensorboard, mlflow, wandb",
    }.items():
        assert said in CliRunner().invoke(cli.harness, words.split(), prog_name="harness").stderr
    assert CliRunner().invoke(cli.harness, ["slurm"], prog_name="harness").stderr.count("Usage: ") == 1


def every_command(group: click.Group = cli.harness, words: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield f"{words}{name}", command
            yield from every_command(command, f"{words}{name} ")
        elif not command.hidden:
            yield f"{words}{name}", command


MEANINGS = {
    "--model": "Name or hub id of the catalogue, folder with config.json, or its file",
    "--backends": "Comma-separated names with their options",
    "--nproc": "Ranks on (this machine|each node)",
    "--set": "Override a setting",
    "--runs": "Folder of the records",
    "--output": "(New f|F)(older|ile)( for| of| to)",
    "--json": "Print one JSON document on standard output",
    "--config": "YAML file, or @NAME",
}
"""With which the help of an option begins wherever it is."""


def test_an_option_means_the_same_in_every_command() -> None:
    shorts = {"-o": "--output", "-q": "--quiet"}
    for words, command in every_command():
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, (words, option.name)
                for name in MEANINGS.keys() & set(option.opts):
                    assert re.match(MEANINGS[name], option.help or ""), (words, name, option.help)
                for short, long in shorts.items():
                    assert (short in option.opts) == (long in option.opts), (words, option.opts)


def test_plans_take_their_number_of_ranks_by_either_name() -> None:
    named = {
        words: {"--world-size", "--gpus"}.intersection(*[option.opts for option in options])
        for words, command in every_command()
        if (options := [one for one in command.params if {"--world-size", "--gpus"} & {*one.opts}])
    }
    both = {"--world-size", "--gpus"}
    assert named == {"estimate": both, "recommend": both, "simulate": both}


def test_the_help_of_every_command_begins_with_an_example_that_it_takes() -> None:
    for words, command in every_command():
        shown = CliRunner().invoke(cli.harness, [*words.split(), "--help"]).stdout
        example = EXAMPLES[words]
        assert shown.splitlines()[2] == f"  $ {example}", words
        given = shlex.split(example)[1 + len(words.split()) :]
        command.make_context(words, given)  # raises where an option is unknown or a required one missing
    assert len(EXAMPLES) == 1 + sum(1 for _ in every_command())
    shown = CliRunner().invoke(cli.harness, ["--help"]).stdout
    assert shown.splitlines()[2] == f"  $ {EXAMPLES['harness']}"


RECORDS = ROOT / "reports" / "traps" / "1-rank"
BLOCKED = (
    "torch", "transformers", "deepspeed", "accelerate", "datasets", "peft", "torchmetrics", "torchao",
    "bitsandbytes", "safetensors", "tokenizers", "huggingface_hub", "lightning", "pandas", "matplotlib",
)  # fmt: skip
SCRIPT = """
import importlib.metadata as metadata, json, sys
blocked = set(json.loads(sys.argv[1]))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
found = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower() in blocked:
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
from click.testing import CliRunner
from harness.cli import harness
results = []
for words in json.loads(sys.argv[2]):
    sys.argv = ["harness", *words]
    done = CliRunner().invoke(harness, words, prog_name="harness")
    said = done.stderr if isinstance(done.exception, SystemExit) else done.stderr + repr(done.exception)
    results.append([done.exit_code, done.stdout, said])
print(json.dumps([results, sorted(blocked & set(sys.modules))]))
"""
NEEDS = "not installed, which {} need: pip install 'sharding-harness[train]'\n"
WORKS = {
    "list": ["list", "--runs", str(RECORDS)],
    "report-md": ["report", str(RECORDS), "-o", "report.md"],
    "report-html": ["report", str(RECORDS), "-o", "report.html"],
    "report-csv": ["report", str(RECORDS), "-o", "report.csv"],
    "report-json": ["report", str(RECORDS), "-o", "report.json"],
    "verify": ["verify", "report.md"],
    "verify-html": ["verify", "report.html"],
    "backends": ["backends"],
    "backends-json": ["backends", "--json"],
    "settings": ["settings"],
    "explain": ["explain", "gradient-scale"],
    "settings-file": ["settings", "--write", "job.yaml"],
    "labs-list": ["labs", "list"],
    "labs-table": ["labs", "table", "fsdp-lecture"],
    "estimate": ["estimate", "--model", "Qwen3-8B", "--gpu", "A100-80", "--world-size", "8"],
    "estimate-default": ["estimate"],
    "recommend": [
        "recommend", "--model", "Qwen3-8B", "--gpu", "H100-80", "--gpus", "8", "--tokens-per-step", "65536",
    ],
    "dry-run": ["compare", "--config", "@default", "--dry-run"],
    "slurm-render": [
        "slurm", "render", "--site", str(ROOT / "slurm/sites/generic.yaml"), "--backends", "ddp,zero3",
        "--nodes", "1,2", "--nproc", "4", "--runs", "runs", "-o", "jobs",
    ],
    "clean": ["clean", "--runs", str(RECORDS)],
}  # fmt: skip
REFUSED = {
    "run": (["run", "--backend", "ddp"], "ranks"),
    "compare": (["compare", "--backends", "ddp", "--nproc", "2"], "ranks"),
    "doctor": (["doctor"], "ranks"),
    "fabric": (["fabric"], "ranks"),
    "simulate": (["simulate", "--backend", "ddp", "--world-size", "64"], "simulations"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By command: exit code, standard output and standard error; and what was loaded all the same."""
    folder = tmp_path_factory.mktemp("without-torch")
    commands = [*WORKS.values(), *(words for words, _ in REFUSED.values())]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(BLOCKED), json.dumps(commands)],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(folder / "cache")),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout.splitlines()[-1])
    return {**dict(zip([*WORKS, *REFUSED], answers, strict=True)), "loaded": loaded, "folder": folder}


@pytest.mark.parametrize("name", WORKS)
def test_a_command_without_ranks_needs_no_torch(name: str, results: dict[str, Any]) -> None:
    code, _, said = results[name]
    assert code == 0, said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_with_ranks_says_in_one_line_what_to_install(name: str, results: dict[str, Any]) -> None:
    code, _, said = results[name]
    assert code == 1
    assert said.endswith(NEEDS.format(REFUSED[name][1])), said
    assert said.startswith("harness: torch")


def test_nothing_of_them_was_loaded(results: dict[str, Any]) -> None:
    assert results["loaded"] == []
    assert "holds; 3 records unchanged" in results["verify"][1]
    rendered = results["slurm-render"][1] + results["slurm-render"][2]
    assert (
        "6 runs in 6 scripts, at most 4 node-hours for CPU ranks: gpus_per_node of site 'generic' is 0"
        in rendered
    )


def test_the_page_has_the_short_list_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=~]", entry)[0] for entry in project["dependencies"]]
    page = (ROOT / "docs" / "versions.md").read_text()
    between = page.split("<!-- short list -->")[1].split("<!-- end of short list -->")[0]
    assert re.findall(r"`([^`]+)`", between) == names
    extra = {re.split(r"[<>=~]", entry)[0] for entry in project["optional-dependencies"]["train"]}
    assert not extra & set(names)
    assert {"torch", "deepspeed", "transformers", "accelerate", "datasets", "peft"} <= extra
