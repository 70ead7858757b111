"""Fine-tunes a causal language model with a loop of Hugging Face Accelerate.

accelerate launch --num_processes 2 accelerate_loop.py --model FOLDER --text FILE
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from text_samples import Bytes
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mixed-precision", default="no")
    args = parser.parse_args()

    # On the CPU Accelerate takes each process under DeepSpeed for the only one, unless it is given a backend.
    on_cpu_ranks = not torch.cuda.is_available() and "LOCAL_RANK" in os.environ
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation, mixed_precision=args.mixed_precision,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu_ranks else [],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(Bytes(args.text, args.length, labels=True), args.batch_size, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if accelerator.is_main_process:
                print(f"step {step} loss {loss.item():.9f}", flush=True)
            step += 1
            if step == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
