"""Snapshots of torch's CUDA allocator: what was alive at the peak, and whose it was. Loads no torch."""
