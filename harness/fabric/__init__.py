"""Measures the network under the collectives: sizes, speeds, thresholds. Only the ranks import torch."""
