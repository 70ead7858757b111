"""How a model becomes a distributed engine: one adapter class per library, many strategies by parameter.

Knows torch, deepspeed and accelerate; knows nothing of the harness that drives it.
"""
