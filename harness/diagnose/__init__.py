"""Which step two runs part at, and which tensors part there."""
