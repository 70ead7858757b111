"""How a model becomes a distributed engine: one adapter class per library, many strategies by parameter.

Knows torch, deepspeed and accelerate; knows nothing of the harness that drives it. Its import path is
`harness.backends`, a link to this folder, so that no folder of a user's can take its place.
"""
