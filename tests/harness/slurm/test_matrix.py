"""From a matrix of cells to scripts and their runs."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import CompareSection, Experiment
from harness.slurm.client import time_seconds
from harness.slurm.matrix import (
    Matrix,
    Site,
    directive,
    load_site,
    on_site,
    plan_nodes,
    read_matrix,
    render_matrix,
    render_script,
    with_options,
    write_matrix,
)
from tests.harness.cli.command_line import harness, succeeds
from tests.patience import SECONDS

SITE = Site(name="test")
EXPERIMENT = Experiment(compare=CompareSection(noise_runs=False))


def rendered(folder: Path, *, arrays: bool, repeats: int = 1) -> tuple[Matrix, dict[str, str]]:
    cells = plan_nodes(EXPERIMENT, SITE, ["ddp", "fsdp-hybrid"], [1, 2], 2, repeats)
    return render_matrix(
        cells, EXPERIMENT, SITE, folder=folder, runs_folder=folder / "runs", job_name="h", arrays=arrays,
        command=["harness", "slurm", "render"],
    )  # fmt: skip


def test_cells_are_backends_times_nodes_and_one_reference(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=False)
    requests = [(run.nodes, run.request) for run in matrix.runs]
    assert [(r.backend, nodes, r.world_size, r.ranks_per_node) for nodes, r in requests] == [
        ("single", 1, 1, 1), ("ddp", 1, 2, 2), ("fsdp-hybrid", 1, 2, 2), ("ddp", 2, 4, 2),
        ("fsdp-hybrid", 2, 4, 2),
    ]  # fmt: skip
    assert len(scripts) == 5


def test_equal_ranks_on_other_nodes_are_another_cell() -> None:
    (one,) = {c.key for c in plan_nodes(EXPERIMENT, SITE, ["ddp"], [1], 4, 1) if c.backend == "ddp"}
    (two,) = {c.key for c in plan_nodes(EXPERIMENT, SITE, ["ddp"], [2], 2, 1) if c.backend == "ddp"}
    other = Site(name="other")
    (three,) = {c.key for c in plan_nodes(EXPERIMENT, other, ["ddp"], [2], 2, 1) if c.backend == "ddp"}
    assert len({one, two, three}) == 3


def test_an_array_holds_the_cells_of_equal_worlds(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True)
    assert set(scripts) == {"array-1x1.sbatch", "array-1x2.sbatch", "array-2x2.sbatch"}
    assert "--array=0-1" in scripts["array-2x2.sbatch"]
    indices = [(r.script, r.array_index) for r in matrix.runs if r.nodes == 2]
    assert indices == [("array-2x2.sbatch", 0), ("array-2x2.sbatch", 1)]
    listed = [line.strip() for line in scripts["array-2x2.sbatch"].splitlines() if line.startswith("  /")]
    assert listed == [str(matrix.run_directory(r)) for r in matrix.runs if r.nodes == 2]


def test_an_array_is_no_longer_than_slurm_takes(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True, repeats=600)
    lengths = {name: text.count(f"{tmp_path}/runs/") for name, text in scripts.items()}
    assert lengths == {
        "array-1x1.sbatch": 600, "array-1x2.sbatch": 1000, "array-1x2-1.sbatch": 200,
        "array-2x2.sbatch": 1000, "array-2x2-1.sbatch": 200,
    }  # fmt: skip
    assert max(run.array_index or 0 for run in matrix.runs) == 999


@pytest.mark.parametrize(
    ("folder", "said"), [("a\nb", "control character"), ("a\\b", "backslash"), ("a\udc80", "not UTF-8")]
)
def test_a_folder_that_no_job_could_use_is_refused(tmp_path: Path, folder: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        rendered(tmp_path / folder, arrays=False)


def test_a_matrix_is_read_back_as_written(tmp_path: Path) -> None:
    matrix, scripts = rendered(tmp_path, arrays=True)
    write_matrix(tmp_path / "jobs", matrix, scripts)
    assert read_matrix(tmp_path / "jobs") == matrix
    with pytest.raises(HarnessError, match="holds a matrix already"):
        write_matrix(tmp_path / "jobs", matrix, scripts)


def test_a_folder_without_a_matrix_and_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="harness slurm render"):
        read_matrix(tmp_path)
    with pytest.raises(HarnessError, match="gpus_per_node 4; lower --nproc"):
        plan_nodes(EXPERIMENT, Site(name="x", gpus_per_node=4), ["ddp"], [1], 8, 1)


def test_turns_are_refused_since_a_job_runs_one_cell(tmp_path: Path) -> None:
    words = ["slurm", "render", "--site", "@generic", "--backends", "ddp", "-o", tmp_path / "jobs"]
    done = harness(*words, "--set", "compare.turns=3", cwd=tmp_path)
    assert done.returncode == 1
    assert "compare.turns is 3, but each job of Slurm runs one cell alone" in done.stderr
    assert not (tmp_path / "jobs").exists()
    done = succeeds(*words, "--set", "compare.turns=3", "--set", "compare.turns=null", cwd=tmp_path)


def calls_of_rendering(folder: Path, repeats: int) -> int:
    """Of Python's functions."""
    counted = itertools.count()
    sys.setprofile(lambda frame, event, argument: event == "call" and next(counted))
    try:
        matrix, scripts = rendered(folder, arrays=False, repeats=repeats)
        write_matrix(folder / "jobs", matrix, scripts)
    finally:
        sys.setprofile(None)
    assert len(scripts) == 5 * repeats
    return next(counted)


