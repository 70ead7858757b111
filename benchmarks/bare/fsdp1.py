"""Bare FullyShardedDataParallel (FSDP1): torchrun --nproc-per-node 2 benchmarks/bare/fsdp1.py"""

from __future__ import annotations

import time

import job
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def main() -> None:
    options = job.parser().parse_args()
    job.start()
    model = job.build_model(options)
    decaying = job.decaying_names(model)
    fsdp = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = job.build_optimizer(fsdp, decaying)
    schedule = job.build_schedule(optimizer, options.steps)
    batches = job.Batches()
    measured = job.Measured()
    for step in range(options.steps):
        begin = time.perf_counter()
        tokens = batches[step]
        loss = fsdp(input_ids=tokens, labels=tokens).loss
        loss.backward()
        fsdp.clip_grad_norm_(job.GRADIENT_CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        measured.losses.append(loss.item())
        measured.seconds.append(time.perf_counter() - begin)
    job.finish(measured)


if __name__ == "__main__":
    main()
