"""Trains on packed samples, by settings of a YAML file, in the manner of axolotl.

torchrun --nproc-per-node 2 packed_yaml.py --model FOLDER --text FILE; other settings: --config FILE
"""

import argparse
import tempfile

import torch
import yaml
from torch.utils.data import BatchSampler, Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

IGNORED = -100
SETTINGS = """
micro_batch_size: 1
gradient_accumulation_steps: 2
sample_packing: true
pad_to_sequence_len: true
learning_rate: 1.0e-3
lr_scheduler: cosine
warmup_steps: 2
adam_beta2: 0.95
weight_decay: 0.0
max_grad_norm: 1.0
"""


class Lines(Dataset):
    """Pieces of a text's bytes, of other lengths each."""

    def __init__(self, path: str, length: int) -> None:
        with open(path, "rb") as file:
            data = file.read()
        self.samples = []
        start = 0
        while start + length <= len(data):
            long = 6 + 7 * len(self.samples) % (length // 2)
            self.samples.append(list(data[start : start + long]))
            start += long

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: list[int]):
        return [self.samples[index] for index in indices]


class PackedSampler(BatchSampler):
    """Batches of one sequence, which whole samples fill: longest first into the first that has room."""

    def __init__(self, sampler, lengths: list[int], length: int) -> None:
        super().__init__(sampler, batch_size=1, drop_last=True)
        self.lengths, self.length = lengths, length

    def _batches(self):
        packs: list[tuple[int, list[int]]] = []
        for index in sorted(self.sampler, key=lambda i: -self.lengths[i]):
            for at, (taken, pack) in enumerate(packs):
                if taken + self.lengths[index] <= self.length:
                    packs[at] = (taken + self.lengths[index], [*pack, index])
                    break
            else:
                packs.append((self.lengths[index], [index]))
        return [[pack] for _, pack in packs]

    def __iter__(self):
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())


class Packed:
    """One sequence of several samples, each with positions of its own."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __call__(self, batch):
        (samples,) = batch
        tokens = [token for sample in samples for token in sample]
        positions = [at for sample in samples for at in range(len(sample))]
        labels = [label for sample in samples for label in [IGNORED, *sample[1:]]]
        more = (self.length or len(tokens)) - len(tokens)
        return {
            "input_ids": torch.tensor([tokens + [0] * more]),
            "position_ids": torch.tensor([[*positions, *range(more)]]),
            "labels": torch.tensor([labels + [IGNORED] * more]),
        }


class PackedTrainer(Trainer):
    """Packs samples where the settings say so."""

    def __init__(self, *args, packing: bool, length: int, **kwargs) -> None:
        self.packing, self.length = packing, length
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self):
        if not self.packing:
            return super().get_train_dataloader()
        order = torch.utils.data.RandomSampler(
            self.train_dataset, generator=torch.Generator().manual_seed(self.args.seed)
        )
        lengths = [len(sample) for sample in self.train_dataset.samples]
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=PackedSampler(order, lengths, self.length),
            collate_fn=self.data_collator,
        )  # fmt: skip
        # Accelerate gives each rank every second batch.
        return self.accelerator.prepare_data_loader(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )


class CountTokens(TrainerCallback):
    """Prints the loss with the update's number, and stops on a loss that grows too far."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1} loss {logs['loss']}", flush=True)
        if logs and logs.get("loss", 0.0) > 100:
            control.should_training_stop = True
        return control


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--config")
    args = parser.parse_args()

    given = yaml.safe_load(SETTINGS)
    if args.config:
        with open(args.config) as file:
            given |= yaml.safe_load(file)
    model = AutoModelForCausalLM.from_pretrained(args.model, use_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=given["micro_batch_size"], max_steps=args.steps,
            gradient_accumulation_steps=given["gradient_accumulation_steps"],
            learning_rate=given["learning_rate"], lr_scheduler_type=given["lr_scheduler"],
            warmup_steps=given["warmup_steps"], adam_beta2=given["adam_beta2"],
            weight_decay=given["weight_decay"], max_grad_norm=given["max_grad_norm"],
            remove_unused_columns=False, logging_steps=1, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        PackedTrainer(
            model=model, args=settings, train_dataset=Lines(args.text, args.length),
            data_collator=Packed(args.length if given["pad_to_sequence_len"] else None),
            packing=given["sample_packing"], length=args.length, callbacks=[CountTokens()],
        ).train()  # fmt: skip


if __name__ == "__main__":
    main()
