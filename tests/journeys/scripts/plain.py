"""Trains what the examples train: --bare without a wrapper, --flat under FSDP1 without use_orig_params."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "observe"))
from text_samples import Bytes

data = Bytes("text.txt", 32)
sampler = None
model = AutoModelForCausalLM.from_pretrained("model")
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data, shuffle=False)
if "--flat" in sys.argv:
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
size = 4 if sampler else 8
for tokens, _ in zip(DataLoader(data, size, sampler=sampler, drop_last=True), range(8), strict=False):
    model(input_ids=tokens, labels=tokens).loss.backward()
    if "--flat" in sys.argv:
        model.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
