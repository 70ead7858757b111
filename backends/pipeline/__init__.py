"""Pipeline parallelism by torch.distributed.pipelining: the model is cut at its blocks."""
