"""Setup of ranks at size: host memory and seconds by strategy and loading, next to a bare script.

    python -m benchmarks.loading --geometry bloom-560m --ranks 2 fsdp:slices fsdp:full bare
    python -m benchmarks.loading --geometry llama-7b --ranks 4 --precision bf16 fsdp:slices

Each case starts fresh processes. Memory is anonymous (RssAnon), above that of a process that has imported
everything; the largest of the ranks counts. `bare` builds the model on every rank and shards it with FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 1e6
GEOMETRIES: dict[str, dict[str, Any]] = {
    "bloom-560m": {
        "model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880,
    },
    "llama-1.5b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "llama-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", help="bare, or backend:loading, such as zero3:slices")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="bloom-560m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--no-digest", action="store_true", help="leave the digest of the weights out")
    parser.add_argument("--scratch", type=Path, help="folder for files of weights; default: a temporary one")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    print("| case | ranks | held | largest unit | peak | allowed | peak / held | prepared | with digest |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in options.cases:
        print(row(case, run(case, options)), flush=True)


def run(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank of a case measured."""
    folder = Path(tempfile.mkdtemp(prefix="loading-", dir=options.scratch))
    command = [
        sys.executable, "-m", "benchmarks.loading", case, "--geometry", options.geometry, "--precision",
        options.precision, "--ranks", str(options.ranks), "--scratch", str(folder),
        *(["--no-digest"] if options.no_digest else []),
    ]  # fmt: skip
    environment = os.environ | {
        "WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    try:
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        ends = [rank.communicate() for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{case}: {''.join(error for _, error in ends)[-2000:]}")
        return [json.loads(out.splitlines()[-1]) for out, _ in ends]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def row(case: str, ranks: list[dict[str, Any]]) -> str:
    """Line of the table: the rank with the highest peak."""
    worst = max(ranks, key=lambda rank: rank["peak"])
    allowed = 1.25 * worst["held"] + worst["unit"]
    digest = "" if worst["with_digest"] is None else f"{max(r['with_digest'] for r in ranks):.1f} s"
    return (
        f"| {case} | {len(ranks)} | {worst['held'] / MB:,.0f} MB | {worst['unit'] / MB:,.0f} MB "
        f"| {worst['peak'] / MB:,.0f} MB | {allowed / MB:,.0f} MB | {worst['peak'] / worst['held']:.2f} "
        f"| {max(r['prepared'] for r in ranks):.1f} s | {digest} |"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """On a rank: bytes and seconds."""
    import torch
    import torch.distributed as dist

    from harness.rank.probes.memory import HostPeak
    from harness.rank.probes.weights import digest_weights
    from harness.rank.process.environment import return_freed_memory

    return_freed_memory()
    torch.set_num_threads(1)
    case = options.cases[0]
    rank, world_size = options.rank, options.ranks
    dist.init_process_group("gloo", f"file://{options.scratch}/store", rank=rank, world_size=world_size)
    prepare = bare(options) if case == "bare" else harness(options, case)
    dist.barrier()
    began = time.perf_counter()
    with HostPeak() as watched:
        engine, held, unit = prepare()
        dist.barrier()
    prepared = time.perf_counter() - began
    with_digest = None
    if engine is not None and not options.no_digest:
        digest_weights(engine)
        dist.barrier()
        with_digest = time.perf_counter() - began
    peak = (watched.peak_bytes or 0) - (watched.before_bytes or 0)
    return {"peak": peak, "held": held, "unit": unit, "prepared": prepared, "with_digest": with_digest}


def harness(options: argparse.Namespace, case: str) -> Any:
    """A function that prepares an engine as the harness does; imports are done when it returns."""
    from harness.backends import registry
    from harness.backends.base import SetupContext, World
    from harness.job.job import Job
    from harness.rank.data import DataFacts
    from harness.rank.initial_weights import JobModelSource
    from harness.rank.models.losses import summed_cross_entropy
    from harness.rank.models.model import model_config
    from harness.rank.models.optimizer import build_optimizer, update_groups
    from harness.rank.probes.memory import AllocatorProbe, live_bytes_by_kind

    name, _, loading = case.partition(":")
    config = GEOMETRIES[options.geometry]
    job = Job.model_validate(
        {"model": {"config": config}, "training": {"precision": options.precision},
         "data": {"sequence_length": 64}}
    )  # fmt: skip
    world = World(
        rank=options.rank, world_size=options.ranks, local_rank=options.rank,
        ranks_per_node=options.ranks, device="cpu",
    )  # fmt: skip
    backend = registry.create(name)
    if "deepspeed" in backend.packages:
        import deepspeed  # noqa: F401
    import_model(config["model_type"])
    updated: list[Any] = []
    units: list[int] = []

    def note(model: Any) -> None:
        updated.append(update_groups(model, job.optimizer))
        units.append(largest_unit(model))

    facts = DataFacts(vocabulary_size=config["vocab_size"])
    source = JobModelSource(
        job, model_config(job, facts), world, loading=loading or "slices",  # type: ignore[arg-type]
        folder=options.scratch / "weights", on_built=note,
    )  # fmt: skip
    context = SetupContext(
        world=world, precision=options.precision, gradient_clipping=1.0, micro_batch_size=1,
        accumulation_steps=1, preset="like-for-like", compute_loss=summed_cross_entropy,
    )  # fmt: skip

    def prepare() -> tuple[Any, int, int]:
        engine = backend.prepare(
            source, lambda named: build_optimizer(named, job.optimizer, updated[-1]), context
        )
        live = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe()).inside or {}
        return engine, sum(live.values()), units[-1]

    return prepare


def bare(options: argparse.Namespace) -> Any:
    """A function that does as a script without the harness: build, wrap each block, AdamW."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = dict(GEOMETRIES[options.geometry])
    model_type = values.pop("model_type")
    import_model(model_type)

    def prepare() -> tuple[None, int, int]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values), dtype=torch.float32)
        if options.precision == "bf16":
            model.to(torch.bfloat16)
        unit = largest_unit(model)
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module)
        fully_shard(model)
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        held = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[operator]
        return None, held, unit

    return prepare


def import_model(model_type: str) -> None:
    __import__(f"transformers.models.{model_type}.modeling_{model_type}")


def largest_unit(model: Any) -> int:
    """Bytes of the largest wrap unit: a block, or what lies outside of all blocks."""
    from harness.backends.model.blocks import transformer_blocks

    blocks = [
        sum(p.numel() * p.element_size() for p in block.parameters())
        for block in transformer_blocks(model).values()
    ]
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(*blocks, every - sum(blocks))


if __name__ == "__main__":
    main()
