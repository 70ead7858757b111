"""Job scripts: as a reviewer reads them, as shellcheck does, and with hostile values as bash runs them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.slurm.matrix import Site, directive, render_script
from tests.patience import SECONDS

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
HOSTILE = (
    "größe ✓",
    "x" * 200,
    "two words",
    "it's",
    'say "hi"',
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED #",
    "back\\slash",
    "a$HOME&b|c>d",
    "--option",
    "*",
)
SITES = {
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
SCRIPTS = [(name, array) for name in SITES for array in (False, True)]


def script(site: Site, *, array: bool = False, runs: list[str] | None = None, name: str = "harness") -> str:
    folders = runs or (["/runs/a", "/runs/b"] if array else ["/runs/a"])
    return render_script(
        site, job_name=name, nodes=2, ranks_per_node=4, run_directories=[Path(folder) for folder in folders],
        log_folder=Path("/jobs/50%"), array=array,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "array"), SCRIPTS)
def test_script_is_the_golden_one(name: str, array: bool, update_golden: bool) -> None:
    golden = GOLDEN / f"{name}{'-array' if array else ''}.sbatch"
    text = script(SITES[name], array=array)
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_one_rank_has_a_time_limit_of_its_own() -> None:
    def limit(site: Site, ranks: int) -> str:
        text = render_script(
            site, job_name="a", nodes=1, ranks_per_node=ranks, run_directories=[Path("/runs/a")],
            log_folder=Path("/jobs"), array=False,
        )  # fmt: skip
        return next(line for line in text.splitlines() if line.startswith("#SBATCH --time"))

    longer = Site(name="a", time_limit="10:00", one_rank_time_limit="40:00")
    assert [limit(longer, ranks) for ranks in (1, 2)] == ["#SBATCH --time=40:00", "#SBATCH --time=10:00"]
    assert limit(Site(name="a", time_limit="10:00"), 1) == "#SBATCH --time=10:00"


@pytest.mark.parametrize(("name", "array"), SCRIPTS)
def test_script_passes_bash_and_shellcheck(name: str, array: bool, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(SITES[name], array=array))
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


def test_an_open_gate_lets_the_run_begin(tmp_path: Path) -> None:
    assert ended_at_the_gate(tmp_path, judged=0) == (0, ["--exit-code", "0"])


@pytest.mark.parametrize(
    ("judged", "test", "ended"),
    [
        (3, "exit 0", ["0", "slow-fabric"]),
        (1, "exit 5", ["5", "fabric-failed"]),
        (1, "kill -USR1 $PPID; sleep 0.5; exit 5", ["5", "time-limit"]),
        (1, "kill -TERM $PPID; sleep 0.5; exit 143", ["143", "terminated"]),
        (0, "kill -TERM $PPID; sleep 0.5; exit 0", ["0", "terminated"]),
    ],
)
def test_a_run_that_is_not_begun_says_why(judged: int, test: str, ended: list[str], tmp_path: Path) -> None:
    code, words = ended_at_the_gate(tmp_path, judged=judged, test=test)
    assert code == 3
    assert words == ["--exit-code", ended[0], "--ended", ended[1], "--require-busbw", "5GB/s"]


def test_a_module_that_is_not_there_ends_the_script(tmp_path: Path) -> None:
    text = script(Site(name="x", modules=["missing"]), runs=[str(tmp_path)])
    fake = f'module() {{ [ "$1" = purge ]; }}\n{text}'
    done = subprocess.run(["bash", "-c", fake], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_virtual_environment_that_is_not_there_ends_the_script(tmp_path: Path) -> None:
    text = script(Site(name="x", virtual_environment=f"{tmp_path}/it's gone"), runs=[str(tmp_path)])
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"virtual environment {tmp_path}/it's gone cannot be activated"


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


def test_a_lone_rank_needs_no_launcher_but_torchrun() -> None:
    site = Site(name="x", launcher="accelerate")
    text = render_script(
        site, job_name="a", nodes=1, ranks_per_node=1, run_directories=[Path("/a")], log_folder=Path("/b"),
        array=False,
    )  # fmt: skip
    assert "torch.distributed.run" in text


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\u2028"])
def test_a_directive_refuses_what_ends_its_line(character: str) -> None:
    with pytest.raises(HarnessError, match="control character"):
        directive("job-name", f"a{character}touch PWNED")


def test_a_directive_is_one_comment_of_the_shell() -> None:
    for value in HOSTILE:
        line = directive("job-name", value)
        assert line.startswith("#SBATCH --job-name=")
        assert "\n" not in line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"gpu_type": "a100"}, "#SBATCH --gpus-per-node=a100:2"),
        ({"gpu_option": "gres"}, "#SBATCH --gres=gpu:2"),
        ({"gpu_option": "gres", "gpu_type": "a100"}, "#SBATCH --gres=gpu:a100:2"),
    ],
)
def test_gpus_are_asked_for_as_the_site_takes_them(tmp_path: Path, values: dict[str, str], line: str) -> None:
    site = Site.model_validate({"name": "test", "gpus_per_node": 4} | values)
    script = render_script(
        site, job_name="job", nodes=1, ranks_per_node=2, run_directories=[tmp_path / "run"],
        log_folder=tmp_path, array=False,
    )  # fmt: skip
    asked = [text for text in script.splitlines() if "gpus-per-node=" in text or "--gres=" in text]
    assert asked == [line]