def test_ten_times_as_many_cells_take_ten_times_as_much_work(tmp_path: Path) -> None:
    rendered(tmp_path, arrays=False)  # what is read once
    assert calls_of_rendering(tmp_path / "many", 20) <= 10 * calls_of_rendering(tmp_path / "few", 2)


def test_names_of_jobs_hold_no_colon_and_no_equals_sign(tmp_path: Path) -> None:
    site = SITE.model_copy(update={"reservation": "course"})
    _, scripts = render_matrix(
        plan_nodes(EXPERIMENT, site, ["zero3:offload=cpu"], [1], 2, 1), EXPERIMENT, site, folder=tmp_path,
        runs_folder=tmp_path / "runs", job_name="h", arrays=False, command=["harness", "slurm", "render"],
    )  # fmt: skip
    lines = [text.splitlines() for text in scripts.values()]
    names = [line for script in lines for line in script if "--job-name=" in line]
    assert names[-1].startswith("#SBATCH --job-name=h-zero3_offload_cpu-1x2-")
    assert len({*names}) == len(scripts)
    assert all("#SBATCH --reservation=course" in script for script in lines)


def test_a_model_that_only_the_cluster_has_is_rendered_and_a_relative_path_is_not(tmp_path: Path) -> None:
    done = harness(
        "slurm", "render", "--site", "@generic", "--backends", "ddp", "--nodes", "1", "-o", tmp_path / "jobs",
        "--set", "model.name=/scratch/models/mine", "--set", "data.tokenizer=bytes", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, "model.name /scratch/models/mine is not on this machine" in done.stderr) == (
        0,
        True,
    )
    with pytest.raises(HarnessError, match="does not exist"):
        plan_nodes(
            load_experiment(None, ["data.source=text", "data.path=mine.txt"]), SITE, ["ddp"], [1], 2, 1
        )


GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
HOSTILE = (
    "größe ✓", "x" * 200, "two words", "it's", 'say "hi"', "$(touch PWNED)", "`touch PWNED`",
    "; touch PWNED #", "back\\slash", "a$HOME&b|c>d", "--option", "*",
)  # fmt: skip
RENDERED = {
    "cpu": Site(name="cpu", partition="batch", cpus_per_rank=4, interface="eth0"),
    "gpu": Site(
        name="gpu", partition="gpu", account="team", qos="short", constraint="a100|h100",
        time_limit="01:00:00", gpus_per_node=4, gpu_type="a100", memory_per_node="0", exclusive=True,
        requeue=False, require_busbw="5GB/s",
        modules=["cuda/12.6", "python/3.11"], virtual_environment="/sw/my env", cpus_per_rank=8,
        container=["apptainer", "exec", "--nv", "/sw/my image.sif"], python="python",
        environment={"NCCL_DEBUG": "WARN"}, options={"mail-type": "END", "contiguous": True, "hold": False},
    ),
    "accelerate": Site(name="accelerate", launcher="accelerate"),
    "deepspeed": Site(name="deepspeed", launcher="deepspeed"),
}  # fmt: skip
SCRIPTS = [(name, array) for name in RENDERED for array in (False, True)]


