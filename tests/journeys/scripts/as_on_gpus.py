"""Runs a script under an Accelerate that takes CPU ranks for GPUs: it then shards with FSDP, over gloo."""

import runpy
import sys

import torch
from accelerate.state import DistributedType, PartialState

state = PartialState(cpu=True)
state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
