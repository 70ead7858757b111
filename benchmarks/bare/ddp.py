"""Bare DistributedDataParallel: torchrun --nproc-per-node 2 benchmarks/bare/ddp.py"""

from __future__ import annotations

import time

import job
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    options = job.parser().parse_args()
    job.start()
    model = job.build_model(options)
    optimizer = job.build_optimizer(model, job.decaying_names(model))
    schedule = job.build_schedule(optimizer, options.steps)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = job.Batches()
    measured = job.Measured()
    for step in range(options.steps):
        begin = time.perf_counter()
        tokens = batches[step]
        loss = ddp(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(ddp.parameters(), job.GRADIENT_CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        measured.losses.append(loss.item())
        measured.seconds.append(time.perf_counter() - begin)
    job.finish(measured)


if __name__ == "__main__":
    main()