def script(
    site: Site, *, array: bool = False, runs: list[str] | None = None, name: str = "harness", nodes: int = 2,
    ranks: int = 4,
) -> str:  # fmt: skip
    folders = runs or (["/runs/a", "/runs/b"] if array else ["/runs/a"])
    return render_script(
        site, job_name=name, nodes=nodes, ranks_per_node=ranks, run_directories=list(map(Path, folders)),
        log_folder=Path("/jobs/50%"), array=array,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "array"), SCRIPTS)
def test_script_is_the_golden_one(name: str, array: bool, update_golden: bool) -> None:
    golden = GOLDEN / f"{name}{'-array' if array else ''}.sbatch"
    text = script(RENDERED[name], array=array)
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_one_rank_has_a_time_limit_of_its_own() -> None:
    def limit(site: Site, ranks: int) -> str:
        lines = script(site, nodes=1, ranks=ranks).splitlines()
        return next(line for line in lines if line.startswith("#SBATCH --time"))

    longer = Site(name="a", time_limit="10:00", one_rank_time_limit="40:00")
    assert [limit(longer, ranks) for ranks in (1, 2)] == ["#SBATCH --time=40:00", "#SBATCH --time=10:00"]
    assert limit(Site(name="a", time_limit="10:00"), 1) == "#SBATCH --time=10:00"


@pytest.mark.parametrize(
    ("memory", "settings", "ranks"),
    [
        ("0", {"exclusive": True}, 2), ("0", {"gpus_per_node": 4}, 4),
        ("120G", {"gpus_per_node": 4, "memory_per_node": "120G"}, 4),
        (None, {"gpus_per_node": 4}, 2), (None, {}, 4),
        (None, {"exclusive": True, "options": {"mem-per-cpu": "4G"}}, 4),
    ],
)  # fmt: skip
def test_a_run_that_has_nodes_to_itself_has_their_memory(
    memory: str | None, settings: dict[str, Any], ranks: int
) -> None:
    text = script(Site(name="a", **settings), ranks=ranks)
    assert re.findall("#SBATCH --mem=(.*)", text) == ([memory] if memory else [])


@pytest.mark.parametrize(("name", "array"), SCRIPTS)
def test_script_passes_bash_and_shellcheck(name: str, array: bool, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(RENDERED[name], array=array))
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    for command in (["bash", "-n"], [shellcheck]):
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def run_with_fakes(text: str, folder: Path, **variables: str) -> dict[str, list[list[str]]]:
    """Run a script with fakes of the cluster's commands on PATH; the words each was given, by call."""
    fakes = folder / "fakes"
    fakes.mkdir()
    for name in ("srun", "scancel", "module", "hostile python"):
        fake = fakes / name
        fake.write_text(
            f'#!/bin/bash\nprintf "%s\\0" "$@" $\'\\1\' >>"{folder}/{name}.calls"\n'
            f'printf "%s\\0" "${{HOSTILE-}}" >>"{folder}/{name}.variable"\n'
        )
    (fakes / "scontrol").write_text("#!/bin/bash\necho node1\necho node2\n")
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    path = folder / "script"
    path.write_text(text)
    subprocess.run(
        ["bash", path], cwd=folder, check=True, timeout=SECONDS,
        env={
            "PATH": f"{fakes}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7",
            "HOME": "/", **variables,
        },
    )  # fmt: skip
    calls = {}
    for file in folder.glob("*.calls"):
        chunks = file.read_text().split("\1\0")[:-1]
        calls[file.stem] = [chunk.split("\0")[:-1] for chunk in chunks]
    return calls


GATED = Site(name="x", python="python", require_busbw="5GB/s")


