"""Bare DeepSpeed ZeRO: torchrun --nproc-per-node 2 benchmarks/bare/zero.py --stage 3"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import job
import torch.distributed as dist
from deepspeed.utils import logger

BUCKET_ELEMENTS = 25 * 2**20 // 4


def configuration(stage: int, parameter_count: int) -> dict[str, Any]:
    """DeepSpeed's configuration with the buckets of DDP and nothing kept gathered."""
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        bucket = min(BUCKET_ELEMENTS, parameter_count)
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": job.GLOBAL_BATCH_SIZE // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.GRADIENT_CLIPPING,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }


def main() -> None:
    parser = job.parser()
    parser.add_argument("--stage", type=int, choices=range(4), required=True)
    options = parser.parse_args()
    logger.setLevel(logging.ERROR)
    # Compiling the shared-memory all-reduce would take half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    job.start()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = job.build_model(options)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = job.build_optimizer(model, job.decaying_names(model))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=job.build_schedule(optimizer, options.steps),
        config=configuration(options.stage, parameter_count),
    )
    batches = job.Batches()
    measured = job.Measured()
    for step in range(options.steps):
        begin = time.perf_counter()
        tokens = batches[step]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        measured.losses.append(loss.item())
        measured.seconds.append(time.perf_counter() - begin)
    job.finish(measured)


if __name__ == "__main__":
    main()
