"""What the scripts would download, made on this machine: small models, tokenizers and data of those names."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

WORDS = 100
METRIC = '''"""Accuracy, under the name that the script asks for."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        numbers = datasets.Value("int64")
        features = datasets.Features({"predictions": numbers, "references": numbers})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
'''
ABOUT_GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
---
"""


def text(folder: Path) -> None:
    """input.txt: characters for a language model of characters."""
    drawn = random.Random(0)
    lines = (" ".join(f"word{drawn.randrange(50)}" for _ in range(10)) for _ in range(40))
    folder.joinpath("input.txt").write_text("\n".join(lines))


def deepspeed_config(folder: Path) -> None:
    """ds_config.json: stage 2 in fp32 with torch's AdamW, which needs no compiler."""
    rates = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    document = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**rates, "torch_adam": True}},
        "zero_optimization": {
            "stage": 2, "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": 100000,
        },
    }  # fmt: skip
    folder.joinpath("ds_config.json").write_text(json.dumps(document))


def paraphrases(folder: Path) -> None:
    """`bert-base-cased`, the data set `nyu-mll/glue` and the metric `glue`, where the script looks first."""
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 5, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    tokenizer(folder / "bert-base-cased", pair=True)
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    data.joinpath("README.md").write_text(ABOUT_GLUE)
    drawn = random.Random(1)
    for name, count in (("train", 160), ("validation", 32)):
        rows = [
            {
                "idx": row,
                "label": drawn.randrange(2),
                "sentence1": words(drawn),
                "sentence2": words(drawn),
            }
            for row in range(count)
        ]
        data.joinpath(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder.joinpath("glue").mkdir()
    folder.joinpath("glue", "glue.py").write_text(METRIC)


def instructions(folder: Path) -> None:
    """`model` and data.json: a small Llama and instructions of equal length."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 5, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer(folder / "model", pair=False)
    drawn = random.Random(2)
    rows = [{"instruction": words(drawn), "input": "", "output": words(drawn)} for _ in range(160)]
    folder.joinpath("data.json").write_text(json.dumps(rows))


def digits(folder: Path) -> None:
    """MNIST in both places where the script looks for it: noise."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 60000), ("t10k", 10000)):
        drawn = random.Random(count)
        pixels = struct.pack(">IIII", 0x803, count, 28, 28) + drawn.randbytes(count * 28 * 28)
        raw.joinpath(f"{name}-images-idx3-ubyte").write_bytes(pixels)
        labels = struct.pack(">II", 0x801, count) + bytes(drawn.randrange(10) for _ in range(count))
        raw.joinpath(f"{name}-labels-idx1-ubyte").write_bytes(labels)
    folder.joinpath("source", "examples", "Datasets").symlink_to(folder / "data")


def words(drawn: random.Random) -> str:
    return " ".join(f"w{drawn.randrange(WORDS)}" for _ in range(8))


def tokenizer(folder: Path, *, pair: bool) -> None:
    """One token for each word that is known."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pair:
        made.post_processor = processors.BertProcessing(("[SEP]", known["[SEP]"]), ("[CLS]", known["[CLS]"]))
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip
