"""What the oracle replays: one line of arguments for each output. `{NAME}` is a folder of frozen records."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ARCHIVES = {
    "-".join(path.relative_to(ROOT / "reports").parts[:-1]): path
    for path in sorted((ROOT / "reports").rglob("runs.tar.xz"))
} | {"axes": Path(__file__).with_name("axes.tar.xz")}
"""Published records of every strategy, clean and with each injected fault; `axes`: one run a setting."""

OF_RECORDS = (
    "report {ARCHIVE} -o {OUT}/report.md", "report {ARCHIVE} -o {OUT}/report.html",
    "report {ARCHIVE} -o {OUT}/report.json", "report {ARCHIVE} -o {OUT}/report.csv",
    "list --runs {ARCHIVE} --json", "list --runs {ARCHIVE} --wide",
)  # fmt: skip
OF_A_RUN = ("show {RUN} --json", "show {RUN}")
MODELS = ("llama-3.1-8b", "gpt2", "bloom-560m", "mixtral-8x7b", "qwen2.5-7b", "llama-3.1-70b")
PLANS = (
    *(f"estimate --model {model} --world-size 1,8 --gpu A100-80 --json" for model in MODELS),
    "estimate --model llama-3.1-8b --world-size 8,64 --gpu H100-80 --fabric NDR400 --details",
    "estimate --model llama-3.1-8b --backends all --world-size 16 --gpu H100-80 --json",
    "estimate --model llama-3.1-8b --gpu A100-40 --set adapter.kind=lora --json",
    "estimate --model llama-3.1-8b --gpu A100-40 --set adapter.kind=lora --set adapter.base_dtype=nf4 --json",
    "estimate --model llama-3.1-8b --gpu H100-80 --set training.activation_checkpointing=true --json",
    "estimate --model gpt2 --world-size 2 --set optimizer.kind=sgd --json",
    "estimate --world-size 2 --backends all --json",
    "estimate --config @bloom-560m --world-size 2,4 --json",
    "estimate --list models",
    "estimate --list hardware",
    "recommend --model llama-3.1-8b --gpus 8 --gpu A100-40 --json",
    "recommend --model llama-3.1-8b --gpus 64 --gpu H100-80 --fabric NDR400 --tokens-per-step 4M --json",
    "recommend --model llama-3.1-8b --gpus 1 --gpu A100-80 --set adapter.kind=lora --json",
    "recommend --model gpt2 --gpus 4 --gpu V100-32 --json",
    "recommend --model llama-3.1-70b --gpus 16 --gpu H100-80 --fabric NDR400 --json",
    "recommend --model mixtral-8x7b --gpus 16 --gpu H100-80 --fabric NDR400 --json",
    "fit --backend zero2 --nproc 2 --most-runs 1 --limit 1kB --json",
)
TRACES = "tests/harness/traces/gpu"
OTHERS = (
    "backends --json",
    "settings --json",
    "settings --schema",
    "explain --json",
    "labs list --json",
    *(
        f"compare --config {name} --dry-run --json"
        for name in ("@default", "@full-matrix", "@strong-scaling")
    ),
    "export accelerate --backend fsdp --nproc 2 -o {OUT}/program",
    "export deepspeed --backend zero2 --nproc 2 -o {OUT}/program",
    "export torchrun --backend fsdp1 --nproc 2 -o {OUT}/program",
    "slurm render --site @ibex --nodes 1,2 -o {OUT}/slurm",
    *(f"trace {TRACES}/{name}.json.gz --json" for name in ("a100-8ranks", "a100-resnet50-ddp-2ranks")),
    f"trace {TRACES}/128ranks-rank0.json.gz {TRACES}/128ranks-rank1.json.gz",
    "snapshot tests/harness/snapshots/stub.pickle --json",
    "run --backend zero4",
    "run --backend zero3:offload=tape",
    "run --set training.step=3",
    "compare --backends ddp,dpp --dry-run",
    "report {OUT}/nothing -o {OUT}/report.md",
    "show nothing --runs {OUT}",
)
