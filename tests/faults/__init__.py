"""Faults planted in real ranks, at a phase drawn by a seed: every one must leave a truthful record."""
