"""Processor time that a host takes to start a block's operators, and for the hooks of each library.

Usage: python -m benchmarks.host_cost     (a minute; one rank, one thread, an idle machine)

Blocks of a Llama whose matrices have 16 columns, so that their operators are launches and little else. Each
figure is the difference of 10 and 2 blocks, divided by eight; the least of several micro-steps. ZeRO-3 keeps
such small weights gathered, so that its hooks alone are measured.
`harness/plan/step_time.py` has the result in launches of an elementwise kernel: a bare block has 34
of them forward and 52 backward.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

KINDS = ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3 checkpointing", "single adapters checkpointing")
MICRO_STEPS, WARM = 32, 8


def seconds_of_blocks(kind: str, layers: int, options: set[str]) -> tuple[float, float]:
    """Of a forward and of a backward pass."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    if "adapters" in options:
        _adapt(model)
    if "checkpointing" in options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, backward, after = _engine(kind, model)
    tokens, found = torch.zeros(1, 8, dtype=torch.long), []
    for step in range(MICRO_STEPS):
        begun = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled="adapters" in options):
            loss = engine(input_ids=tokens).logits.float().sum()
        passed = time.process_time()
        backward(loss)
        ended = time.process_time()
        after()
        if step >= WARM and step % WARM != WARM - 1:  # not the micro-step that updates
            found.append((passed - begun, ended - passed))
    return min(one for one, _ in found), min(other for _, other in found)


def _adapt(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_dropout=0.05, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.bfloat16()
    model.enable_input_require_grads()


def _engine(kind: str, model: Any) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """What is called, what runs the backward pass, and what follows it."""
    engine = model
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        engine = DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in [*model.model.layers, model]:
            fully_shard(block)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        engine = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True)
    elif kind.startswith("zero"):
        engine = _deepspeed(model, int(kind[-1]))
        return engine, engine.backward, engine.step
    return engine, lambda loss: loss.backward(), engine.zero_grad


def _deepspeed(model: Any, stage: int) -> Any:
    import deepspeed
    import torch
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Compiling the shared-memory all-reduce would take half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": WARM, "gradient_clipping": 1.0,
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def main(words: str) -> None:
    """Measure one kind, in a process of its own."""
    import torch
    import torch.distributed as dist

    kind, *options = words.split()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    few, many = (seconds_of_blocks(kind, layers, set(options)) for layers in (2, 10))
    forward, backward = ((b - a) / 8 * 1000 for a, b in zip(few, many, strict=True))
    print(f"{words}: {forward:.3f} ms a block forward, {backward:.3f} ms backward", flush=True)
    os._exit(0)  # a process that used DeepSpeed over gloo sometimes crashes as it ends


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    PLACE = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    for words in KINDS:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.host_cost", words], env=os.environ | ONE | PLACE, check=True
        )
