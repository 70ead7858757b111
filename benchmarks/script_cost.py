"""The timed steps of a script under `harness compare -- SCRIPT` over those of the script alone, under DDP.

The script times its own steps, those after WARM, and writes their seconds; both sides start it on two CPU
ranks, by turns. An idle machine is needed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import measuring

TARGET = 1.02
WARM, STEPS = 20, 80
"""Windows of the measurement end before the first; the script trains as many."""
SCRIPT = f"""
import json, sys, time
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator()
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=257, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
tokens = torch.randint(257, (4, 128), generator=torch.Generator().manual_seed(accelerator.process_index))
seconds = []
for step in range({STEPS}):
    begun = time.perf_counter()
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - begun)
if accelerator.is_main_process:
    open(sys.argv[1], "w").write(json.dumps(seconds[{WARM}:]))
accelerator.end_training()
"""


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="starts of each side")
    options = parser.parse_args()
    return measuring.present([measure(options.pairs)], as_json=options.json)


def measure(pairs: int = 7) -> measuring.Result:
    """Median over pairs of the ratio of median steps."""
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for number in range(pairs):
            sides = {"alone": _alone, "compared": _compared}
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            seconds = {side: sides[side](folder, folder / f"{side}-{number}.json") for side in order}
            ratios.append(seconds["compared"] / seconds["alone"])
    return measuring.Result(
        name="timed steps of a script under compare over the script alone", ratio=statistics.median(ratios),
        lowest=min(ratios), highest=max(ratios), target=TARGET, detail=f"{pairs} pairs, {STEPS - WARM} steps",
    )  # fmt: skip


def _alone(folder: Path, times: Path) -> float:
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    return _median([*launch, "--main_process_port", "0"], folder, times)


def _compared(folder: Path, times: Path) -> float:
    words = ["compare", "--backends", "ddp", "--nproc", "2", "--fresh", "--runs", str(folder / "runs")]
    windows = ["--set", f"measure.warmup_steps={WARM // 2}", "--set", "measure.probed_steps=2", "--"]
    return _median(["-m", "harness", *words, *windows], folder, times)


def _median(words: list[str], folder: Path, times: Path) -> float:
    os.environ["ACCELERATE_USE_CPU"] = "true"  # a row of a comparison is told by the harness
    measuring.run_quietly([sys.executable, *words, str(folder / "train.py"), str(times)])
    return statistics.median(json.loads(times.read_text()))


if __name__ == "__main__":
    sys.exit(main())
