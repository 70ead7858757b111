"""Fine-tunes a causal language model with DeepSpeed ZeRO.

deepspeed --num_gpus 2 deepspeed_zero.py --model FOLDER --text FILE, or torchrun --nproc-per-node 2
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from text_samples import Bytes
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
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bucket-size", type=int, default=500_000_000)
    parser.add_argument("--persistence", type=int, default=100_000)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": args.stage,
            "overlap_comm": False,
            "reduce_bucket_size": args.bucket_size,
            "stage3_param_persistence_threshold": args.persistence,
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = Bytes(args.text, args.length, labels=True)
    loader = DataLoader(
        data, args.batch_size, sampler=DistributedSampler(data, shuffle=False), drop_last=True
    )
    batches = iter(loader)
    for step in range(args.steps):
        for _ in range(args.accumulation):
            batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
