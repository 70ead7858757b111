"""Closed forms of communication and memory. Pure arithmetic, no torch."""
