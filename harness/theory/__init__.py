"""Closed forms of memory and communication. Pure arithmetic, no torch.

A module per strategy family gives `model_states(workload)` and `collectives(workload)`, derived from the
sources of torch 2.13.0, DeepSpeed 0.19.8 and Accelerate 1.15 and fitted to no measurement; `families` lists
them. The comparison with what was measured is in `harness.compare`.
"""
