"""The largest micro-batch and sequence that fit, predicted first and then found by real runs."""
