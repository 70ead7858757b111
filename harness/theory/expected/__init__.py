"""Which collectives each implementation makes for a job, derived from the libraries' sources.

torch 2.13.0, DeepSpeed 0.19.8, Accelerate 1.15. One module per library; nothing here was fitted to a
measurement, and the comparison with what was measured lives in `harness.compare.volume`.
"""
