"""Kinds of optimizers, their live groups and states, and gradients up to their clipping."""
