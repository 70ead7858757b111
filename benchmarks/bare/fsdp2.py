"""Bare fully_shard (FSDP2): torchrun --nproc-per-node 2 benchmarks/bare/fsdp2.py [--keep-gathered]"""

from __future__ import annotations

import time

import job
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    parser = job.parser()
    parser.add_argument("--keep-gathered", action="store_true", help="gather weights once a step")
    options = parser.parse_args()
    job.start()
    model = job.build_model(options)
    decaying = job.decaying_names(model)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=not options.keep_gathered)
    fully_shard(model, reshard_after_forward=not options.keep_gathered)
    optimizer = job.build_optimizer(model, decaying)
    schedule = job.build_schedule(optimizer, options.steps)
    batches = job.Batches()
    measured = job.Measured()
    for step in range(options.steps):
        begin = time.perf_counter()
        tokens = batches[step]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), job.GRADIENT_CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        measured.losses.append(loss.item())
        measured.seconds.append(time.perf_counter() - begin)
    job.finish(measured)


if __name__ == "__main__":
    main()
