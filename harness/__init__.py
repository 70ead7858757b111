"""Runs one fine-tuning job under every data-parallel sharding strategy and compares what happened."""
