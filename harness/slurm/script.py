"""Renders job scripts. Every value from a person is quoted, for sbatch or for the shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.slurm.directives import directive
from harness.slurm.site import Site

LAUNCH_PORTS = "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"


def render_script(
    site: Site,
    *,
    job_name: str,
    nodes: int,
    ranks_per_node: int,
    run_directories: Sequence[Path],
    log_folder: Path,
    array: bool,
) -> str:
    """The sbatch script of one run, or of an array of runs in equal worlds.

    Raises HarnessError for a value that no script can hold.
    """
    lines = ["#!/bin/bash", *_directives(site, job_name, nodes, ranks_per_node, log_folder, array)]
    if array:
        lines.append(directive("array", f"0-{len(run_directories) - 1}"))
    lines.append("")
    finish = '"${python[@]}" -m harness slurm finish "$run" --exit-code "$code"'
    lines += _which_run(run_directories, array)
    lines += [
        "# The ranks write down what they measured when they are told to end. Elements of an array are",
        "# named by the array's number: their own may be that number, which stands for all of them.",
        "ended=",
        "code=3",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "trap 'ended=time-limit; scancel --signal=TERM \"${job:-$SLURM_JOB_ID}\"' USR1",
        "trap 'ended=terminated' TERM",
        "",
        *_environment(site),
        "",
        f"python=({shlex.join([*site.container, site.python])})",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"export MASTER_ADDR=${{hosts[0]}} {LAUNCH_PORTS}",
        "",
        '"${python[@]}" -m harness slurm begin "$run" || exit',
        "# A signal interrupts `wait`; the step may still be there.",
        'await() { while wait "$1"; code=$?; kill -0 "$1" 2>/dev/null; do :; done; }',
        *_gate(site, nodes, ranks_per_node),
        'if [ -n "$ended" ]; then',
        f'  {finish} --ended "$ended"{_asked(site)}',
        "  exit 3",
        "fi",
        *_start(site, nodes, ranks_per_node),
        "await $!",
        finish + ' ${ended:+--ended "$ended"}',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _directives(
    site: Site, job_name: str, nodes: int, ranks_per_node: int, log_folder: Path, array: bool
) -> list[str]:
    gpus = f"{site.gpu_type}:{ranks_per_node}" if site.gpu_type else ranks_per_node
    given: list[tuple[str, str | int | None]] = [
        ("job-name", job_name),
        ("partition", site.partition),
        ("account", site.account),
        ("qos", site.qos),
        ("constraint", site.constraint),
        ("nodes", nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", site.cpus_per_rank * ranks_per_node),
        ("gpus-per-node", gpus if site.gpus_per_node else None),
        ("mem", site.memory_per_node),
        ("time", site.time_limit),
        ("signal", f"B:USR1@{site.notice_seconds}"),
        ("output", f"{str(log_folder).replace('%', '%%')}/{'%A_%a' if array else '%j'}.log"),
        ("open-mode", "append"),
    ]
    lines = [directive(option, value) for option, value in given if value is not None]
    lines.append(directive("requeue" if site.requeue else "no-requeue"))
    if site.exclusive:
        lines.append(directive("exclusive"))
    for option, value in site.options.items():
        if value is not False:
            lines.append(directive(option, None if value is True else value))
    return lines


def _which_run(run_directories: Sequence[Path], array: bool) -> list[str]:
    if not array:
        (only,) = run_directories
        return [f"run={_word(str(only))}"]
    listed = [f"  {_word(str(directory))}" for directory in run_directories]
    return ["runs=(", *listed, ")", "run=${runs[SLURM_ARRAY_TASK_ID]}"]


def _word(text: str) -> str:
    """One word of the shell on one line: sbatch obeys #PBS and #BSUB lines anywhere, within quotes too."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


def _environment(site: Site) -> list[str]:
    lines = []
    if site.modules:
        lines += ["module purge", *(f"module load {shlex.quote(name)} || exit" for name in site.modules)]
    if site.virtual_environment is not None:
        activate = f"{site.virtual_environment}/bin/activate"
        message = shlex.quote(f"virtual environment {site.virtual_environment} cannot be activated")
        lines += ["# shellcheck disable=SC1091"]
        lines += [f"source {shlex.quote(activate)} || {{ echo {message} >&2; exit 1; }}"]
    variables = {"OMP_NUM_THREADS": str(site.cpus_per_rank)}
    if site.interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    variables |= site.environment
    lines += [f"export {name}={_word(value)}" for name, value in variables.items()]
    return lines


