"""Public training scripts, observed unchanged, next to the harness's own runs of their jobs."""
