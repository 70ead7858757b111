"""Fine-tunes a causal language model with plain torch: DDP, or fully_shard (--fsdp), replicate, FSDP1.

torchrun --nproc-per-node 2 torch_ddp.py --model FOLDER --text FILE
"""

import argparse
import os

import torch
import torch.distributed as dist
from text_samples import Bytes
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
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
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--replicate", action="store_true")
    parser.add_argument("--fsdp1", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
    composable = args.fsdp or args.replicate
    if composable:
        wrap = fully_shard if args.fsdp else replicate
        for layer in model.model.layers:
            wrap(layer)
        wrap(model)
    elif args.fsdp1:
        policy = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )
    else:
        model = DistributedDataParallel(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    data = Bytes(args.text, args.length)
    loader = DataLoader(
        data, args.batch_size, sampler=DistributedSampler(data, shuffle=False), drop_last=True
    )
    batches = iter(loader)
    for step in range(args.steps):
        for micro in range(args.accumulation):
            last = micro == args.accumulation - 1
            if composable:
                model.set_requires_gradient_sync(last)
            elif not args.fsdp1:
                model.require_backward_grad_sync = last
            tokens = next(batches).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / args.accumulation).backward()
        if args.fsdp1:
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
    # Before its group: DDP's reducer, freed after it, was seen to wait for a thread of gloo's for ever.
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
