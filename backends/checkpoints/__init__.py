"""Checkpoints that every backend reads: live pieces of parameters, and files of whole tensors."""