def ended_at_the_gate(folder: Path, *, judged: int, test: str = "exit 0") -> tuple[int, list[str]]:
    """Exit code of a gated script, and the words of `finish`, where `gate` exits with `judged`."""
    fakes = folder / "fakes"
    fakes.mkdir()
    (fakes / "srun").write_text(f'#!/bin/bash\ncase " $* " in *" fabric "*) {test} ;; esac\n')
    (fakes / "python").write_text(
        f'#!/bin/bash\ncase $4 in gate) exit {judged} ;; finish) echo "${{@:6}}" >"{folder}/finish" ;; esac\n'
    )
    (fakes / "scontrol").write_text("#!/bin/bash\necho node1\necho node2\n")
    (fakes / "scancel").write_text("#!/bin/bash\n")
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    path = folder / "script"
    path.write_text(script(GATED, runs=[str(folder)]))
    variables = {"PATH": f"{fakes}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", path], cwd=folder, check=False, timeout=SECONDS, env=variables)
    return done.returncode, (folder / "finish").read_text().split()


@pytest.mark.parametrize(
    ("judged", "test", "ended"),
    [
        (3, "exit 0", ["0", "slow-fabric"]),
        (1, "exit 5", ["5", "fabric-failed"]),
        (1, "kill -USR1 $PPID; sleep 0.5; exit 5", ["5", "time-limit"]),
        (1, "kill -TERM $PPID; sleep 0.5; exit 143", ["143", "terminated"]),
        (0, "kill -TERM $PPID; sleep 0.5; exit 0", ["0", "terminated"]),
        (0, "exit 0", None),
    ],
)
def test_a_run_that_is_not_begun_says_why(
    judged: int, test: str, ended: list[str] | None, tmp_path: Path
) -> None:
    begun = (0, ["--exit-code", "0"])
    why = ended and ["--exit-code", ended[0], "--ended", ended[1], "--require-busbw", "5GB/s"]
    assert ended_at_the_gate(tmp_path, judged=judged, test=test) == ((3, why) if why else begun)


@pytest.mark.parametrize(
    ("site", "before", "said"),
    [
        ({"modules": ["missing"]}, 'module() { [ "$1" = purge ]; }', []),
        ({"virtual_environment": "/no/it's gone"}, "",
         ["virtual environment /no/it's gone cannot be activated"]),
    ],
    ids=["module", "virtual environment"],
)  # fmt: skip
def test_what_a_site_names_and_is_not_there_ends_the_script(
    site: dict[str, Any], before: str, said: list[str], tmp_path: Path
) -> None:
    text = f"{before}\n{script(Site(name='x', **site), runs=[str(tmp_path)])}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, said)


@pytest.mark.parametrize(
    ("variables", "named"),
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0")],
)
def test_a_notice_while_modules_load_ends_the_steps_of_this_job_alone(
    variables: dict[str, str], named: str, tmp_path: Path
) -> None:
    """The last element of an array has the number of the array, which stands for all its elements."""
    text = script(
        Site(name="x", modules=["slow"], python="hostile python"),
        array=bool(variables), runs=[str(tmp_path / "run")],
    )  # fmt: skip
    fake = 'module() { [ "$1" = load ] && kill -USR1 $$; true; }\n' + text.replace("exit 3", "exit 0")
    calls = run_with_fakes(fake, tmp_path, **variables)
    assert calls["scancel"] == [["--signal=TERM", named]]
    ended = calls["hostile python"][-1]
    assert ended[3:] == ["finish", str(tmp_path / "run"), "--exit-code", "3", "--ended", "time-limit"]
    assert "srun" not in calls