def _start(site: Site, nodes: int, ranks_per_node: int) -> list[str]:
    """The step that runs one launcher per node; it ends in the background."""
    world = nodes * ranks_per_node
    srun = _srun(site, ranks_per_node)
    python = '  "${python[@]}" -m'
    address = '--{0}="$MASTER_ADDR" --{1}="$MASTER_PORT"'
    log = '>>"$run/launcher.log" 2>&1 &'
    # accelerate starts a lone process without the variables of a rank.
    match site.launcher if world > 1 else "torchrun":
        case "torchrun":
            return [
                *_torchrun(srun, nodes, ranks_per_node),
                f'  -m harness.worker "$run" {log}',
            ]
        case "accelerate":
            several = " --multi_gpu" if world > 1 else ""
            return [
                *_on_each_node(srun, "--machine_rank"),
                f"{python} accelerate.commands.launch --num_machines={nodes} \\",
                f"  --num_processes={world}{several} \\",
                f"  {address.format('main_process_ip', 'main_process_port')} --rdzv_backend=c10d \\",
                f"  --mixed_precision=no --dynamo_backend=no {log}",
            ]
        case "deepspeed":
            hosts = f'printf \'%s slots={ranks_per_node}\\n\' "${{hosts[@]}}" >"$run/hostfile"'
            return [
                hosts,
                *_on_each_node(srun, "--node_rank"),
                f'{python} deepspeed.launcher.runner --hostfile="$run/hostfile" --no_ssh --no_local_rank \\',
                f"  {address.format('master_addr', 'master_port')} {log}",
            ]


def _srun(site: Site, ranks_per_node: int) -> str:
    # Since 22.05 srun does not take over sbatch's --cpus-per-task, but it does sbatch's --export, and some
    # sites want NONE. After the first task has ended the others have --wait to fail in their own words.
    cpus = site.cpus_per_rank * ranks_per_node
    return f"srun --export=ALL --ntasks-per-node=1 --cpus-per-task={cpus} --wait=30"


def _torchrun(srun: str, nodes: int, ranks_per_node: int) -> list[str]:
    """Begin of a command that torchrun starts on every node."""
    return [
        srun + " \\",
        f'  "${{python[@]}}" -m torch.distributed.run --nnodes={nodes} --nproc-per-node={ranks_per_node} \\',
        '  --max-restarts=0 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\',
        '  --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \\',
    ]


def _asked(site: Site) -> str:
    """What `finish` is told of the gate."""
    return f" --require-busbw {shlex.quote(site.require_busbw)}" if site.require_busbw is not None else ""


def _gate(site: Site, nodes: int, ranks_per_node: int) -> list[str]:
    """Measure the network first, and note where it is too slow or unknown for the run to begin."""
    if site.require_busbw is None or nodes * ranks_per_node == 1:
        return []
    rate = shlex.quote(site.require_busbw)
    return [
        *_torchrun(_srun(site, ranks_per_node), nodes, ranks_per_node),
        f'  -m harness fabric --operations all_reduce --device {site.device} --output "$run" --silent \\',
        '  >>"$run/launcher.log" 2>&1 &',
        "await $!",
        f'"${{python[@]}}" -m harness slurm gate "$run" {rate}',
        "case $? in",
        "  0) ;;",
        "  3) ended=${ended:-slow-fabric} ;;",
        "  *) ended=${ended:-fabric-failed} ;;",
        "esac",
    ]


def _on_each_node(srun: str, rank_option: str) -> list[str]:
    """Begin of a command that names the rank of its node, which only a shell on that node knows."""
    ending = f'{rank_option}="$SLURM_PROCID" --module harness.worker "$0"'
    return [
        "# shellcheck disable=SC2016",
        f"{srun} \\",
        f'  bash -c \'exec "$@" {ending}\' "$run" \\',
    ]
