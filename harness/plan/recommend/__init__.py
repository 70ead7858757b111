"""Which strategy and batch to take for a model on so many GPUs, why not the others, and how to measure it."""
