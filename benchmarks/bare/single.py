"""Bare loop of one process: torchrun --nproc-per-node 1 benchmarks/bare/single.py"""

from __future__ import annotations

import time

import job
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    options = job.parser().parse_args()
    job.start()
    model = job.build_model(options)
    optimizer = job.build_optimizer(model, job.decaying_names(model))
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