@pytest.mark.parametrize(
    "value", [*HOSTILE, "two\nlines\ntouch PWNED", "it's\\n\n#PBS -q urgent\n$(touch PWNED)"]
)
@pytest.mark.parametrize("array", [False, True])
def test_hostile_values_reach_commands_word_for_word(value: str, array: bool, tmp_path: Path) -> None:
    one_line = value.replace("\n", " ")
    site = Site(
        name="x", partition=one_line, account=one_line, constraint=one_line, modules=[one_line],
        python="hostile python", environment={"HOSTILE": value}, options={"comment": one_line},
    )  # fmt: skip
    run = tmp_path / value
    run.mkdir()
    text = script(site, array=array, runs=[str(run)], name=one_line)
    assert not [line for line in text.splitlines() if line.startswith(("#PBS", "#BSUB"))]
    calls = run_with_fakes(text, tmp_path, SLURM_ARRAY_TASK_ID="0")
    assert calls["hostile python"][0] == ["-m", "harness", "slurm", "begin", str(run)]
    assert calls["hostile python"][1] == ["-m", "harness", "slurm", "finish", str(run), "--exit-code", "0"]
    assert calls["module"] == [["purge"], ["load", one_line]]
    assert calls["srun"][0][-3:] == ["-m", "harness.launch", str(run)]
    assert (tmp_path / "srun.variable").read_text() == value + "\0"
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_hostile_folder_passes_the_inner_shell_word_for_word(launcher: str, tmp_path: Path) -> None:
    run = tmp_path / "a'b\"$(touch PWNED)"
    run.mkdir()
    site = Site(name="x", launcher=launcher, python="hostile python")
    calls = run_with_fakes(script(site, runs=[str(run)]), tmp_path)
    words = calls["srun"][0]
    inner = words[words.index("bash") :]
    done = subprocess.run(
        [*inner[:2], inner[2].replace("exec", "printf '%s\\n'"), *inner[3:]],
        capture_output=True, text=True, check=True, cwd=tmp_path, env={"SLURM_PROCID": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-3:] == ["--module", "harness.launch", str(run)]
    assert "rank=1" in done.stdout
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize(
    ("gpus", "sizes", "asked"),
    [(4, [1, 4, 4, 4, 4], "at most 8.5 GPU-hours"), (0, [1, 4, 4], "at most 1.5 node-hours")],
)
def test_what_the_jobs_ask_for_is_told_in_hours(
    tmp_path: Path, gpus: int, sizes: list[int], asked: str
) -> None:
    """Half an hour each; on GPUs each backend runs with both kinds of kernels."""
    site = Site(name="x", gpus_per_node=gpus, time_limit="30:00")
    cells = plan_nodes(on_site(EXPERIMENT, site), site, ["ddp", "zero3"], [1], 4, 1)
    matrix, _ = render_matrix(
        cells, EXPERIMENT, site, folder=tmp_path, runs_folder=tmp_path / "runs", job_name="h", arrays=False,
        command=["harness"],
    )  # fmt: skip
    assert sorted(run.request.world_size for run in matrix.runs) == sizes
    assert matrix.most_asked == asked


def test_a_lone_rank_needs_no_launcher_but_torchrun() -> None:
    text = script(Site(name="x", launcher="accelerate"), nodes=1, ranks=1)
    assert "torch.distributed.run" in text


def test_a_directive_is_one_comment_of_the_shell_and_refuses_what_ends_its_line() -> None:
    for value in HOSTILE:
        line = directive("job-name", value)
        assert line.startswith("#SBATCH --job-name=")
        assert "\n" not in line
    for character in ("\n", "\r", "\0", "\x1b", "\u2028"):
        with pytest.raises(HarnessError, match="control character"):
            directive("job-name", f"a{character}touch PWNED")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"gpu_type": "a100"}, "#SBATCH --gpus-per-node=a100:2"),
        ({"gpu_option": "gres"}, "#SBATCH --gres=gpu:2"),
        ({"gpu_option": "gres", "gpu_type": "a100"}, "#SBATCH --gres=gpu:a100:2"),
    ],
)
def test_gpus_are_asked_for_as_the_site_takes_them(values: dict[str, str], line: str) -> None:
    site = Site.model_validate({"name": "test", "gpus_per_node": 4} | values)
    lines = script(site, nodes=1, ranks=2).splitlines()
    assert [text for text in lines if "gpus-per-node=" in text or "--gres=" in text] == [line]


SITES = Path(__file__).resolve().parents[3] / "slurm" / "sites"


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_sites_load(path: Path) -> None:
    assert load_site(path).name == path.stem


