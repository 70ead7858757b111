"""What runs inside the ranks: model, data, loop and probes. Torch lives here and in backends."""
