"""Training runs that others measured on GPUs, and what the model of memory and time predicts for them."""
