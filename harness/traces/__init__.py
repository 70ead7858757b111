"""Traces of torch.profiler: what computed, communicated, copied and waited. Loads no torch."""
