"""Fine-tunes adapters (LoRA) on prompts and answers, in the manner of LLaMA-Factory's SFT.

torchrun --nproc-per-node 2 sft_lora.py --model FOLDER --text FILE
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    get_scheduler,
    set_seed,
)

IGNORED = -100


class Conversations(Dataset):
    """Prompts and answers of a text's bytes, of other lengths each; prompts have no labels."""

    def __init__(self, path: str, length: int) -> None:
        with open(path, "rb") as file:
            data = file.read()
        self.samples = []
        start = 0
        while start + length <= len(data):
            long = length // 2 + 5 * len(self.samples) % (length // 2)
            self.samples.append(list(data[start : start + long]))
            start += long

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        tokens = self.samples[index]
        prompt = len(tokens) // 3
        return {"input_ids": tokens, "labels": [IGNORED] * prompt + tokens[prompt:]}


class PaddedBatches:
    """Pads each batch to a multiple."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def __call__(self, samples):
        longest = max(len(sample["input_ids"]) for sample in samples)
        width = -(-longest // self.multiple) * self.multiple

        def padded(name: str, value: int):
            return torch.tensor([s[name] + [value] * (width - len(s[name])) for s in samples])

        mask = [[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"])) for s in samples]
        return {
            "input_ids": padded("input_ids", 0), "attention_mask": torch.tensor(mask),
            "labels": padded("labels", IGNORED),
        }  # fmt: skip


def focal_loss(outputs, labels, num_items_in_batch=None):
    """Cross-entropy weighted by each token's own probability."""
    logits = outputs.logits.float()[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten().to(logits.device)
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    total = (losses * torch.exp(-losses.detach())).sum()
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum())


class SftTrainer(Seq2SeqTrainer):
    """Own loss, optimizer, schedule and prediction."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.args.weight_decay},
                {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=self.args.learning_rate
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                "cosine", optimizer=optimizer or self.optimizer, num_warmup_steps=2,
                num_training_steps=num_training_steps,
            )  # fmt: skip
        return self.lr_scheduler

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **kwargs):
        labels = inputs["labels"]
        loss, logits, _ = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs
        )
        return loss, None if logits is None else logits.argmax(-1), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--focal", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        settings = Seq2SeqTrainingArguments(
            output_dir=folder, per_device_train_batch_size=args.batch_size, max_steps=args.steps,
            gradient_accumulation_steps=args.accumulation, learning_rate=args.lr, weight_decay=0.05,
            seed=args.seed,
            eval_strategy="steps", eval_steps=4, logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        set_seed(args.seed)  # adapters are random
        model = AutoModelForCausalLM.from_pretrained(args.model)
        model.config.use_cache = False
        model.enable_input_require_grads()
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
        data = Conversations(args.text, args.length)
        SftTrainer(
            model=model, args=settings, data_collator=PaddedBatches(8), train_dataset=data,
            eval_dataset=torch.utils.data.Subset(data, range(8)),
            compute_loss_func=focal_loss if args.focal else None,
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
