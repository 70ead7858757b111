"""The scripts of examples/observe and two of TRL, each under every strategy that this machine runs.

`python benchmarks/scripts_table.py FOLDER [SCRIPT...]` prints a table of `harness compare`; on the CUDA stub
(CONTRIBUTING.md) that of its strategies. FOLDER receives the job and the runs; a row that has a record is not
run again. TRL (`sft.py`, `dpo.py`) is taken from where Python finds it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.judge.facts import SENT

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "observe"
BUILD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.harness.rank.observing.test_scripts import make_job
make_job(Path.cwd())
"""
ARGUMENTS: tuple[str, ...] = ("--model", "model", "--text", "text.txt", "--length", "32", "--steps", "8")
CHAT = """
import json
from pathlib import Path
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
vocabulary = {letter: number for number, letter in enumerate(letters)}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained("chat")
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=257, pad_token_id=257,
)).save_pretrained("chat")
words = "the quick brown fox jumps over a lazy dog and runs home again".split()
text = lambda i, n: " ".join(words[(7 * i + k * (i % 5 + 1)) % len(words)] for k in range(n))
for name in ("sft", "dpo"):
    samples = [
        {"text": text(i, 9)} if name == "sft"
        else {"prompt": text(i, 4) + " ", "chosen": text(i + 1, 5), "rejected": text(i + 2, 4)}
        for i in range(96)
    ]
    Path(name).mkdir(exist_ok=True)
    Path(name, "train.jsonl").write_text("".join(json.dumps(sample) + "\\n" for sample in samples))
"""
TRL = ("sft.py", "dpo.py")
OF_TRL = (
    "--model_name_or_path", "chat", "--max_length", "48", "--output_dir", "out", "--max_steps", "9",
    "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--report_to", "none",
    "--save_strategy", "no", "--bf16", "false", "--gradient_checkpointing", "false", "--use_cpu", "true",
    "--seed", "3", "--dtype", "float32", "--dataset_name",
)  # fmt: skip
STRATEGIES = {"cpu": "ddp,zero1,zero2,zero3,fsdp", "cuda": "ddp,fsdp,fsdp1,zero1,zero2,zero3"}
GIVEN = ("hf_trainer.py", "accelerate_loop.py", "sft_lora.py", "packed_yaml.py")
"""Those that take their strategy from Accelerate."""
THEIR_OWN = {
    "torch_ddp.py": {"ddp": "", "fsdp": "--fsdp", "fsdp1": "--fsdp1"},
    "lightning_module.py": {"ddp": ""},
    "deepspeed_zero.py": {f"zero{stage}": f"--stage {stage}" for stage in (1, 2, 3)},
}
"""Those that choose it, with their arguments by row."""
COLUMNS = (
    "script", "row", "sent, bytes per step and rank", "model states, bytes per rank", "parity",
    "largest difference of losses",
)  # fmt: skip


def compared(folder: Path, script: str, device: str) -> dict[str, Any]:
    """What `harness compare --json` says of a script's rows. Raises CalledProcessError."""
    path = str(EXAMPLES / script)
    arguments = ARGUMENTS
    if script in TRL:
        found = importlib.util.find_spec("trl")
        assert found, "install trl, or put it on PYTHONPATH"
        path = str(Path(str(found.origin)).parent / "scripts" / script)
        arguments = (*OF_TRL, Path(script).stem)
    if script in (*GIVEN, *TRL):
        words = ["--backends", STRATEGIES[device], "--nproc", "2", "--", path, *arguments]
    else:
        start = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {path}"
        words = []
        for row, more in THEIR_OWN[script].items():
            words += ["--script", f"{row}={start} {' '.join(ARGUMENTS)} {more}"]
    runs = ["--runs", f"{Path(script).stem}-{device}", "--set", "measure.cooldown_steps=1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", "compare", *runs, *words], cwd=folder, stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, check=True,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def lines(script: str, document: dict[str, Any]) -> list[list[Any]]:
    """A line of the table for each row; what did not run says why."""
    found = []
    for row in document["rows"]:
        amounts = [_amount(row[name], row[f"expected_{name}"]) for name in (SENT, "model_state_bytes")]
        if row["status"] != "ok":
            amounts = [f"{row['status']}: {row['reason']}", ""]
        found.append([script, row["backend"], *amounts, row["parity"], row["max_loss_difference"]])
    return found


def _amount(seen: float | None, expected: float | None) -> str:
    if seen is None or expected is None:
        return f"{seen or 'n/a'}, not judged"
    return f"{seen:,.0f}, equal" if seen == expected else f"{seen:,.0f}, expected {expected:,.0f}"


def main() -> None:
    folder, wanted = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True)
    if not (folder / "chat").exists() and {*TRL} & {*wanted}:
        subprocess.run([sys.executable, "-c", CHAT], cwd=folder, check=True)
    device = "cuda" if "CUDA_STUB" in os.environ else "cpu"
    rows = [
        line
        for script in (*GIVEN, *THEIR_OWN, *TRL)
        if script in (wanted or (*GIVEN, *THEIR_OWN))
        for line in lines(script, compared(folder, script, device))
    ]
    sys.stdout.write(tabulate(rows, headers=COLUMNS, tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