def test_leonardo_has_four_gpus_per_node_and_partitions_are_other_machines() -> None:
    site = load_site(SITES / "leonardo.yaml")
    assert (site.gpus_per_node, site.device, site.cpus_per_rank) == (4, "cuda", 8)
    assert site.machine != site.model_copy(update={"partition": "other"}).machine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partitio: b", "'partitio' is unknown"), ("partitio: b", "Did you mean 'partition'?"),
        ("name: null", "'name' was given None"),
        ('partition: "a\\nb"', "one line"),
        ('constraint: "a\\u2028b"', "one line"),
        ("time_limit: tomorrow", "must be a time"),
        ('time_limit: "1:00:00\\n"', "must be a time"),
        ('time_limit: "0"', "above 0"),
        ('time_limit: "0-00:00:00"', "above 0"),
        ('time_limit: "25:99:99"', "must be a time"),
        ('time_limit: "٣٠"', "must be a time"),
        ("memory_per_node: lots", "such as 120G"),
        ('time_limit: "1"', "notice_seconds is 60, which is not below the time limit 1"),
        ('time_limit: "10:00"\nnotice_seconds: 601', "notice_seconds is 601"),
        ('one_rank_time_limit: "1"', "not below the time limit 1"),
        ("environment: {SLURM_JOB_ID: x}", "SLURM_JOB_ID is Slurm's or the job script's own"),
        ("environment: {run: x}", "run is Slurm's"),
        ("environment: {MASTER_PORT: x}", "MASTER_PORT is Slurm's"),
        ('environment: {"A B": x}', "not the name of a variable"),
        ('environment: {"A": "x\\0y"}', "zero byte"),
        ('options: {"nice\\nid": 1}', "not a long option"),
        ("options: {time: 5}", "written by the harness"),
        ("options: {tim: 5}", "written by the harness"),
        ("options: {wait: true}", "could not follow the job"),
        ("options: {clusters: b}", "could not follow the job"),
        ("partition: a\noptions: {partition: b}", "given twice"),
        ('options: {comment: "a\\nb"}', "one line"),
        ("gpu_type: a100", "needs gpus_per_node"),
        ("launcher: mpirun", "torchrun"),
        ("require_busbw: fast", "is not a rate"),
    ],
)  # fmt: skip
def test_what_no_script_could_hold_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.yaml"
    with pytest.raises(HarnessError, match="cannot be read"):
        load_site(path)
    path.write_text(text if text.startswith("name: ") else f"name: a\n{text}\n")
    with pytest.raises(HarnessError, match=re.escape(said)):
        load_site(path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("01:00:00", 3600), ("2-0", 172800), ("1-02:03", 93780),
        ("1-02:03:04", 93784), ("tomorrow", None), ("1:00:00\n", None),
    ],
)  # fmt: skip
def test_times_are_read_as_slurm_does(text: str, seconds: int | None) -> None:
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("time", "said"), [("tomorrow", "must be a time"), ("00:01:00", "not below the time limit 00:01:00")]
)
def test_another_time_limit_is_refused_in_one_line(time: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said) as caught:
        with_options(Site(name="a"), {"time_limit": time, "qos": None})
    assert str(caught.value).startswith(f"--time {time}: ")
    assert "\n" not in str(caught.value)


def test_a_partition_an_account_and_a_qos_are_written_in_place_of_the_site_s(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("name: here\npartition: batch\nqos: normal\n")
    asked = ["slurm", "render", "--site", "site.yaml", "--backends", "ddp", "--nproc", "2", "--runs", "runs"]
    succeeds(*asked, "--partition", "debug", "--account", "k 1", cwd=tmp_path)
    scripts = [path.read_text().splitlines() for path in (tmp_path / "jobs").glob("*.sbatch")]
    assert scripts
    for script in scripts:
        wanted = ["#SBATCH --partition=debug", '#SBATCH --account="k 1"', "#SBATCH --qos=normal"]
        assert [
            line for line in script if line.startswith(("#SBATCH --p", "#SBATCH --ac", "#SBATCH --q"))
        ] == wanted
    with pytest.raises(HarnessError, match=r"^--account a --qos b: .*'qos' is given twice"):
        with_options(Site(name="a", options={"qos": "c"}), {"account": "a", "qos": "b"})
